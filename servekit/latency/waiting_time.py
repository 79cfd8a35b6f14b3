"""Predict how long a new sequence would wait. Takes constant time, because many requests may come at once.

In the steady state of a full replica, each of its B running sequences takes the time of its prompt, and a step for each
token of its answer. So one sequence ends, and another one starts, every (steps of an answer + B prompts) / B. The
sequences before a new one start one after the other. The formula leaves out the policy, prefixes, and a start with
empty slots. `correction` makes up for these: it is the waiting time in a simulation with a copy of the real manager,
divided by the result of the formula.
"""

from __future__ import annotations

from collections.abc import Iterator

from servekit.latency.answer_lengths import AnswerLengths
from servekit.latency.latency_model import LatencyModel, StepWork
from servekit.latency.roll_forward import RollForward
from servekit.scheduler.checkpoint import save_manager
from servekit.scheduler.queued_work import WorkCount
from servekit.scheduler.workload_manager import WorkloadManager


class WaitingTime:
    """Predicts the waiting time for one workload manager."""

    MAX_STEPS = 500  # simulated at a time
    MAX_SEQUENCES = 256  # of a manager that is simulated: saving and restoring so many takes about 4 ms
    MIN_WAITING = 4  # fewer do not show a rate
    MAX_NUM_BLOCKS = 2**15  # of a manager that is simulated
    MAX_QUEUED_TOKENS = 2**18  # of its prompts, which are copied, too
    MAX_CORRECTION = 4.0

    def __init__(self, model: LatencyModel, lengths: AnswerLengths) -> None:
        self._model = model
        self._lengths = lengths
        self.correction = 1.0

    @property
    def is_known(self) -> bool:
        """Whether a step was measured and an answer has ended."""
        return self._model.is_known and self._lengths.is_known

    def seconds(self, manager: WorkloadManager, num_ahead: int, ahead: WorkCount | None = None) -> float:
        """Return how long a sequence waits until it starts, with so many waiting before it.

        `ahead` are the queued prompts that these are like, and of which all come before it; by default, all prompts.
        Returns 0 until a step was measured and an answer has ended, because requests are not refused for unknown times.
        """
        return self.correction * self._uncorrected_s(manager, num_ahead, ahead)

    def _uncorrected_s(self, manager: WorkloadManager, num_ahead: int, ahead: WorkCount | None = None) -> float:
        if not self.is_known:
            return 0.0
        config, length = manager.config, self._lengths.mean
        queued = manager.queued.total if ahead is None else ahead
        prompt_length = queued.num_tokens / queued.num_sequences if queued.num_sequences else 0.0
        missing_share = 1.0
        if manager.num_prompt_tokens:
            missing_share -= manager.num_cached_tokens / manager.num_prompt_tokens
        num_missing = missing_share * prompt_length
        num_fitting = config.num_blocks * config.block_size / max(1.0, prompt_length + length)
        # If waiting sequences are longer than running ones, the running ones show how many fit.
        num_slots = max(1, manager.num_running, min(config.max_num_seqs, int(num_fitting)))
        num_before = num_ahead + 1 - (num_slots - manager.num_running)  # that must start, each when another one ends
        num_kv_tokens = int(num_slots * (prompt_length + 0.5 * length))
        decode_s = self._model.seconds_of(StepWork(0, 0.0, num_slots, num_kv_tokens))
        nothing_s = self._model.seconds_of(StepWork(0, 0.0, 0, 0))
        # Prompts are computed together with decodes, so they only make existing steps longer.
        with_prompt = StepWork(int(num_missing), 0.5 * num_missing**2, num_slots, num_kv_tokens)
        prompt_s = self._model.seconds_of(with_prompt) - decode_s
        of_slots_s = max(0, num_before) * (length * decode_s / num_slots + prompt_s)
        num_steps = manager.num_prefill_tokens / config.max_num_batched_tokens
        rest_s = prompt_s * manager.num_prefill_tokens / max(1.0, num_missing) + num_steps * nothing_s
        # Those that come later, of other tenants, are not waited for.
        share_ahead = min(1.0, num_ahead / max(1, manager.num_waiting))
        if ahead is not None:
            share_ahead = ahead.num_tokens / max(1, manager.queued.total.num_tokens)
        return max(of_slots_s, share_ahead * rest_s)

    def may_play(self, manager: WorkloadManager) -> bool:
        """Whether copying a manager takes so little time that the event loop may wait for it."""
        return (
            manager.num_waiting + manager.num_running <= self.MAX_SEQUENCES
            and manager.config.num_blocks <= self.MAX_NUM_BLOCKS
            and manager.queued.total.num_tokens <= self.MAX_QUEUED_TOKENS
        )

    def refresh(self, manager: WorkloadManager, now_s: float, in_flight_s: list[float]) -> Iterator[None]:
        """Correct the formula: simulate with a copy of the manager until all waiting sequences have started.

        Others may run wherever it yields: before and after the copy is made, and after each step.
        """
        num_waiting = manager.num_waiting
        if not self.may_play(manager) or num_waiting < self.MIN_WAITING or not self._model.is_known:
            self.correction += 0.1 * (1.0 - self.correction)  # what was learned from an earlier queue fades
            return
        expected_s = self._uncorrected_s(manager, num_waiting - 1)
        state = save_manager(manager)
        yield
        roll = RollForward(manager.config, state, self._model, self._lengths, now_s, in_flight_s)
        yield
        while roll.num_waiting and roll.num_steps < self.MAX_STEPS and roll.step():
            yield
        num_started = num_waiting - roll.num_waiting
        if num_started >= self.MIN_WAITING and expected_s > 0.0:
            # On average, each other waiting sequence takes as long as these.
            ratio = (roll.now_s - now_s) * num_waiting / num_started / expected_s
            ratio = min(self.MAX_CORRECTION, max(1.0 / self.MAX_CORRECTION, ratio))
            self.correction += 0.5 * (ratio - self.correction)
