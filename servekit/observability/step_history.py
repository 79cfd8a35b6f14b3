"""Record the recent past for live views: the last steps, first tokens and finished sequences, and the token rate.

The engine reports each event once, and never once per token. All records are bounded. Rates and percentiles are
computed only when a live view reads them. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from msgspec.structs import replace

from servekit.observability.live_frames import MAX_ENDED, MAX_STEPS, LiveEnd, LiveStep
from servekit.observability.observer import Observer, StepSummary
from servekit.protocol.messages import StepResult
from servekit.scheduler.sequence import FinishReason, Sequence

MAX_FIRST_TOKENS = 512
FIRST_TOKENS_WINDOW_S = 60.0
RATE_WINDOW_TENTHS = 20


class StepHistory(Observer):
    """The recent past of one server."""

    def __init__(self) -> None:
        self.num_steps = 0  # executed since the server began
        self.num_generated_tokens = 0
        self._num_sent = 0  # steps, of all replicas
        self._steps: OrderedDict[tuple[int, int], LiveStep] = OrderedDict()  # by replica and step id
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_FIRST_TOKENS)  # (when, latency)
        self._ends: deque[LiveEnd] = deque(maxlen=MAX_ENDED)
        # [tenth of a second, tokens in it]: the current tenth, and those in the window of the rate.
        self._tenths: deque[list[int]] = deque(maxlen=RATE_WINDOW_TENTHS + 1)

    # -- events -------------------------------------------------------------------------------------------------------

    def of_replica(self, replica: int) -> Observer:
        """What listens to the steps of one replica."""
        return _ReplicaSteps(self, replica)

    def add_step(self, replica: int, step: StepSummary, now_s: float) -> None:
        """Record a step that was sent."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        self._steps[replica, step.step_id] = LiveStep(
            number,
            now_s,
            step.num_prefill_tokens,
            step.num_decode_tokens,
            step.num_sequences,
            duration_s=None,
            replica=replica,
        )
        if len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)

    def add_result(self, replica: int, result: StepResult, num_tokens: int, now_s: float) -> None:
        """Record that a step was done."""
        self.num_steps += 1
        if (step := self._steps.get((replica, result.step_id))) is not None:
            self._steps[replica, result.step_id] = replace(step, duration_s=result.step_time_s)
        self.num_generated_tokens += num_tokens
        tenth = _tenth(now_s)
        if self._tenths and self._tenths[-1][0] == tenth:
            self._tenths[-1][1] += num_tokens
        else:
            self._tenths.append([tenth, num_tokens])

    def tokens_delivered(
        self, first_token_latencies_s: list[float], inter_token_latencies_s: list[float], now_s: float
    ) -> None:
        self._first_tokens.extend((now_s, latency_s) for latency_s in first_token_latencies_s)

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        self._ends.append(
            LiveEnd(
                sequence_id=sequence.sequence_id,
                finish_reason=str(reason),
                num_prompt_tokens=sequence.prompt_length,
                num_output_tokens=num_tokens,
                max_tokens=sequence.sampling.max_tokens,
                arrival_s=sequence.arrival_s,
                ended_s=now_s,
                first_scheduled_s=sequence.first_scheduled_s,
                first_token_s=first_token_s,
                num_preemptions=sequence.num_preemptions,
            )
        )

    # -- what live views read -----------------------------------------------------------------------------------------

    @property
    def steps(self) -> list[LiveStep]:
        """The last steps, newest last. A step has no duration while it runs, or if its worker was lost."""
        return list(self._steps.values())

    @property
    def ends(self) -> list[LiveEnd]:
        """The sequences that ended last, newest last."""
        return list(self._ends)

    def tokens_per_s(self, now_s: float) -> float:
        """The token rate over the last two seconds of whole tenths. The current tenth would make the rate flicker."""
        tenth = _tenth(now_s)
        num_tokens = sum(num for when, num in self._tenths if tenth - RATE_WINDOW_TENTHS <= when < tenth)
        return num_tokens * 10 / RATE_WINDOW_TENTHS

    def first_token_percentiles(self, *percents: int, now_s: float) -> list[float | None]:
        """Percentiles of time to first token in the last minute, by nearest rank; None if there was no token."""
        latencies = sorted(latency for when, latency in self._first_tokens if when > now_s - FIRST_TOKENS_WINDOW_S)
        return [latencies[-(-percent * len(latencies) // 100) - 1] if latencies else None for percent in percents]


class _ReplicaSteps(Observer):
    """Records the steps of one replica."""

    def __init__(self, history: StepHistory, replica: int) -> None:
        self._history = history
        self._replica = replica

    def step_sent(self, step: StepSummary, is_alone: bool, now_s: float) -> None:
        self._history.add_step(self._replica, step, now_s)

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        self._history.add_result(self._replica, result, num_tokens, now_s)


def _tenth(time_s: float) -> int:
    """The tenth of a second that contains this time."""
    return int(time_s * 10)
