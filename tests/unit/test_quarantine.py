"""Claims about workers that are lost again and again: the guilty sequence is found, and nobody else pays for it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import WorkerLost
from servekit.messages import PromptLogprobs, Row, StepPlan, TokenLogprobs
from servekit.sequence import FinishReason, Sequence
from servekit.simulated_worker import SimulatedWorker
from servekit.workload_manager import WorkloadManager
from tests.unit.test_workload_manager import assert_at_rest, make_manager, make_sequence, make_worker, reference, run


def slots_of(plan: StepPlan | None) -> set[int]:
    assert plan is not None
    return {row.slot for row in plan.rows}


def is_deadly(plan: StepPlan, poison: Sequence, position: int) -> bool:
    def covers(row: Row) -> bool:
        return row.slot == poison.slot and row.start <= position < row.start + row.num_tokens

    return any(map(covers, plan.rows))


def serve(manager: WorkloadManager, poison: Sequence, position: int) -> tuple[int, list[Sequence]]:
    """Run with workers that end over `poison`: how many did, and who was convicted."""
    worker, num_losses, convicted = make_worker(manager), 0, []
    in_flight: list[StepPlan] = []
    for _ in range(10_000):
        while (plan := manager.plan(0.0)) is not None:
            in_flight.append(plan)
        if not manager.has_work:
            break
        plan = in_flight.pop(0)
        if is_deadly(plan, poison, position):
            num_losses, worker = num_losses + 1, make_worker(manager)
            in_flight.clear()
            for sequence in manager.restart():
                convicted.append(sequence)
                manager.finish(sequence, FinishReason.ERROR)
        else:
            manager.commit(worker.execute(plan), 0.0)
        manager.check()
    return num_losses, convicted


@pytest.mark.parametrize("position", [0, 3, 7, 9])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_the_sequence_that_workers_are_lost_over_is_the_only_one_to_fail(
    position: int, max_steps_in_flight: int
) -> None:
    manager = make_manager(max_steps_in_flight=max_steps_in_flight)
    sequences = [make_sequence(number, max_tokens=12, ignore_eos=True) for number in range(4)]
    for sequence in sequences:
        manager.add(sequence)
    poison = sequences[2]
    assert serve(manager, poison, position) == (3, [poison])
    for sequence in sequences:
        assert sequence is poison or sequence.output_token_ids == reference(sequence)
    assert_at_rest(manager)


def test_a_suspect_is_computed_alone_and_goes_free_when_it_has_proved_harmless() -> None:
    manager = make_manager(max_steps_in_flight=2)
    one, two = (make_sequence(number, prompt_length=6, max_tokens=9, ignore_eos=True) for number in range(2))
    manager.add(one)
    manager.add(two)
    manager.plan(0.0)
    assert manager.restart() == []
    assert len(slots_of(manager.plan(0.0))) == 2, "once is chance"
    assert manager.restart() == [] and len(manager.quarantine) == 2
    newcomer = make_sequence(2)
    manager.add(newcomer)
    worker, had_it_alone = make_worker(manager), []
    while (plan := manager.plan(0.0)) is not None and manager.quarantine:
        assert len(slots_of(plan)) == 1 and manager.plan(0.0) is None, "one sequence, one step"
        had_it_alone.append(manager.quarantine.first)
        manager.commit(worker.execute(plan), 0.0)
        manager.check()
    assert had_it_alone == [one, one, two, two]
    assert plan is not None and len(slots_of(plan)) == 3
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert all(sequence.output_token_ids == reference(sequence) for sequence in (one, two, newcomer))
    assert_at_rest(manager)


def test_a_suspect_that_has_proved_harmless_may_lose_its_seat_before_anybody_looked() -> None:
    manager = make_manager()
    one, two = make_sequence(0, max_tokens=9, ignore_eos=True), make_sequence(1, max_tokens=9, ignore_eos=True)
    for sequence in (one, two):
        manager.add(sequence)
    for _ in range(2):
        manager.plan(0.0)
        manager.restart()
    manager.commit(make_worker(manager).execute(manager.plan(0.0)), 0.0)
    assert manager.restart() == [] and len(manager.quarantine) == 2
    run(manager, make_worker(manager))
    assert one.output_token_ids == reference(one) and two.output_token_ids == reference(two)
    assert_at_rest(manager)


def test_a_suspect_may_leave_or_end_while_it_is_one() -> None:
    manager = make_manager()
    one, two = make_sequence(0, max_tokens=1), make_sequence(1, max_tokens=1)
    for sequence in (one, two):
        manager.add(sequence)
    for _ in range(2):
        manager.plan(0.0)
        manager.restart()
    manager.finish(one, FinishReason.ABORT)
    manager.check()
    run(manager, make_worker(manager))
    assert two.output_token_ids == reference(two)
    assert_at_rest(manager)


def test_progress_between_losses_is_no_suspicion() -> None:
    """A worker that is killed every second, and streams that go on meanwhile: nobody's fault."""
    manager = make_manager()
    sequence = make_sequence(0, max_tokens=20, ignore_eos=True)
    manager.add(sequence)
    for _ in range(10):
        worker = make_worker(manager)
        for _ in range(2):
            manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        manager.plan(0.0)
        assert manager.restart() == [] and not manager.quarantine
    run(manager, make_worker(manager))
    assert sequence.output_token_ids == reference(sequence)


def test_a_step_that_memory_does_not_hold_is_tried_in_smaller_ones() -> None:
    manager = make_manager(max_num_batched_tokens=16)
    sequence = make_sequence(0, prompt_length=20, max_tokens=12, ignore_eos=True)
    manager.add(sequence)
    plan = manager.plan(0.0)
    assert plan is not None and plan.num_tokens == 16
    assert manager.restart(is_out_of_memory=True) == [] and manager.step_token_limit == 8
    plan = manager.plan(0.0)
    assert plan is not None and plan.num_tokens == 8
    worker = make_worker(manager)
    manager.commit(worker.execute(plan), 0.0)
    assert manager.step_token_limit == 9, "each step that fits makes the next one larger"
    run(manager, worker)
    assert sequence.output_token_ids == reference(sequence) and manager.step_token_limit == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (1, 2, 3)},
        {"token_ids": ()},
        {"logprobs": (None, None)},
        {"failures": ((1, "why"),)},
        {"prompt_logprobs": (PromptLogprobs(1, 1, ()),)},
        {"prompt_logprobs": (PromptLogprobs(0, 3, (TokenLogprobs(0.0),) * 4),)},
        {"prompt_logprobs": (PromptLogprobs(0, 1, (TokenLogprobs(0.0),) * 9),)},
    ],
    ids=str,
)
def test_a_result_that_is_no_answer_to_its_step_is_the_workers_fault(changes: dict[str, Any]) -> None:
    manager = make_manager()
    sequence = make_sequence(0, max_tokens=4, prompt_logprobs=0)
    manager.add(sequence)
    plan = manager.plan(0.0)
    assert plan is not None
    result = make_worker(manager).execute(plan)
    with pytest.raises(WorkerLost, match="does not fit its step of 1 tokens"):
        manager.commit(replace(result, **changes), 0.0)
    manager.restart()
    run(manager, make_worker(manager))
    assert sequence.output_token_ids == reference(sequence), "it was not applied, not even in part"


def test_prompt_tokens_that_wait_are_counted_until_they_are_seated() -> None:
    manager = make_manager(max_num_seqs=1)
    one, two, three = (make_sequence(number, prompt_length=5 + number) for number in range(3))
    for sequence in (one, two, three):
        manager.add(sequence)
    assert manager.num_queued_tokens == 5 + 6 + 7
    plan = manager.plan(0.0)
    assert manager.num_queued_tokens == 6 + 7
    manager.finish(three, FinishReason.ABORT)
    assert manager.num_queued_tokens == 6
    worker = SimulatedWorker(manager.config.num_blocks, manager.config.block_size, 1000)
    assert plan is not None
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert manager.num_queued_tokens == 0
