"""Claims about what a timeline notes."""

from __future__ import annotations

from servekit.laboratory.timeline import Timeline
from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager

CONFIG = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=32)


def add(manager: WorkloadManager, sequence_id: int, length: int, max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    manager.add(AddSequence(sequence_id=sequence_id, prompt_token_ids=range(length), sampling=sampling))


def step(manager: WorkloadManager, timeline: Timeline, began_s: float, done_s: float) -> StepPlan:
    plan = manager.plan(began_s)
    assert plan is not None
    timeline.planned(manager, plan, began_s)
    result = StepResult(plan.epoch, plan.step_id, (0,) * sum(chunk.samples for chunk in plan.chunks), 0.0)
    timeline.committed(manager, manager.commit(result, done_s), done_s)
    return plan


def test_it_notes_the_requests_that_it_was_told_of_and_no_others() -> None:
    """The warm-up of a real run has sequences that are no part of the workload."""
    manager, timeline = WorkloadManager(CONFIG), Timeline()
    add(manager, 0, 5, 2)
    add(manager, 1, 6, 2)
    timeline.add(1, 0.5, 6)
    step(manager, timeline, 1.0, 2.0)
    step(manager, timeline, 2.0, 3.0)
    assert list(timeline.requests) == [1]
    request = timeline.requests[1]
    assert (request.admitted_s, request.token_times_s, request.ended_s) == (1.0, [2.0, 3.0], 3.0)
    assert request.prefills == [(1.0, 2.0)]


def test_it_counts_places_of_kv_blocks_that_hold_nothing() -> None:
    manager, timeline = WorkloadManager(CONFIG), Timeline()
    add(manager, 0, 5, 3)
    timeline.add(0, 0.0, 5)
    step(manager, timeline, 0.0, 1.0)
    assert (timeline.steps[0].num_reserved_tokens, timeline.steps[0].num_unused_tokens) == (8, 3)


def test_with_contiguous_memory_each_running_request_holds_the_longest_sequence() -> None:
    manager, timeline = WorkloadManager(CONFIG), Timeline(reserved_tokens_per_sequence=32)
    add(manager, 0, 5, 3)
    timeline.add(0, 0.0, 5)
    step(manager, timeline, 0.0, 1.0)
    assert (timeline.steps[0].num_reserved_tokens, timeline.steps[0].num_unused_tokens) == (32, 27)
