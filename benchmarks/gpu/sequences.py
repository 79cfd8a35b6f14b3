"""Sequences that a runner computes without a scheduler: a context each, and then a token in every step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from itertools import pairwise

from benchmarks.gpu.measuring import synchronize
from benchmarks.gpu.session import BLOCK_SIZE
from servekit.messages import Row, Seat, StepPlan
from servekit.sampling_params import SamplingParams
from workers.model_runner import ModelRunner

GREEDY = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
MOST_TOKENS = 8192  # of a step that computes contexts


class Sequences:
    """All of one length, one in each of a runner's first slots."""

    def __init__(
        self,
        runner: ModelRunner,
        num_sequences: int,
        context: int,
        most_steps: int,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        """Computes the contexts, which takes `self.prefill_s`."""
        self.runner = runner
        self._length, self._num_sequences = context, num_sequences
        self._blocks_each = -(-(context + most_steps) // BLOCK_SIZE)
        at_once = max(1, MOST_TOKENS // context)
        synchronize(runner.loaded.device)
        started = time.perf_counter()
        for first in range(0, num_sequences, at_once):
            slots = range(first, min(first + at_once, num_sequences))
            seats = tuple(seat_of(slot, sampling, context) for slot in slots)
            runner.execute(StepPlan(0, 0, seats, tuple(self._first_row(slot, context) for slot in slots)))
        self.prefill_s = time.perf_counter() - started

    def _first_row(self, slot: int, context: int) -> Row:
        vocab_size = self.runner.loaded.info.vocab_size
        token_ids = tuple((slot * 7919 + i * 31) % vocab_size for i in range(context))
        blocks = tuple(range(slot * self._blocks_each, (slot + 1) * self._blocks_each))
        return Row(slot, 0, context, token_ids, blocks, samples=True)

    def plans(self) -> Iterator[StepPlan]:
        while True:
            rows = tuple(Row(slot, self._length, 1, (), (), samples=True) for slot in range(self._num_sequences))
            self._length += 1
            yield StepPlan(0, self._length, (), rows)

    def run(self, num_steps: int) -> list[float]:
        """Seconds from each step's end to the next one's, each launched before the one before it is waited for."""
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
        """The median, after three steps that do not count."""
        self.run(3)
        return statistics.median(self.run(num_steps))


def seat_of(slot: int, sampling: SamplingParams, prompt_length: int) -> Seat:
    """As a manager gives it. Only one with tokens to stop at makes a minimum of tokens forbid any."""
    return Seat(slot=slot, sampling=sampling, prompt_length=prompt_length, stop_token_ids=sampling.stop_token_ids)


def _execute_s(runner: ModelRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.execute(plan)
    return time.perf_counter() - started
