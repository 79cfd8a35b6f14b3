"""Claims about workers that crash again and again: the sequence that crashes them is found, and only it fails."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from servekit.errors import WorkerLost
from servekit.protocol.messages import PromptLogprobs, ScheduledChunk, StepPlan, TokenLogprobs
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import SimulatedWorker
from tests.support.scheduler import add_sequence, assert_idle, make_manager, make_worker, reference, run


def slots_of(plan: StepPlan | None) -> set[int]:
    assert plan is not None
    return {chunk.slot for chunk in plan.chunks}


def crashes(plan: StepPlan, poison: Sequence, position: int) -> bool:
    def covers(chunk: ScheduledChunk) -> bool:
        return chunk.slot == poison.slot and chunk.start <= position < chunk.start + chunk.num_tokens

    return any(map(covers, plan.chunks))


def serve(manager: WorkloadManager, poison: Sequence, position: int) -> tuple[int, list[Sequence]]:
    """Run with workers that crash at a position of `poison`: return how many crashed, and which sequences failed."""
    worker, num_crashes, failed = make_worker(manager), 0, []
    in_flight: list[StepPlan] = []
    for _ in range(10_000):
        while (plan := manager.plan(0.0)) is not None:
            in_flight.append(plan)
        if not manager.has_work:
            break
        plan = in_flight.pop(0)
        if crashes(plan, poison, position):
            num_crashes, worker = num_crashes + 1, make_worker(manager)
            in_flight.clear()
            for sequence in manager.restart():
                failed.append(sequence)
                manager.finish(sequence.sequence_id, FinishReason.ERROR)
        else:
            manager.commit(worker.execute(plan), 0.0)
        manager.check()
    return num_crashes, failed


@pytest.mark.parametrize("position", [0, 3, 7, 9])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_only_the_sequence_that_crashes_workers_fails(position: int, max_steps_in_flight: int) -> None:
    manager = make_manager(max_steps_in_flight=max_steps_in_flight)
    sequences = [add_sequence(manager, number, max_tokens=12, ignore_eos=True) for number in range(4)]
    poison = sequences[2]
    assert serve(manager, poison, position) == (3, [poison])
    for sequence in sequences:
        assert sequence is poison or sequence.output_token_ids == reference(sequence)
    assert_idle(manager)


def test_a_suspect_runs_alone_and_returns_to_the_others_when_it_proved_harmless() -> None:
    manager = make_manager(max_steps_in_flight=2)
    one, two = (add_sequence(manager, number, prompt_length=6, max_tokens=9, ignore_eos=True) for number in range(2))
    manager.plan(0.0)
    assert manager.restart() == []
    assert len(slots_of(manager.plan(0.0))) == 2, "one crash makes no suspect"
    assert manager.restart() == [] and len(manager.quarantine) == 2
    newcomer = add_sequence(manager, 2)
    worker, ran_alone = make_worker(manager), []
    while (plan := manager.plan(0.0)) is not None and manager.quarantine:
        assert len(slots_of(plan)) == 1 and manager.plan(0.0) is None, "one sequence, one step"
        ran_alone.append(manager.quarantine.first)
        manager.commit(worker.execute(plan), 0.0)
        manager.check()
    assert ran_alone == [one, one, two, two]
    assert plan is not None and len(slots_of(plan)) == 3
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert all(sequence.output_token_ids == reference(sequence) for sequence in (one, two, newcomer))
    assert_idle(manager)


def test_a_harmless_suspect_survives_a_crash_before_it_was_cleared() -> None:
    manager = make_manager()
    one, two = (add_sequence(manager, number, max_tokens=9, ignore_eos=True) for number in range(2))
    for _ in range(2):
        manager.plan(0.0)
        manager.restart()
    manager.commit(make_worker(manager).execute(manager.plan(0.0)), 0.0)
    assert manager.restart() == [] and len(manager.quarantine) == 2
    run(manager, make_worker(manager))
    assert one.output_token_ids == reference(one) and two.output_token_ids == reference(two)
    assert_idle(manager)


def test_a_suspect_can_be_aborted_or_end() -> None:
    manager = make_manager()
    one, two = (add_sequence(manager, number, max_tokens=1) for number in range(2))
    for _ in range(2):
        manager.plan(0.0)
        manager.restart()
    manager.finish(one.sequence_id, FinishReason.ABORT)
    manager.check()
    run(manager, make_worker(manager))
    assert two.output_token_ids == reference(two)
    assert_idle(manager)


def test_crashes_with_progress_between_them_make_no_suspect() -> None:
    """A worker is killed every second, and streams make progress in between: no sequence is the cause."""
    manager = make_manager()
    sequence = add_sequence(manager, 0, max_tokens=20, ignore_eos=True)
    for _ in range(10):
        worker = make_worker(manager)
        for _ in range(2):
            manager.commit(worker.execute(manager.plan(0.0)), 0.0)
        manager.plan(0.0)
        assert manager.restart() == [] and not manager.quarantine
    run(manager, make_worker(manager))
    assert sequence.output_token_ids == reference(sequence)


def test_after_an_out_of_memory_error_steps_are_half_as_large() -> None:
    manager = make_manager(max_num_batched_tokens=16)
    sequence = add_sequence(manager, 0, prompt_length=20, max_tokens=12, ignore_eos=True)
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
def test_a_malformed_result_raises_worker_lost_and_changes_nothing(changes: dict[str, Any]) -> None:
    manager = make_manager()
    sequence = add_sequence(manager, 0, max_tokens=4, prompt_logprobs=0)
    plan = manager.plan(0.0)
    assert plan is not None
    result = make_worker(manager).execute(plan)
    with pytest.raises(WorkerLost, match="does not fit its step of 1 spans"):
        manager.commit(replace(result, **changes), 0.0)
    manager.restart()
    run(manager, make_worker(manager))
    assert sequence.output_token_ids == reference(sequence), "no part of the result was applied"


def test_queued_tokens_count_prompts_until_they_are_admitted() -> None:
    manager = make_manager(max_num_seqs=1)
    _, _, three = (add_sequence(manager, number, prompt_length=5 + number) for number in range(3))
    assert manager.queued.total.num_tokens == 5 + 6 + 7
    plan = manager.plan(0.0)
    assert manager.queued.total.num_tokens == 6 + 7
    manager.finish(three.sequence_id, FinishReason.ABORT)
    assert manager.queued.total.num_tokens == 6
    worker = SimulatedWorker(manager.config.num_blocks, manager.config.block_size, 1000)
    assert plan is not None
    manager.commit(worker.execute(plan), 0.0)
    run(manager, worker)
    assert manager.queued.total.num_tokens == 0


def test_a_suspect_that_gets_a_token_between_crashes_does_not_fail() -> None:
    """Workers that are killed again and again from outside do not make a sequence fail that gets on meanwhile."""
    manager = make_manager(max_steps_in_flight=2)
    worker = make_worker(manager)
    sequence = add_sequence(manager, 0, max_tokens=12, ignore_eos=True)
    for _ in range(8):  # one step is computed by each worker
        plan = manager.plan(0.0)
        assert plan is not None
        manager.commit(worker.execute(plan), 0.0)
        if manager.plan(0.0) is not None:
            assert manager.restart() == []
            worker = make_worker(manager)
    run(manager, worker)
    assert sequence.output_token_ids == reference(sequence)
    assert_idle(manager)
