"""Sequences that a runner computes without a scheduler: first a context each, then a token in every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.gpu.session import BLOCK_SIZE
from benchmarks.gpu.timing import synchronize
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from workers.runner.model_runner import ModelRunner

GREEDY = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
MAX_TOKENS_PER_STEP = 8192  # in the steps that compute contexts


class Sequences:
    """Sequences of one length, in the first slots of a runner."""

    def __init__(
        self,
        runner: ModelRunner,
        num_sequences: int,
        context: int,
        max_steps: int,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        """Compute the contexts; `self.prefill_s` is the time that this took."""
        self.runner = runner
        self._length, self._num_sequences = context, num_sequences
        self._blocks_each = -(-(context + max_steps) // BLOCK_SIZE)
        at_once = max(1, MAX_TOKENS_PER_STEP // context)
        synchronize(runner.loaded.device)
        started = time.perf_counter()
        for first in range(0, num_sequences, at_once):
            slots = range(first, min(first + at_once, num_sequences))
            assignments = tuple(slot_assignment(slot, sampling, context) for slot in slots)
            runner.execute(StepPlan(0, 0, assignments, tuple(self._prompt_chunk(slot, context) for slot in slots)))
        self.prefill_s = time.perf_counter() - started

    def _prompt_chunk(self, slot: int, context: int) -> ScheduledChunk:
        vocab_size = self.runner.loaded.info.vocab_size
        token_ids = tuple((slot * 7919 + i * 31) % vocab_size for i in range(context))
        blocks = tuple(range(slot * self._blocks_each, (slot + 1) * self._blocks_each))
        return ScheduledChunk(slot, 0, context, token_ids, blocks, samples=True)

    def plans(self) -> Iterator[StepPlan]:
        while True:
            rows = tuple(
                ScheduledChunk(slot, self._length, 1, (), (), samples=True) for slot in range(self._num_sequences)
            )
            self._length += 1
            yield StepPlan(0, self._length, (), rows)

    def run(self, num_steps: int) -> list[float]:
        """Run steps with two in flight; return the seconds from the end of each step to the end of the next."""
        plans = self.plans()
        if not self.runner.runs_ahead:
            return [_execute_s(self.runner, next(plans)) for _ in range(num_steps)]
        pending = self.runner.launch(next(plans))
        times = [time.perf_counter()]
        for _ in range(num_steps):
            following = self.runner.launch(next(plans))
            pending.finish()
            times.append(time.perf_counter())
            pending = following
        pending.finish()
        return [b - a for a, b in pairwise(times)]

    def step_s(self, num_steps: int) -> float:
        """Return the median step time, after three steps that do not count."""
        self.run(3)
        return statistics.median(self.run(num_steps))


def slot_assignment(slot: int, sampling: SamplingParams, prompt_length: int) -> SlotAssignment:
    """Return what the workload manager would send. min_tokens forbids tokens only if there are stop tokens."""
    return SlotAssignment(
        slot=slot, sampling=sampling, prompt_length=prompt_length, stop_token_ids=sampling.stop_token_ids
    )


def _execute_s(runner: ModelRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.execute(plan)
    return time.perf_counter() - started
