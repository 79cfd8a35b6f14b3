"""Claims about deferred tokens: a sequence that must wait for its mask holds up no other, and loses no token."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from msgspec.structs import replace

from servekit.errors import WorkerLost
from servekit.protocol.messages import StepPlan
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.policy import Fair
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import SimulatedWorker
from tests.support.scheduler import (
    add_prompt,
    add_sequence,
    assert_idle,
    make_manager,
    make_prompt,
    make_worker,
    reference,
    run,
)


class Driver:
    """Plans as many steps as the manager lets in flight, and executes one at a time."""

    def __init__(self, manager: WorkloadManager) -> None:
        self.manager = manager
        self.worker: SimulatedWorker = make_worker(manager)
        self.plans: list[StepPlan] = []
        self.sent: list[StepPlan] = []

    def step(self, deferring: Collection[int] = ()) -> list[SequenceToken]:
        while (plan := self.manager.plan(0.0)) is not None:
            self.plans.append(plan)
            self.sent.append(plan)
        tokens = self.manager.commit(self.worker.execute(self.plans.pop(0), deferring), 0.0)
        self.manager.check()
        return tokens

    def finish(self) -> None:
        while self.plans:
            self.manager.commit(self.worker.execute(self.plans.pop(0)), 0.0)
        run(self.manager, self.worker)
        assert_idle(self.manager)


def slots(*sequences: Sequence) -> set[int]:
    return {sequence.slot for sequence in sequences if sequence.slot is not None}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_deferred_token_holds_up_no_other_sequence(depth: int) -> None:
    """Whatever the steps behind it, which are in flight already, report for it."""
    manager = make_manager(max_steps_in_flight=depth)
    driver = Driver(manager)
    slow, other = add_sequence(manager, 0, max_tokens=12), add_sequence(manager, 1, max_tokens=12)
    driver.step()
    for number in range(10):
        tokens = driver.step(slots(slow))
        assert [token.sequence for token in tokens] == [other], f"step {number}"
        assert not slow.num_output_tokens > 1
    driver.finish()
    assert slow.output_token_ids == reference(slow)
    assert other.output_token_ids == reference(other)


def test_a_deferred_sequence_keeps_its_slot_and_blocks() -> None:
    manager = make_manager(max_steps_in_flight=2)
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, prompt_length=7, max_tokens=9)
    driver.step()
    slot, table = sequence.slot, sequence.kv.table.copy()
    for _ in range(20):
        assert driver.step(slots(sequence)) == []
    assert sequence.slot == slot and sequence.kv.table[: len(table)] == table
    assert len(sequence.kv.table) <= len(table) + 1, "for the position of the step in flight whose result is dropped"
    assert [len(plan.slot_assignments) for plan in driver.sent] == [1] + [0] * (len(driver.sent) - 1)
    assert {chunk.num_tokens for plan in driver.sent[1:] for chunk in plan.chunks} == {1}
    driver.finish()
    assert sequence.output_token_ids == reference(sequence)
    assert sequence.num_preemptions == 0 and manager.num_deferrals > 5


def test_forks_begin_although_their_leaders_first_token_is_deferred() -> None:
    manager = make_manager(max_steps_in_flight=2)
    driver = Driver(manager)
    prompt, sampling = make_prompt(0, 8), SamplingParams(max_tokens=6)
    leader = add_prompt(manager, 0, prompt, sampling)
    fork = add_prompt(manager, 1, prompt, sampling, leader_id=0)
    driver.step({7, *range(7)})  # whatever slot the leader got
    assert leader.num_output_tokens == 0
    while not fork.num_output_tokens:
        driver.step(slots(leader))
    assert fork.num_cached_tokens == 7, "all that the leader had computed but the last"
    assert leader.num_output_tokens == 0
    driver.finish()
    assert leader.output_token_ids == fork.output_token_ids == reference(fork)


def test_a_block_that_others_share_already_may_be_completed_again() -> None:
    """The prompt fills its blocks: they are in the prefix cache when the last position is computed again."""
    manager = make_manager(max_steps_in_flight=2)
    driver = Driver(manager)
    prompt = make_prompt(0, 8)
    slow = add_prompt(manager, 0, prompt, SamplingParams(max_tokens=6))
    driver.step(range(8))
    longer = add_prompt(manager, 1, [*prompt, 5, 6], SamplingParams(max_tokens=6))
    driver.step(slots(slow))
    while not longer.num_output_tokens:
        driver.step(slots(slow))
    assert longer.num_cached_tokens == 8
    driver.finish()
    assert slow.output_token_ids == reference(slow)
    assert longer.output_token_ids == reference(longer)


def test_prompt_logprobs_come_once_although_the_first_token_is_deferred() -> None:
    manager = make_manager(max_steps_in_flight=2)
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, prompt_length=7, max_tokens=3, prompt_logprobs=1, logprobs=1)
    driver.step(range(8))
    assert len(sequence.prompt_logprobs) == 6
    driver.step(slots(sequence))
    driver.finish()
    assert len(sequence.prompt_logprobs) == 6 and sequence.output_token_ids == reference(sequence)


def test_the_end_of_a_sequence_goes_before_its_deferral() -> None:
    """It was aborted, or its token is invalid: then there is nothing to defer."""
    manager = make_manager(max_steps_in_flight=2)
    worker = make_worker(manager)
    aborted, failed = (add_sequence(manager, number) for number in range(2))
    first, second = manager.plan(0.0), manager.plan(0.0)
    assert first is not None and second is not None
    manager.finish(aborted.sequence_id, FinishReason.ABORT)
    result = worker.execute(first, range(8))
    tokens = manager.commit(replace(result, failures=((1, "too complex"),)), 0.0)
    assert [(token.sequence, token.finish_reason) for token in tokens] == [(failed, FinishReason.ERROR)]
    assert manager.num_deferrals == 0
    manager.commit(worker.execute(second), 0.0)
    assert_idle(manager)


@pytest.mark.parametrize("index", [-1, 1])
def test_a_deferral_of_a_token_that_was_not_requested_is_a_lost_worker(index: int) -> None:
    manager = make_manager()
    worker = make_worker(manager)
    sequence = add_sequence(manager, 0)
    plan = manager.plan(0.0)
    assert plan is not None
    result = worker.execute(plan)
    with pytest.raises(WorkerLost):
        manager.commit(replace(result, deferred=(index,)), 0.0)
    assert sequence.num_output_tokens == 0 and manager.num_in_flight == 1


def test_a_deferred_suspect_stays_in_quarantine() -> None:
    """It is proved harmless by tokens beyond those of the crash, and a deferred step samples none."""
    manager = make_manager()
    driver = Driver(manager)
    suspect, other = add_sequence(manager, 0), add_sequence(manager, 1)
    for _ in range(2):
        driver.plans.clear()
        assert manager.plan(0.0) is not None
        manager.restart()
    driver.worker = make_worker(manager)
    assert manager.quarantine.first is suspect
    for _ in range(5):
        assert driver.step(range(8)) == []
        assert manager.quarantine.first is suspect and other.slot is None
    driver.finish()
    assert suspect.output_token_ids == reference(suspect) and other.output_token_ids == reference(other)


def test_what_is_computed_again_is_charged_again() -> None:
    """`fair` counts what steps compute: a tenant pays for the steps in which its sequence waits for a mask."""
    manager = make_manager(scheduling_policy="fair")
    driver = Driver(manager)
    sequence = add_sequence(manager, 0, prompt_length=5)
    driver.step()
    for _ in range(3):
        driver.step(slots(sequence))
    assert isinstance(manager.waiting_queue, Fair)
    assert manager.waiting_queue.num_served_tokens[""] == sum(plan.num_tokens for plan in driver.sent)
    driver.finish()
