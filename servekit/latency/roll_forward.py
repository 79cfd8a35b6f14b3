"""Simulate the next steps of a copy of a workload manager, with step times of the latency model.

The copy is a real WorkloadManager with the state of the one that serves, so it follows every rule of the scheduler:
slots, blocks, chunks, prefixes in the cache, the policy, preemptions. Lengths of answers that have not ended are drawn
at random. Later arrivals are not predicted; under a policy that lets them overtake, other sequences end later than
predicted. Drafts are not predicted either: each step gives a sequence one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sequence_

from servekit.latency.answer_lengths import AnswerLengths
from servekit.latency.latency_model import LatencyModel, StepWork
from servekit.protocol.messages import StepResult
from servekit.scheduler.checkpoint import CONTINUES, ENDS, ManagerState, restore_manager
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import Sequence

_GOLDEN_RATIO = 0.6180339887498949  # its multiples leave no large gap between 0 and 1, however many there are
_MASK = 2**64 - 1


class RollForward:
    """A copy of a manager, and its virtual time."""

    def __init__(
        self,
        config: SchedulerConfig,
        state: ManagerState,
        model: LatencyModel,
        lengths: AnswerLengths,
        now_s: float,
        in_flight_s: Sequence_[float] = (),
        draw: int = 0,
        idle_s: float = 0.0,
    ) -> None:
        """`in_flight_s` says when each step in flight is expected to be done. Each `draw` uses different lengths.

        `idle_s` is how long the worker has been idle, if nothing is in flight.
        """
        self.now_s = now_s
        self.num_steps = 0
        self.first_tokens_s: dict[int, float] = {}  # by sequence id, of those that had none
        self.ends_s: dict[int, float] = {}
        self._manager = restore_manager(config, state)
        self._model = model
        self._lengths = lengths
        self._draw = draw
        self._idle_s = idle_s
        self._final_lengths: dict[int, int] = {}  # of answers, by sequence id
        self._done_s = deque(in_flight_s)
        assert len(self._done_s) == self._manager.num_in_flight

    @property
    def num_waiting(self) -> int:
        """How many sequences wait in the copy."""
        return self._manager.num_waiting

    def step(self) -> bool:
        """Simulate until the next step is done.

        Takes as long as planning and committing it. False if no work is left.
        """
        manager = self._manager
        manager.expire(self.now_s)
        while (plan := manager.plan(self.now_s)) is not None:
            began_s = max(self.now_s, self._done_s[-1]) if self._done_s else self.now_s
            num_ahead = self.num_steps + len(self._done_s)
            work = StepWork.of(plan, self._idle_s if not num_ahead else 0.0)
            self._done_s.append(began_s + self._model.seconds_of(work, num_ahead))
        if not self._done_s:
            return False
        self.now_s = max(self.now_s, self._done_s.popleft())
        step = manager.steps_in_flight[0]
        token_ids = tuple([ENDS if self._ends(sequence) else CONTINUES for sequence, _ in step.sampled])
        for token in manager.commit(StepResult(manager.epoch, step.step_id, token_ids, 0.0), self.now_s):
            sequence = token.sequence
            if sequence.num_output_tokens == 1:
                self.first_tokens_s[sequence.sequence_id] = self.now_s
            if token.finish_reason is not None:
                self.ends_s[sequence.sequence_id] = self.now_s
        self.num_steps += 1
        return True

    def _ends(self, sequence: Sequence) -> bool:
        """Whether the next token of a sequence is its last one."""
        number = sequence.num_output_tokens + 1
        final_length = self._final_lengths.get(sequence.sequence_id)
        if final_length is None:
            share = _share(sequence.sequence_id, self._draw)
            final_length = self._lengths.draw(number - 1, sequence.sampling.max_tokens, share)
            self._final_lengths[sequence.sequence_id] = final_length
        return number >= final_length


def _share(sequence_id: int, draw: int) -> float:
    """Return a number from 0 to 1: the quantile of its length that an answer gets in this draw.

    In one draw, those of several sequences are as good as random: the mixing function of SplitMix64, Steele et al.,
    "Fast Splittable Pseudorandom Number Generators", 2014. Those of one sequence in several draws are spread evenly, so
    that the mean of the draws varies less than with random ones: Weyl, "Über die Gleichverteilung von Zahlen", 1916.
    """
    mixed = (sequence_id + 1) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return ((mixed ^ mixed >> 31) / 2**64 + draw * _GOLDEN_RATIO) % 1.0
