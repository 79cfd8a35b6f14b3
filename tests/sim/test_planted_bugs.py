"""The test of the tests: classic scheduler bugs, planted one by one, are each found by the simulation, soon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.block_pool import BlockPool
from servekit.deadlines import Deadlines
from servekit.kv_memory import KVMemory
from servekit.messages import PromptLogprobs, Row, StepPlan, StepResult
from servekit.policy import Fair, FirstComeFirstServed, Shortest
from servekit.quarantine import Quarantine
from servekit.scheduler_config import SchedulerConfig
from servekit.sequence import FinishReason, Sequence, Status
from servekit.simulated_worker import SimulatedWorker, Violation
from servekit.simulation import Arrival, Scenario, Simulation
from servekit.workload_manager import WorkloadManager
from tests.sim.scenarios import failure, make_scenario

MOST_STEPS = 100_000

Patch = Callable[[type, str, Any], None]


def double_free(patch: Patch) -> None:
    def move_out(self: KVMemory, sequence: Sequence, fence_step_id: int | None) -> None:
        original(self, sequence, fence_step_id)
        self.pool._free.append(sequence.block_table[0])

    original = KVMemory.move_out
    patch(KVMemory, "move_out", move_out)


def stale_result_applied(patch: Patch) -> None:
    """A result of the dead worker goes to the step of the same name."""

    def commit(self: WorkloadManager, result: StepResult, now: float) -> Any:
        return original(self, replace(result, epoch=self.epoch), now)

    original = WorkloadManager.commit
    patch(WorkloadManager, "commit", commit)


def result_of_an_earlier_incarnation_applied(patch: Patch) -> None:
    def forget_seat(self: Sequence) -> None:
        incarnation = self.incarnation
        original(self)
        self.incarnation = max(incarnation, 0)

    original = Sequence.forget_seat
    patch(Sequence, "forget_seat", forget_seat)


def placeholder_leak(patch: Patch) -> None:
    """What was being sampled for a preempted sequence is still counted when it comes back."""

    def forget_seat(self: Sequence) -> None:
        num_pending = getattr(self, "num_pending", 0)
        original(self)
        self.num_pending = num_pending

    original = Sequence.forget_seat
    patch(Sequence, "forget_seat", forget_seat)


def victim_scheduled_twice(patch: Patch) -> None:
    """Somebody who is in the step already is preempted, and gets a seat again in the same step."""

    def find_victim(self: WorkloadManager, sequence: Sequence) -> Sequence | None:
        return next((s for s in self._running[1:] if s is not sequence), None)

    patch(WorkloadManager, "_find_victim", find_victim)


def uncommitted_block_published(patch: Patch) -> None:
    def publish(self: KVMemory, sequence: Sequence) -> None:
        num_computed = sequence.num_computed
        sequence.num_computed = sequence.num_tokens
        original(self, sequence)
        sequence.num_computed = num_computed

    original = KVMemory.publish
    patch(KVMemory, "publish", publish)


def lost_block(patch: Patch) -> None:
    def settle(self: BlockPool, step_id: int) -> None:
        original(self, step_id)
        if self._free and step_id % 100 == 99:
            self._free.popleft()

    original = BlockPool.settle
    patch(BlockPool, "settle", settle)


def copy_forgotten(patch: Patch) -> None:
    """A fork writes into the block that it shares with its leader."""

    def move_in(self: KVMemory, sequence: Sequence, beginning: Any) -> None:
        original(self, sequence, beginning)
        beginning.partial = None

    original = KVMemory.move_in
    patch(KVMemory, "move_in", move_in)


def prefix_without_history(patch: Patch) -> None:
    """Blocks with equal tokens are taken for equal, whatever came before them."""

    def hash_blocks(self: KVMemory, sequence: Sequence, num_blocks: int) -> None:
        for index in range(len(sequence.block_hashes), num_blocks):
            tokens = sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            sequence.block_hashes.append(bytes(str(tokens), "ascii"))

    patch(KVMemory, "_hash_blocks", hash_blocks)


def deadline_ignored(patch: Patch) -> None:
    def expire(self: WorkloadManager, now: float) -> list[Sequence]:
        self._deadlines = Deadlines()
        return []

    patch(WorkloadManager, "expire", expire)


def queue_jumped(patch: Patch) -> None:
    def first(self: FirstComeFirstServed, shorter_than: int | None = None) -> Sequence | None:
        entries = [entry for entry in self._queue._heap if self._queue._is_waiting(entry)]
        return max(entries)[-1] if entries else None

    patch(FirstComeFirstServed, "first", first)


def nobody_is_charged(patch: Patch) -> None:
    """Service is not counted, so the tenant whose name sorts first is always the least served."""
    patch(Fair, "charge", lambda self, sequence, num_tokens: None)


def the_oldest_starves(patch: Patch) -> None:
    patch(Shortest, "is_overdue", lambda self, oldest: False)


def the_oldest_waits_too_long(patch: Patch) -> None:
    patch(Shortest, "is_overdue", lambda self, oldest: self._num_tokens_passed >= 3 * self.patience(oldest))


def fence_forgotten(patch: Patch) -> None:
    """The blocks of whoever leaves are free at once, though a step in flight still writes to them."""

    def release(self: BlockPool, blocks: Any, fence_step_id: int | None = None) -> None:
        original(self, blocks, None)

    original = BlockPool.release
    patch(BlockPool, "release", release)


def ended_too_early(patch: Patch) -> None:
    def expire(self: WorkloadManager, now: float) -> list[Sequence]:
        return original(self, now + 0.001)

    original = WorkloadManager.expire
    patch(WorkloadManager, "expire", expire)


def expired_but_not_ended(patch: Patch) -> None:
    def expire(self: WorkloadManager, now: float) -> list[Sequence]:
        overdue = [s for s in self._sequences.values() if min(s.deadline_s, s.ttft_deadline_s) <= now]
        self._deadlines = Deadlines()
        return overdue

    patch(WorkloadManager, "expire", expire)


def standstill(patch: Patch) -> None:
    """Now and then the manager thinks that there is nothing to do."""

    def plan(self: WorkloadManager, now: float) -> Any:
        return None if self._next_step_id % 500 == 499 else original(self, now)

    original = WorkloadManager.plan
    patch(WorkloadManager, "plan", plan)


def aborted_but_not_ended(patch: Patch) -> None:
    def finish(self: WorkloadManager, sequence: Sequence, reason: FinishReason) -> bool:
        return reason is not FinishReason.ABORT and original(self, sequence, reason)

    original = WorkloadManager.finish
    patch(WorkloadManager, "finish", finish)


def token_after_the_end(patch: Patch) -> None:
    """The step in flight as a sequence is aborted still counts for it."""

    def finish(self: WorkloadManager, sequence: Sequence, reason: FinishReason) -> bool:
        was_alive = original(self, sequence, reason)
        sequence.incarnation -= was_alive
        return was_alive

    original = WorkloadManager.finish
    patch(WorkloadManager, "finish", finish)


def answer_too_long(patch: Patch) -> None:
    def end(self: WorkloadManager, sequence: Sequence, token_id: int) -> FinishReason | None:
        return original(self, sequence, token_id) if sequence.num_tokens >= sequence.max_length else None

    original = WorkloadManager._end
    patch(WorkloadManager, "_end", end)


def history_rewritten(patch: Patch) -> None:
    """A preempted sequence comes back without its newest token."""

    def preempt(self: WorkloadManager, victim: Sequence) -> None:
        original(self, victim)
        if victim.num_output_tokens:
            victim.token_ids.pop()

    original = WorkloadManager._preempt
    patch(WorkloadManager, "_preempt", preempt)


def budget_ignored(patch: Patch) -> None:
    def schedule(self: WorkloadManager, step: Any, sequence: Sequence, num_tokens: int, new_blocks: Any = ()) -> None:
        original(self, step, sequence, sequence.num_needed, new_blocks)

    original = WorkloadManager._schedule
    patch(WorkloadManager, "_schedule", schedule)


def work_left_over(patch: Patch) -> None:
    patch(WorkloadManager, "has_work", property(lambda self: True))


def livelock(patch: Patch) -> None:
    """The first is preempted as well: two sequences that cannot both fit take turns for ever."""

    def find_victim(self: WorkloadManager, sequence: Sequence) -> Sequence | None:
        return next((s for s in reversed(self._running) if s is not sequence), None)

    def preempt(self: WorkloadManager, victim: Sequence) -> None:
        self._running.remove(victim)
        self._unseat(victim)
        victim.status = Status.WAITING
        self.line.push(victim)

    patch(WorkloadManager, "_find_victim", find_victim)
    patch(WorkloadManager, "_preempt", preempt)


def prompt_explained_twice(patch: Patch) -> None:
    """What is computed again after a preemption is told again."""

    def explain_prompt(self: Sequence, told: PromptLogprobs) -> None:
        self.prompt_logprobs.extend(told.logprobs)

    patch(Sequence, "explain_prompt", explain_prompt)


def prompt_explained_with_holes(patch: Patch) -> None:
    """Blocks are found in the prefix cache or with a leader, and nobody says what the model thinks of them."""

    def explain_prompt(self: Sequence, told: PromptLogprobs) -> None:
        self.prompt_logprobs.extend(told.logprobs[max(0, len(self.prompt_logprobs) + 1 - told.start) :])

    patch(Sequence, "explain_prompt", explain_prompt)
    patch(Sequence, "num_shareable", property(lambda self: self.num_tokens - 1))


def the_token_behind_a_chunk_forgotten(patch: Patch) -> None:
    def plan(self: WorkloadManager, now: float) -> Any:
        plan = original(self, now)
        if plan is None:
            return None
        return replace(plan, rows=tuple(replace(row, token_ids=row.token_ids[: row.num_tokens]) for row in plan.rows))

    original = WorkloadManager.plan
    patch(WorkloadManager, "plan", plan)


def logprobs_of_somebody_else(patch: Patch) -> None:
    """Logprobs are aligned with those who ask, not with those who sample."""

    def commit(self: WorkloadManager, result: StepResult, now: float) -> Any:
        told = sorted(result.logprobs, key=lambda one: one is None)
        return original(self, replace(result, logprobs=tuple(told)), now)

    original = WorkloadManager.commit
    patch(WorkloadManager, "commit", commit)


def everybody_is_convicted(patch: Patch) -> None:
    """Two losses will do, without anybody having been alone."""

    def judge(self: Quarantine, under_way: list[Sequence]) -> list[Sequence]:
        original(self, under_way)
        return [sequence for sequence in under_way if sequence.num_losses > 1]

    original = Quarantine.judge
    patch(Quarantine, "judge", judge)


def nobody_is_convicted(patch: Patch) -> None:
    def judge(self: Quarantine, under_way: list[Sequence]) -> list[Sequence]:
        original(self, under_way)
        return []

    original = Quarantine.judge
    patch(Quarantine, "judge", judge)


def suspects_are_computed_together(patch: Patch) -> None:
    """The suspects are in line like everybody else, so whoever is beside the guilty one is guilty too."""

    def plan(self: WorkloadManager, now: float) -> Any:
        while self.quarantine:
            suspect = self.quarantine.first
            self.quarantine.discard(suspect)
            if suspect.status is Status.WAITING:
                self._line_up(suspect)
        return original(self, now)

    original = WorkloadManager.plan
    patch(WorkloadManager, "plan", plan)


BUGS = [
    double_free,
    stale_result_applied,
    result_of_an_earlier_incarnation_applied,
    placeholder_leak,
    victim_scheduled_twice,
    uncommitted_block_published,
    lost_block,
    copy_forgotten,
    prefix_without_history,
    deadline_ignored,
    queue_jumped,
    nobody_is_charged,
    the_oldest_starves,
    the_oldest_waits_too_long,
    fence_forgotten,
    ended_too_early,
    expired_but_not_ended,
    standstill,
    aborted_but_not_ended,
    token_after_the_end,
    answer_too_long,
    history_rewritten,
    budget_ignored,
    work_left_over,
    livelock,
    prompt_explained_twice,
    prompt_explained_with_holes,
    the_token_behind_a_chunk_forgotten,
    logprobs_of_somebody_else,
    everybody_is_convicted,
    nobody_is_convicted,
    suspects_are_computed_together,
]


# Found from outside as well, when the manager's own laws are not asked: by what workers, clients and tenants see.
SEEN_FROM_OUTSIDE = [*BUGS[1:3], *BUGS[4:]]


def steps_until_found() -> int | None:
    """How many steps the simulation takes to find something; None, if it does not within MOST_STEPS."""
    num_steps = seed = 0
    while num_steps < MOST_STEPS:
        simulation = Simulation(make_scenario(seed))
        try:
            simulation.run()
        except Exception:
            return num_steps + simulation.num_steps
        num_steps += simulation.num_steps
        seed += 1
    return None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch.setattr)
    found_after = steps_until_found()
    assert found_after is not None, f"not found within {MOST_STEPS:,} steps"
    print(f"{bug.__name__}: found after {found_after:,} steps")


@pytest.mark.parametrize("bug", SEEN_FROM_OUTSIDE, ids=lambda bug: bug.__name__)
def test_planted_bug_is_seen_from_outside(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkloadManager, "check", lambda self: None)
    bug(monkeypatch.setattr)
    assert steps_until_found() is not None, f"not found within {MOST_STEPS:,} steps"


def test_what_a_worker_cannot_have_been_told_is_a_violation() -> None:
    worker = SimulatedWorker(num_blocks=2, block_size=2, max_num_batched_tokens=4)
    row = Row(0, 0, 2, (1, 2), (0,), True)
    with pytest.raises(Violation, match="scheduled twice"):
        worker.execute(StepPlan(0, 0, (), (row, row)))
    with pytest.raises(Violation, match="a step of 0 tokens, the budget is 4"):
        worker.execute(StepPlan(0, 0, (), ()))


def test_a_simulation_that_runs_in_circles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "_most_steps", lambda self: 5)
    with pytest.raises(Violation, match="no end after 6 steps"):
        Simulation(make_scenario(0)).run()


def test_blocks_that_nobody_has_in_the_end_are_missed() -> None:
    scheduler = SchedulerConfig(num_blocks=8, block_size=2, max_model_len=99, max_num_seqs=2, max_num_batched_tokens=8)
    arrival = Arrival(name=0, at_s=0.0, prompt=(5,), max_tokens=3)
    simulation = Simulation(Scenario(scheduler=scheduler, arrivals=(arrival,)), check=False)
    simulation.manager.memory.pool._free.pop()
    with pytest.raises(Violation, match="1 blocks were lost"):
        simulation.run()


def test_preempting_the_first_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    livelock(monkeypatch.setattr)
    monkeypatch.setattr(WorkloadManager, "check", lambda self: None)
    errors = [str(failure(make_scenario(seed))) for seed in range(100)]
    assert any("was preempted, and was the first" in error for error in errors)
