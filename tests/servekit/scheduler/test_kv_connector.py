"""Claims about blocks that a KV connector keeps: stored when they are reused, loaded when a prompt needs them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from servekit.errors import WorkerLost
from servekit.protocol.messages import StepPlan, TransferReport
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.checkpoint import map_hashes, restore_manager, save_manager
from servekit.scheduler.commands import AnnounceBlocks
from servekit.scheduler.kv_connector import KVConnector
from servekit.scheduler.sequence import Sequence, Status
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.worker import SimulatedConnector, SimulatedWorker, Violation
from tests.support.scheduler import add_prompt, make_manager, make_prompt, make_worker, reference, run

FIRST, SECOND = make_prompt(1, 17), make_prompt(2, 17)  # four full blocks each
GREEDY = SamplingParams(max_tokens=2, ignore_eos=True)
PLAN = StepPlan(0, 0, (), ())


class Service:
    """A manager with room for one prompt, and a worker whose connector has room for many blocks."""

    def __init__(self, num_offloaded: int = 100, **changes: int) -> None:
        self.manager = make_manager(has_kv_connector=True, **{"num_blocks": 5, **changes})
        self.connector = SimulatedConnector(num_offloaded)
        self.worker = make_worker(self.manager)
        self.worker.connector = self.connector
        self.num_added = 0

    def add(self, prompt: list[int], **fields: object) -> Sequence:
        self.num_added += 1
        return add_prompt(self.manager, self.num_added, prompt, GREEDY, **fields)

    def serve(self, prompt: list[int]) -> Sequence:
        sequence = self.add(prompt)
        run(self.manager, self.worker)
        assert sequence.output_token_ids == reference(sequence)
        return sequence

    def plan(self) -> StepPlan:
        plan = self.manager.plan(0.0)
        assert plan is not None
        self.manager.check()
        return plan


def test_a_prompt_whose_blocks_were_reused_is_loaded_and_not_computed() -> None:
    service = Service()
    service.serve(FIRST)
    service.serve(SECOND)
    assert len(service.connector.pages) == service.manager.kv_connector.num_keys == 4
    again = service.add(FIRST)
    plan = service.plan()
    assert len(plan.loads) == again.num_cached_tokens // 4 == 4
    assert [chunk.num_tokens for chunk in plan.chunks] == [1] and plan.chunks[0].start == 16
    service.manager.commit(service.worker.execute(plan), 0.0)
    run(service.manager, service.worker)
    assert again.output_token_ids == reference(again)
    assert service.manager.num_cached_tokens == 16


def test_blocks_of_a_waiting_sequence_are_read_ahead_of_need_and_no_decision_changes() -> None:
    service = Service(prefetches_blocks=True)
    service.serve(FIRST)
    service.serve(SECOND)
    service.add(make_prompt(3, 17))
    plans = [service.plan()]
    again = service.add(FIRST)  # there is no block for it
    while not again.kv.table:
        service.manager.commit(service.worker.execute(plans[-1]), 0.0)
        plans.append(service.plan())
    assert [plan.prefetches for plan in plans[1:]] == [tuple(again.kv.hashes[:4]), *[()] * (len(plans) - 2)]
    assert [len(plan.loads) for plan in plans] == [0] * (len(plans) - 1) + [4] and len(plans) > 2
    service.manager.kv_connector.prefetch([bytes(16)] * 10_000)
    assert len(service.manager.kv_connector.take_prefetches()) == 1024, "what a plan has is bounded"


def test_each_block_is_stored_before_the_step_writes_to_it_and_only_once() -> None:
    service = Service()
    service.serve(FIRST)
    service.add(SECOND)
    plan = service.plan()
    written = [block for chunk in plan.chunks for block in chunk.new_block_ids]
    assert {block for block, _ in plan.stores} <= set(written)
    service.manager.commit(service.worker.execute(plan), 0.0)
    run(service.manager, service.worker)
    service.serve(FIRST)  # the connector has these blocks already, and compares
    service.serve(SECOND)
    assert len(service.connector.pages) == 8


def test_a_loaded_block_is_shared_in_the_same_step() -> None:
    service = Service(num_blocks=16)
    service.serve(FIRST)
    others = [service.serve(make_prompt(number, 17)) for number in range(3, 8)]
    assert all(other.status is Status.FINISHED for other in others)
    two = [service.add(FIRST), service.add(FIRST)]
    plan = service.plan()
    assert len(plan.loads) == 4 and [chunk.num_tokens for chunk in plan.chunks] == [1, 1]
    service.manager.commit(service.worker.execute(plan), 0.0)
    run(service.manager, service.worker)
    assert [each.output_token_ids for each in two] == [reference(each) for each in two]


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_load_would_have_given_is_computed(depth: int) -> None:
    service = Service(max_steps_in_flight=depth)
    service.serve(FIRST)
    service.serve(SECOND)
    service.connector.damaged.update(list(service.connector.pages)[1:3])
    again = service.add(FIRST)
    plans = [service.plan()]
    if depth == 2:
        plans.append(service.plan())
    assert len(plans[0].loads) == 4
    for plan in plans:
        assert not service.manager.commit(service.worker.execute(plan), 0.0)
        service.manager.check()
    assert service.manager.kv_connector.num_failed_loads == 2 and not again.num_output_tokens
    run(service.manager, service.worker)
    assert again.output_token_ids == reference(again)


def test_after_a_failed_load_others_that_share_the_block_are_computed_again_too() -> None:
    service = Service(num_blocks=16, max_steps_in_flight=2)
    service.serve(FIRST)
    for number in range(3, 8):
        service.serve(make_prompt(number, 17))
    service.connector.damaged.update(service.connector.pages)
    bystander = service.add(make_prompt(9, 3))
    leader = service.add(FIRST)
    fork = service.add(FIRST, leader_id=leader.sequence_id)
    run(service.manager, service.worker)
    assert [each.output_token_ids for each in (bystander, leader, fork)] == [
        reference(each) for each in (bystander, leader, fork)
    ]
    assert bystander.incarnation < min(leader.incarnation, fork.incarnation)


def test_blocks_that_were_computed_from_a_failed_load_are_not_found() -> None:
    service = Service(max_steps_in_flight=2, max_num_batched_tokens=4, num_blocks=8)
    service.serve(FIRST)
    for number in (2, 3):
        service.serve(make_prompt(number, 17))
    service.connector.damaged.update(service.connector.pages)
    longer = [*FIRST, *make_prompt(4, 12)]
    sequence = service.add(longer)
    plans = [service.plan(), service.plan()]
    assert plans[0].loads and plans[1].chunks[0].start == 20
    prefixes = service.manager.kv_cache.prefixes
    assert len(prefixes.find(sequence.kv.hashes)) == 6  # computed ones as well
    service.manager.commit(service.worker.execute(plans[0]), 0.0)
    assert not prefixes.find(sequence.kv.hashes)
    service.manager.commit(service.worker.execute(plans[1]), 0.0)
    run(service.manager, service.worker)
    assert sequence.output_token_ids == reference(sequence)
    assert service.serve(longer).num_cached_tokens == 28


def test_the_simulated_connector_finds_a_key_with_two_contents() -> None:
    service = Service()
    service.serve(FIRST)
    service.serve(SECOND)
    key = next(iter(service.connector.pages))
    plan = replace(PLAN, stores=((0, key),))
    with pytest.raises(Violation, match="with other contents"):
        service.connector.execute(plan, [[1, 2, 3, 4]])


def test_without_a_connector_nothing_is_stored_or_announced() -> None:
    manager = make_manager(num_blocks=6)
    worker = make_worker(manager)
    for prompt in (FIRST, SECOND, FIRST):
        add_prompt(manager, len(prompt) + manager.next_step_id, prompt, GREEDY)
        run(manager, worker)
    manager.apply(AnnounceBlocks((bytes(16),)))
    add_prompt(manager, 1000, FIRST, GREEDY)
    plan = manager.plan(0.0)
    assert plan is not None and not plan.stores and not plan.loads
    assert manager.kv_connector.num_keys == manager.kv_connector.num_loaded_blocks == 0
    with pytest.raises(Violation, match="with a KV connector"):
        worker.execute(replace(plan, stores=((0, bytes(16)),)))


def test_keys_that_the_worker_dropped_are_forgotten() -> None:
    service = Service(num_offloaded=2)
    service.serve(FIRST)
    service.serve(SECOND)
    assert service.manager.kv_connector.num_keys == len(service.connector.pages) == 2
    assert service.serve(FIRST).num_cached_tokens == 8  # blocks are released from the tail, so the first ones are left


def test_a_lost_worker_loses_its_blocks_and_the_next_one_announces_what_it_finds() -> None:
    service = Service()
    service.serve(FIRST)
    service.serve(SECOND)
    manager = service.manager
    manager.restart(is_out_of_memory=True)
    assert manager.kv_connector.num_keys == 4
    manager.restart()
    assert manager.kv_connector.num_keys == 0
    manager.apply(AnnounceBlocks(tuple(service.connector.pages)))
    assert service.serve(FIRST).num_cached_tokens == 16


def test_the_chain_of_loadable_blocks_ends_at_a_gap_and_at_a_published_block() -> None:
    connector = KVConnector(is_on=True)
    hashes = [bytes([number]) * 16 for number in range(4)]
    assert connector.num_loadable([], ()) == connector.num_loadable(hashes, ()) == 0
    connector.announce([hashes[0], hashes[1], hashes[3]])
    assert connector.num_loadable(hashes, ()) == 2
    assert connector.num_loadable(hashes, {hashes[1]}) == 1
    assert connector.num_loadable(hashes, {hashes[0]}) == 0
    connector.forget([hashes[0], hashes[2]])
    assert connector.num_loadable(hashes, ()) == 0


def test_a_router_counts_blocks_that_can_be_loaded_behind_published_ones() -> None:
    service = Service()
    first = service.serve(FIRST)
    service.serve(make_prompt(2, 9))  # the last blocks of the first prompt are reused
    prefixes = service.manager.kv_cache.prefixes
    hashes = first.kv.hashes
    assert 0 < len(prefixes.find(hashes)) < 4 == prefixes.num_known(hashes)
    assert prefixes.num_known([bytes(16)]) == 0


def test_a_result_that_fails_loads_which_were_not_planned_is_refused() -> None:
    service = Service()
    service.add(FIRST)
    result = service.worker.execute(service.plan())
    with pytest.raises(WorkerLost, match="does not fit"):
        service.manager.commit(replace(result, transfers=TransferReport((0,))), 0.0)


def test_a_suspect_whose_load_failed_runs_alone_again() -> None:
    service = Service()
    service.serve(FIRST)
    service.serve(SECOND)
    manager = service.manager
    suspect = service.add(FIRST)
    service.plan()
    manager.restart()
    service.plan()
    manager.restart()
    assert suspect in manager.quarantine
    service.worker = SimulatedWorker(5, 4, 32, connector=service.connector)
    manager.apply(AnnounceBlocks(tuple(service.connector.pages)))
    service.connector.damaged.update(list(service.connector.pages)[:1])
    run(manager, service.worker)
    assert manager.kv_connector.num_failed_loads == 1
    assert suspect.output_token_ids == reference(suspect)


def test_a_checkpoint_has_keys_loads_in_flight_and_results_with_other_hashes() -> None:
    service = Service(max_steps_in_flight=2, max_num_batched_tokens=2, num_offloaded=5)
    service.serve(FIRST)
    service.serve(SECOND)
    service.add([*FIRST, 7, 8])
    first, second = service.plan(), service.plan()
    service.worker.execute(first)
    result = service.worker.execute(second)
    service.manager.commit(replace(result, transfers=TransferReport(dropped_keys=(bytes(16),))), 0.0)
    state = save_manager(service.manager)
    mapped = map_hashes(state, lambda key: key[::-1])
    assert mapped.connector is not None and mapped.in_flight[0].loads
    assert mapped.connector.keys[0][::-1] in service.connector.pages
    assert map_hashes(mapped, lambda key: key[::-1]) == state
    restored: WorkloadManager = restore_manager(service.manager.config, state)
    assert save_manager(restored) == state
    restored.check()


def test_a_fork_that_copied_a_block_whose_load_failed_is_computed_again() -> None:
    """The block in which a prompt ends is copied. Its leader has filled it since, and was preempted."""
    service = Service(num_blocks=9, max_steps_in_flight=2, max_num_seqs=2, max_admissions_per_step=1)
    manager = service.manager
    sampling = SamplingParams(max_tokens=14, ignore_eos=True)
    long = SamplingParams(max_tokens=20, ignore_eos=True)
    other = add_prompt(manager, 1, make_prompt(1, 3), long, has_length_bound=False)
    leader = add_prompt(manager, 2, make_prompt(2, 14), sampling, has_length_bound=False)
    fork = add_prompt(manager, 3, make_prompt(2, 14), sampling, leader_id=2, has_length_bound=False)
    while leader.status is not Status.WAITING or other.status is not Status.FINISHED:
        manager.commit(service.worker.execute(service.plan()), 0.0)
    assert leader.num_tokens >= 16 and fork.status is Status.WAITING
    first, second = service.plan(), service.plan()
    ((source, _),) = second.copies
    (index,) = (index for index, (_, block) in enumerate(first.loads) if block == source)
    service.connector.damaged.add(first.loads[index][0])
    for plan in (first, second):
        manager.commit(service.worker.execute(plan), 0.0)
        manager.check()
    run(manager, service.worker)
    assert [each.output_token_ids for each in (leader, fork)] == [reference(leader), reference(fork)]
