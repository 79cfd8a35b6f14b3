"""Tests of plans for a pipeline: a token comes out of the last stage some steps after it was planned."""

from __future__ import annotations

from collections import deque

import pytest

from servekit.protocol.messages import StepPlan
from tests.support.scheduler import add_sequence, make_manager, make_worker, reference

NUM_SEQUENCES = 12


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_blocks", [24, 400])
def test_each_step_has_its_part_of_the_sequences_and_none_waits_for_its_own_token(
    num_stages: int, num_blocks: int
) -> None:
    """The worker computes the same tokens as ever; and a plan needs no token of the steps that are in its stages."""
    manager = make_manager(
        is_reckless=True,
        num_blocks=num_blocks,
        max_num_seqs=NUM_SEQUENCES,
        max_steps_in_flight=num_stages + 1,
        pipeline_parallel_size=num_stages,
    )
    worker = make_worker(manager)
    sequences = [add_sequence(manager, number, max_tokens=40, ignore_eos=True) for number in range(NUM_SEQUENCES)]
    in_flight: deque[StepPlan] = deque()
    sampled_in: dict[int, int] = {}  # by slot: the last step that sampled a token for it
    num_decodes = []
    while manager.has_work:
        while (plan := manager.plan(0.0)) is not None:
            for assignment in plan.slot_assignments:
                sampled_in.pop(assignment.slot, None)
            for chunk in plan.chunks:
                if len(chunk.token_ids) < chunk.num_tokens:  # the first stage has to have the token
                    assert plan.step_id - sampled_in[chunk.slot] >= num_stages
                if chunk.samples:
                    sampled_in[chunk.slot] = plan.step_id
            in_flight.append(plan)
            num_decodes.append(sum(chunk.num_tokens == 1 for chunk in plan.chunks))
        manager.commit(worker.execute(in_flight.popleft()), 0.0)
        manager.check()
    assert [sequence.output_token_ids for sequence in sequences] == [reference(each) for each in sequences]
    if num_blocks == 400:  # all of them run at the same time
        steady = num_decodes[4 * num_stages : -8 * num_stages]
        assert set(steady) == {NUM_SEQUENCES // num_stages}, "all stages are busy"
