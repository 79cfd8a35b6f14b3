"""The test of the tests: classic scheduler bugs, planted one by one, are each found by the simulation, soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from servekit.block_pool import BlockPool
from servekit.kv_memory import KVMemory
from servekit.messages import StepResult
from servekit.policy import Fair, FirstComeFirstServed, Shortest
from servekit.sequence import Sequence, Status
from servekit.simulation import Simulation
from servekit.workload_manager import WorkloadManager
from tests.sim.scenarios import make_scenario

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
        return original(self, StepResult(self.epoch, result.step_id, result.token_ids, 0.0), now)

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
        self._deadlines.clear()
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
    livelock,
]


def steps_until_found() -> Iterator[int]:
    """How many steps the simulation takes to find something; nothing, if it does not within MOST_STEPS."""
    num_steps = seed = 0
    while num_steps < MOST_STEPS:
        simulation = Simulation(make_scenario(seed))
        try:
            simulation.run()
        except Exception:
            yield num_steps + simulation.num_steps
            return
        num_steps += simulation.num_steps
        seed += 1


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_found(bug: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch.setattr)
    found_after = next(steps_until_found(), None)
    assert found_after is not None, f"not found within {MOST_STEPS:,} steps"
    print(f"{bug.__name__}: found after {found_after:,} steps")
