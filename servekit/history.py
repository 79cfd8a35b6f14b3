"""What only a past can tell whoever watches: the last steps, first tokens and ends, and how fast tokens came.

The engine writes it as it goes: once or twice for a step, once for a first token and once for an end, never for each
token. All of it is bounded, and is counted together only when somebody asks. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from msgspec.structs import replace

from servekit.live_view import MOST_ENDED, MOST_STEPS, LiveEnd, LiveStep
from servekit.messages import StepPlan, StepResult
from servekit.sequence import FinishReason, Sequence

MOST_FIRST_TOKENS = 512
FIRST_TOKENS_WINDOW_S = 60.0
RATE_WINDOW_TENTHS = 20


class History:
    """Of one server, since it began."""

    def __init__(self) -> None:
        self.num_steps = 0  # executed
        self.num_generated_tokens = 0
        self._steps: OrderedDict[int, LiveStep] = OrderedDict()  # by step_id, which no new worker begins anew
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MOST_FIRST_TOKENS)  # (when, after how long)
        self._ends: deque[LiveEnd] = deque(maxlen=MOST_ENDED)
        # [tenth of a second, tokens in it]: the one that is not over, and as many as the rate looks back.
        self._tenths: deque[list[int]] = deque(maxlen=RATE_WINDOW_TENTHS + 1)

    # -- what the engine tells -------------------------------------------------------------------------------------

    def step_sent(self, plan: StepPlan, now: float) -> LiveStep:
        """A step was handed to the worker; gives what is kept of it.

        Decode are the sequences in it that compute a single position and sample from it; all else is prefill.
        """
        num_decodes = sum(row.samples for row in plan.rows if row.num_tokens == 1)
        step = LiveStep(plan.step_id, now, plan.num_tokens - num_decodes, num_decodes, len(plan.rows), None)
        self._steps[step.step_id] = step
        if len(self._steps) > MOST_STEPS:
            self._steps.popitem(last=False)
        return step

    def step_done(self, result: StepResult, num_tokens: int, now: float) -> None:
        """Its result came, and so many tokens with it. Of a step that a worker took to its grave, none ever does."""
        self.num_steps += 1
        if (step := self._steps.get(result.step_id)) is not None:
            self._steps[step.step_id] = replace(step, duration_s=result.step_time_s)
        self.num_generated_tokens += num_tokens
        tenth = _tenth(now)
        if self._tenths and self._tenths[-1][0] == tenth:
            self._tenths[-1][1] += num_tokens
        else:
            self._tenths.append([tenth, num_tokens])

    def first_token(self, latency_s: float, now: float) -> None:
        """A sequence got its first token, so long after it arrived."""
        self._first_tokens.append((now, latency_s))

    def ended(self, sequence: Sequence, reason: FinishReason, first_token_s: float | None, now: float) -> None:
        """A sequence ended, with or without a token."""
        self._ends.append(
            LiveEnd(
                sequence_id=sequence.sequence_id,
                finish_reason=str(reason),
                num_prompt_tokens=sequence.prompt_length,
                num_output_tokens=sequence.num_output_tokens,
                max_tokens=sequence.sampling.max_tokens,
                arrival_s=sequence.arrival_s,
                ended_s=now,
                first_scheduled_s=sequence.first_scheduled_s,
                first_token_s=first_token_s,
                num_preemptions=sequence.num_preemptions,
            )
        )

    # -- what others may know --------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[LiveStep]:
        """The last ones, newest last."""
        return list(self._steps.values())

    @property
    def ends(self) -> list[LiveEnd]:
        """The last ones, newest last."""
        return list(self._ends)

    def tokens_per_s(self, now: float) -> float:
        """In the last two seconds that are whole tenths: the tenth that is not over would make the figure flicker."""
        tenth = _tenth(now)
        num_tokens = sum(num for when, num in self._tenths if tenth - RATE_WINDOW_TENTHS <= when < tenth)
        return num_tokens * 10 / RATE_WINDOW_TENTHS

    def first_token_percentiles(self, *percents: int, now: float) -> list[float | None]:
        """Seconds until the first token in the last minute, by nearest rank; None each where there was none."""
        latencies = sorted(latency for when, latency in self._first_tokens if when > now - FIRST_TOKENS_WINDOW_S)
        return [latencies[-(-percent * len(latencies) // 100) - 1] if latencies else None for percent in percents]


def _tenth(now: float) -> int:
    """In which tenth of a second that is."""
    return int(now * 10)
