"""Claims about sequences that move from one workload manager to another. tests/servekit/simulation moves thousands."""

from __future__ import annotations

import pytest

from servekit.errors import ContextTooLong
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Restart, Withdraw
from servekit.scheduler.sequence import FinishReason, Status
from servekit.scheduler.workload_manager import WorkloadManager
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


def advance(manager: WorkloadManager, num_steps: int) -> None:
    """Execute some steps, and leave one in flight."""
    worker = make_worker(manager)
    for _ in range(num_steps):
        plan = manager.plan(0.0)
        assert plan is not None
        manager.commit(worker.execute(plan), 0.0)
    assert manager.plan(0.0) is not None


def test_a_sequence_continues_from_its_tokens_and_the_first_manager_keeps_nothing() -> None:
    source, target = make_manager(), make_manager()
    old = add_sequence(source, 7, max_tokens=12)
    advance(source, 4)
    (command,) = source.apply(Withdraw((7,)))
    assert command.progress is not None and len(command.progress.output_token_ids) == 4
    assert old.status is Status.FINISHED and old.finish_reason is None and not source.sequence_ids
    moved = target.apply(command)
    assert moved.output_token_ids == old.output_token_ids and target.sequence_ids == [7]
    run(target, make_worker(target))
    assert moved.output_token_ids == reference(moved)
    assert_idle(target)


def test_the_answer_has_all_sequences_in_order_of_arrival_and_none_twice() -> None:
    manager = make_manager(max_num_seqs=2)
    for sequence_id in (3, 1, 2):
        add_sequence(manager, sequence_id)
    manager.plan(0.0)
    assert [each.sequence_id for each in manager.apply(Withdraw((2, 9, 2)))] == [2]
    assert [each.sequence_id for each in manager.apply(Withdraw(None))] == [1, 3]
    assert manager.apply(Withdraw(None)) == [] and not manager.finish(1, FinishReason.ABORT)


def test_forks_follow_their_leader_and_share_its_prompt_again() -> None:
    source, target = make_manager(), make_manager()
    for sequence_id, leader_id in ((0, None), (1, 0), (2, 0)):
        add_prompt(source, sequence_id, make_prompt(0, 9), SamplingParams(max_tokens=4), leader_id=leader_id)
    moved = [target.apply(command) for command in source.apply(Withdraw(None))]
    assert target.num_followers == 2 and [each.leader for each in moved] == [None, moved[0], moved[0]]
    run(target, make_worker(target))
    assert [each.output_token_ids for each in moved] == [reference(each) for each in moved]


def test_a_sequence_that_comes_back_is_another_one() -> None:
    """Entries of heaps and results in flight of its earlier stay do not fit it."""
    manager = make_manager()
    add_prompt(manager, 0, [1, 2, 3], SamplingParams(max_tokens=4), deadline_s=5.0, ttft_deadline_s=3.0)
    plan = manager.plan(0.0)
    assert plan is not None
    result = make_worker(manager).execute(plan)
    for _ in range(3):
        (command,) = manager.apply(Withdraw(None))
        back = manager.apply(command)
    assert manager.commit(result, 0.0) == [] and not back.num_output_tokens and back.incarnation == 3
    assert manager.next_deadline_s == 3.0
    assert [each.sequence_id for each in manager.expire(4.0)] == [0]


def test_a_suspect_takes_its_crashes_along_and_runs_alone() -> None:
    source, target = make_manager(), make_manager()
    add_sequence(source, 0)
    for _ in range(2):
        source.plan(0.0)
        source.apply(Restart())
    assert source.quarantine.sequence_ids == [0]
    bystander = add_sequence(target, 1)
    target.plan(0.0)
    (command,) = source.apply(Withdraw(None))
    assert not source.quarantine and command.crashes is not None and command.crashes.num_crashes == 2
    target.apply(command)
    assert target.quarantine.sequence_ids == [0] and bystander.status is Status.WAITING
    target.check()


def test_a_sequence_that_does_not_fit_is_refused_without_an_effect() -> None:
    source, target = make_manager(), make_manager(num_blocks=2)
    add_sequence(source, 0, prompt_length=20, max_tokens=20)
    (command,) = source.apply(Withdraw(None))
    with pytest.raises(ContextTooLong):
        target.apply(command)
    assert not target.has_work
    assert isinstance(command, AddSequence) and source.apply(command).num_tokens == 20
