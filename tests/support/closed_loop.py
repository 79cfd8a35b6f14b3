"""Play clients that ask again as soon as they have an answer, in virtual time: what drafts gain, they gain as tokens.

The manager is the real one. The device is a table of times, and drafts are right by chance.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean

from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager

MAX_DRAFTS = 4
# These as in workers/speculation/draft_model.py.
MAX_CATCH_UP_TOKENS, MAX_WANTED_CATCH_UP_TOKENS = 256, 2048
MIN_DEMAND, MAX_DEMAND = 3, 7
NUM_COLD = 2  # steps with drafts that take `cold_s` more


@dataclass(frozen=True, slots=True)
class Device:
    """What a step takes: `step_s`, and `position_s` for each position beyond the first `num_free`.

    The drafter takes `round_s` for a round, which makes one more draft for each sequence, `row_s` more for each of
    these, and `computed_s` for each token that it computes of prompts, or to make up for steps without drafts.
    """

    step_s: float
    num_free: int
    position_s: float
    round_s: float = 0.0
    row_s: float = 0.0
    computed_s: float = 0.0
    cold_s: float = 0.0  # of the first steps with drafts
    idle_s: float = 0.0  # the device is idle so long before a step that was planned while none was in flight

    def model_s(self, num_positions: int) -> float:
        """The model's time, in seconds."""
        return self.step_s + self.position_s * max(0, num_positions - self.num_free)


class _Drafter:
    """Counts what a draft model computes: a round for each draft, prompts, and what it has missed."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._num_missed: dict[int, int] = {}  # tokens, by slot
        self._demand = self._num_drafting = 0
        self._is_asked = False

    def draft(self, plan: StepPlan) -> tuple[dict[int, int], float, float]:
        """Return how many drafts are made for each slot, and how long that and the prompts take."""
        device, missed = self._device, self._num_missed
        has_drafts = any(chunk.num_drafts for chunk in plan.chunks)
        self._demand = min(MAX_DEMAND, self._demand + 1) if self._is_asked else max(0, self._demand - 1)
        self._is_asked = has_drafts
        self._num_drafting += has_drafts
        is_wanted = self._demand >= MIN_DEMAND
        for assignment in plan.slot_assignments:
            missed[assignment.slot] = 0
        made: dict[int, int] = {}
        num_computed = num_prompt_tokens = 0
        num_left = MAX_WANTED_CATCH_UP_TOKENS if is_wanted else MAX_CATCH_UP_TOKENS
        for chunk in plan.chunks:
            num_known = chunk.num_tokens - chunk.num_drafts
            if num_known > 1 and chunk.start + num_known > MAX_CATCH_UP_TOKENS:
                num_prompt_tokens += num_known
            elif not chunk.num_drafts:
                missed[chunk.slot] += num_known
            elif num_computed + missed[chunk.slot] <= num_left:
                num_computed += missed[chunk.slot]
                missed[chunk.slot] = 0
                made[chunk.slot] = chunk.num_drafts
            else:
                missed[chunk.slot] += num_known
        rounds_s = max(made.values(), default=0) * (device.round_s + device.row_s * len(made))
        cold_s = device.cold_s if has_drafts and self._num_drafting <= NUM_COLD else 0.0
        return made, rounds_s + cold_s, (num_computed + num_prompt_tokens) * device.computed_s


@dataclass(slots=True)
class Played:
    """What the clients got."""

    tokens_per_s: float
    num_drafted: int
    num_steps: int
    drafting: list[bool]  # whether each step had drafts
    ttft_s: float  # the mean time to the first token of an answer, without the answers that began in `first_tokens`


def play(
    device: Device,
    num_clients: int,
    acceptance: float | Callable[[int], float],
    lengths: DraftLengths | None,
    *,
    num_tokens: int = 4_000,
    first_tokens: int = 0,
    prompt_tokens: int = 48,
    answer_tokens: Sequence[int] = range(24, 105),
    requests_per_round: int | None = None,
    max_drafts: int = MAX_DRAFTS,
    noise: float = 0.1,
    seed: int = 0,
) -> Played:
    """Play until so many tokens are answered, and measure behind the first ones.

    `lengths` chooses the drafts; without it, speculation is off. A draft behind accepted ones is accepted with the
    probability `acceptance`, which may depend on the number of answered tokens. An answer has one of the lengths
    `answer_tokens`, the same ones in each play of a seed. With `requests_per_round`, clients ask so many requests, wait
    until all are answered, and begin again together: the load rises and falls.

    The manager sees times that are multiplied by a random number with the mean 1 and the deviation `noise`, and with
    noise, one step of a hundred takes three times as long. What it is judged by are the times without noise.
    """
    answers, noises, accepting = (random.Random(f"{seed} {name}") for name in ("answers", "noise", "acceptance"))
    manager = WorkloadManager(
        SchedulerConfig(
            num_blocks=num_clients * (10 + prompt_tokens // 16) + 8,
            block_size=16,
            max_model_len=prompt_tokens + 256,
            max_num_seqs=num_clients,
            max_num_batched_tokens=512,
            max_steps_in_flight=2,
            enable_prefix_caching=False,
            max_drafts=0 if lengths is None else max_drafts,
        )
    )
    if lengths is not None:
        manager.draft_lengths = lengths
    drafter, deviation = _Drafter(device), sqrt(log(1.0 + noise**2))  # of the factor's logarithm
    next_id, now_s, free_s, spent_s, began_s, num_answered = 0, 0.0, 0.0, 0.0, 0.0, 0
    arrivals_s: dict[int, float] = {}  # by id, of sequences that have no token yet
    ttfts_s: list[float] = []
    num_running = num_left = 0  # requests that are being answered, and those of the round that were not asked yet
    drafting: list[bool] = []
    in_flight: deque[tuple[float, StepPlan, dict[int, int], float, float, float]] = deque()

    def ask() -> None:
        nonlocal next_id, num_running
        num_running += 1
        sampling = SamplingParams(max_tokens=answers.choice(answer_tokens), ignore_eos=True)
        prompt = (5,) * prompt_tokens
        manager.add(AddSequence(sequence_id=next_id, prompt_token_ids=prompt, sampling=sampling, arrival_s=now_s))
        arrivals_s[next_id] = now_s
        next_id += 1

    def begin() -> None:
        nonlocal num_left
        num_left = (requests_per_round or num_clients) - num_clients
        for _ in range(num_clients):
            ask()

    begin()
    while num_answered < num_tokens:
        while (plan := manager.plan(now_s)) is not None:
            made, rounds_s, prompts_s = drafter.draft(plan)
            num_positions = sum(c.num_tokens - c.num_drafts + made.get(c.slot, 0) for c in plan.chunks)
            factor = noises.lognormvariate(-(deviation**2) / 2, deviation) if noise else 1.0
            factor *= 3.0 if noise and noises.random() < 0.01 else 1.0
            step_s = device.model_s(num_positions) + rounds_s + prompts_s
            idle_s = 0.0 if in_flight else device.idle_s
            free_s = max(now_s, free_s) + idle_s + factor * step_s
            in_flight.append((free_s, plan, made, idle_s + step_s, factor * rounds_s, factor * prompts_s))
        now_s, plan, made, step_s, rounds_s, prompts_s = in_flight.popleft()
        spent_s += step_s
        drafting.append(any(made.values()))
        counts, num_drafts = [], []
        likelihood = acceptance(num_answered) if callable(acceptance) else acceptance
        for chunk in plan.chunks:
            if chunk.samples:
                number, count = made.get(chunk.slot, 0), 1
                while count <= number and accepting.random() < likelihood:
                    count += 1
                counts.append(count)
                num_drafts.append(number)
        result = StepResult(
            plan.epoch,
            plan.step_id,
            (7,) * sum(counts),
            0.0,
            counts=tuple(counts),
            num_drafts=tuple(num_drafts) if any(num_drafts) else (),
            draft_time_s=rounds_s,
            draft_prompt_time_s=prompts_s,
        )
        for token in manager.commit(result, now_s):
            num_answered += 1
            arrival_s = arrivals_s.pop(token.sequence.sequence_id, None)
            if arrival_s is not None and num_answered > first_tokens:
                ttfts_s.append(now_s - arrival_s)
            if num_answered == first_tokens:
                began_s = spent_s
            if token.finish_reason is not None:
                num_running -= 1
                if requests_per_round is None:
                    ask()
                elif num_left:
                    num_left -= 1
                    ask()
        if not num_running:
            begin()
    num_drafted = 0 if lengths is None else sum(lengths.num_drafted)
    tokens_per_s = (num_answered - first_tokens) / (spent_s - began_s)
    return Played(tokens_per_s, num_drafted, len(drafting), drafting, fmean(ttfts_s))
