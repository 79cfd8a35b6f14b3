"""Claims about hand-overs: to the decode replica with the least load that has room, with what can be loaded there."""

from __future__ import annotations

from typing import Any

import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.routing.block_fetches import MAX_FETCHES, BlockFetches
from servekit.routing.hand_over import HandOver, can_move, find_hand_overs
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.kv_transfer import SimulatedRing, SimulatedSender
from servekit.simulation.worker import SimulatedWorker
from tests.support.scheduler import add_prompt, make_manager, make_prompt

BLOCK_SIZE = 4
LONG = SamplingParams(max_tokens=40, ignore_eos=True)


class Prefill:
    """A prefill replica whose worker sends to a ring."""

    def __init__(self, num_ring_blocks: int = 100, **changes: Any) -> None:
        self.manager = make_manager(has_kv_connector=True, role=ReplicaRole.PREFILL, **changes)
        config = self.manager.config
        self.ring = SimulatedRing(num_ring_blocks)
        connector = SimulatedSender(self.ring)
        self.worker = SimulatedWorker(
            config.num_blocks, config.block_size, config.max_num_batched_tokens, connector=connector
        )

    def step(self) -> None:
        plan = self.manager.plan(0.0)
        assert plan is not None
        self.manager.commit(self.worker.execute(plan), 0.0)

    def add(self, sequence_id: int, length: int = 17, **fields: Any) -> None:
        add_prompt(self.manager, sequence_id, make_prompt(sequence_id, length), LONG, **fields)


def make_decode(num_sequences: int = 0, **changes: Any) -> WorkloadManager:
    manager = make_manager(has_kv_connector=True, role=ReplicaRole.DECODE, **changes)
    for number in range(num_sequences):
        add_prompt(manager, 100 + number, make_prompt(number, 5), SamplingParams(max_tokens=4))
    return manager


def choose(prefill: Prefill, *targets: WorkloadManager) -> list[HandOver]:
    return list(find_hand_overs(prefill.manager, dict(enumerate(targets))))


def test_a_sequence_is_handed_over_when_it_has_its_first_token_and_not_before() -> None:
    prefill = Prefill(max_num_batched_tokens=10)
    prefill.add(0)
    prefill.step()
    assert choose(prefill, make_decode()) == []
    prefill.step()
    (hand_over,) = choose(prefill, make_decode())
    assert hand_over.sequence_id == 0 and len(hand_over.keys) == 17 // BLOCK_SIZE


def test_the_least_loaded_replica_is_chosen() -> None:
    prefill = Prefill()
    prefill.add(0)
    prefill.step()
    assert [each.target_id for each in choose(prefill, make_decode(3), make_decode(1), make_decode(2))] == [1]


def test_without_room_anywhere_or_without_decode_replicas_it_stays() -> None:
    prefill = Prefill()
    prefill.add(0)
    prefill.step()
    assert choose(prefill) == []
    assert choose(prefill, make_decode(2, max_num_seqs=2)) == [], "there is no slot"
    assert choose(prefill, make_decode(1, num_blocks=15)) == [], "there are not enough blocks up to its end"
    assert choose(prefill, make_decode(0, num_blocks=10)) == [], "it could not even run alone"
    assert len(choose(prefill, make_decode(0, num_blocks=15))) == 1


def test_sequences_are_handed_over_in_order_but_one_that_fits_nowhere_holds_up_no_other() -> None:
    prefill = Prefill(num_blocks=100, max_num_batched_tokens=100)
    add_prompt(prefill.manager, 0, make_prompt(0, 17), SamplingParams(max_tokens=200, ignore_eos=True))
    prefill.add(1, length=30)
    prefill.add(2, length=5)
    prefill.step()
    small, full = make_decode(num_blocks=20), make_decode(1, num_blocks=14)
    assert [each.sequence_id for each in choose(prefill, small)] == [1, 2], "the first one is too long for it"
    assert choose(prefill, make_decode(1, num_blocks=19), full) == [], "there is no room for the second one"


def test_a_sequence_whose_blocks_were_overwritten_stays() -> None:
    prefill = Prefill(num_ring_blocks=3)
    prefill.add(0, length=33)
    prefill.step()
    prefill.step()
    assert choose(prefill, make_decode()) == []


@pytest.mark.parametrize("num_known", [0, 6])
def test_a_prompt_for_which_the_memory_is_too_small_does_not_overwrite_the_blocks_of_others(num_known: int) -> None:
    prefill = Prefill(num_ring_blocks=6, num_transfer_blocks=num_known, max_num_batched_tokens=64)
    prefill.add(0)
    prefill.step()
    prefill.add(1, length=33)
    prefill.step()
    assert [each.sequence_id for each in choose(prefill, make_decode())] == ([0] if num_known else [])


def test_blocks_of_a_prompt_that_is_too_long_are_sent_for_a_shorter_one_that_finds_them() -> None:
    prefill = Prefill(num_ring_blocks=6, num_transfer_blocks=6, max_num_batched_tokens=64)
    prefill.add(0, length=33)
    prefill.step()
    assert not prefill.ring.pages
    add_prompt(prefill.manager, 1, make_prompt(0, 33)[:13], LONG)
    prefill.step()
    (hand_over,) = choose(prefill, make_decode())
    assert hand_over.sequence_id == 1 and len(hand_over.keys) == 3


def test_after_a_step_without_enough_memory_blocks_that_were_overwritten_are_sent_again() -> None:
    prefill = Prefill(num_ring_blocks=4)
    prefill.add(0)
    prefill.step()
    prefill.manager.withdraw((0,), is_hand_over=True)
    prefill.add(1)
    plan = prefill.manager.plan(0.0)
    assert plan is not None
    prefill.worker.execute(plan)  # it overwrites the blocks, and its report is lost
    prefill.manager.restart(is_out_of_memory=True)
    prefill.manager.withdraw((1,), is_hand_over=True)
    add_prompt(prefill.manager, 2, make_prompt(0, 17), LONG)
    prefill.step()
    prefill.step()
    (hand_over,) = choose(prefill, make_decode())
    assert set(hand_over.keys) == set(prefill.ring.pages) and len(hand_over.keys) == 4


def test_a_fork_follows_its_leader_although_others_have_less_to_do() -> None:
    prefill, busy, idle = Prefill(), make_decode(3), make_decode()
    prefill.add(0)
    prefill.manager.apply(
        AddSequence(sequence_id=1, prompt_token_ids=make_prompt(0, 17), sampling=LONG, leader_id=0, arrival_s=0.0)
    )
    prefill.step()
    (command,) = prefill.manager.withdraw((0,), is_hand_over=True)
    busy.apply(command)
    prefill.step()
    assert [each.target_id for each in choose(prefill, idle, busy)] == [1]


def test_what_others_can_load_already_is_not_sent_again() -> None:
    prefill = Prefill()
    prefill.add(0)
    prefill.step()
    prefill.manager.withdraw((0,), is_hand_over=True)
    sent = prefill.manager.kv_connector.num_sent_blocks
    add_prompt(prefill.manager, 1, make_prompt(0, 17), LONG)
    prefill.step()
    (hand_over,) = choose(prefill, make_decode())
    assert len(hand_over.keys) == 4 and prefill.manager.kv_connector.num_sent_blocks == sent
    prefill.manager.kv_connector.forget(hand_over.keys)
    prefill.manager.withdraw((1,), is_hand_over=True)
    add_prompt(prefill.manager, 2, make_prompt(0, 17), LONG)
    prefill.step()
    assert prefill.manager.kv_connector.num_sent_blocks == sent + 4, "what was overwritten is sent once more"


# -- between machines --------------------------------------------------------------------------------------------------


def begin(fetches: BlockFetches, hand_over: HandOver, num_blocks: int = 1) -> None:
    fetches.begin(hand_over.sequence_id, 9, hand_over.target_id, hand_over.keys, num_blocks, 0.0)


def test_a_sequence_whose_blocks_are_on_the_way_is_not_chosen_again_and_its_room_is_kept() -> None:
    prefill, fetches = Prefill(), BlockFetches()
    prefill.add(0)
    prefill.add(1)
    for _ in range(3):
        prefill.step()
    targets = {0: make_decode(num_blocks=15)}
    first = next(find_hand_overs(prefill.manager, targets, fetches))
    begin(fetches, first, num_blocks=5)
    assert list(find_hand_overs(prefill.manager, targets, fetches)) == [], "there are not enough blocks for both"
    targets = {0: make_decode(max_num_seqs=1)}
    assert list(find_hand_overs(prefill.manager, targets, fetches)) == [], "nor a slot"
    (second,) = find_hand_overs(prefill.manager, {0: make_decode()}, fetches)
    assert {first.sequence_id, second.sequence_id} == {0, 1}


def test_of_many_sequences_that_are_ready_at_once_only_a_few_are_fetched_at_a_time() -> None:
    prefill, fetches = Prefill(max_num_seqs=10, num_blocks=200, max_num_batched_tokens=200), BlockFetches()
    for sequence_id in range(MAX_FETCHES + 3):
        prefill.add(sequence_id)
    prefill.step()
    prefill.step()
    targets = {0: make_decode(max_num_seqs=10, num_blocks=200)}
    begun = []
    for hand_over in find_hand_overs(prefill.manager, targets, fetches):
        begin(fetches, hand_over)
        begun.append(hand_over.sequence_id)
    assert begun == list(range(MAX_FETCHES))


def test_blocks_are_fetched_at_the_same_time_only_if_the_memory_holds_all_of_them() -> None:
    prefill, fetches = Prefill(), BlockFetches()
    prefill.add(0)
    prefill.add(1)
    for _ in range(3):
        prefill.step()
    first = next(find_hand_overs(prefill.manager, {0: make_decode(num_transfer_blocks=3)}, fetches))
    assert len(first.keys) == 4, "alone it may begin, and what comes is computed no second time"
    begin(fetches, first)
    assert not list(find_hand_overs(prefill.manager, {0: make_decode(num_transfer_blocks=7)}, fetches))
    (second,) = find_hand_overs(prefill.manager, {0: make_decode(num_transfer_blocks=8)}, fetches)
    assert len(second.keys) == 4
    target = make_decode(num_transfer_blocks=7)
    target.kv_connector.announce(second.keys[:1])
    assert list(find_hand_overs(prefill.manager, {0: target}, fetches)) == [second], "one of them is there already"


def test_a_fork_waits_for_the_blocks_of_its_leader() -> None:
    prefill, fetches = Prefill(), BlockFetches()
    prefill.add(0)
    prefill.manager.apply(
        AddSequence(sequence_id=1, prompt_token_ids=make_prompt(0, 17), sampling=LONG, leader_id=0, arrival_s=0.0)
    )
    prefill.step()
    prefill.step()
    targets = {0: make_decode()}
    first = next(find_hand_overs(prefill.manager, targets, fetches))
    assert first.sequence_id == 0
    begin(fetches, first)
    assert list(find_hand_overs(prefill.manager, targets, fetches)) == []
    fetches.forget_target(0)
    assert [each.sequence_id for each in find_hand_overs(prefill.manager, targets, fetches)] == [0, 1]


def test_a_sequence_moves_when_enough_of_its_blocks_have_come() -> None:
    prefill, target = Prefill(), make_decode()
    prefill.add(0)
    prefill.step()
    (hand_over,) = choose(prefill, target)
    assert not can_move(prefill.manager, 0, target), "none has come"
    target.kv_connector.announce(hand_over.keys[:1])
    assert not can_move(prefill.manager, 0, target), "three would be computed again"
    target.kv_connector.announce(hand_over.keys[:2])
    assert can_move(prefill.manager, 0, target)
    for _ in range(5):  # it has gone on meanwhile
        prefill.step()
    assert not can_move(prefill.manager, 0, target)
    target.kv_connector.announce(hand_over.keys)
    assert can_move(prefill.manager, 0, target)
    assert not can_move(prefill.manager, 1, target), "there is no such sequence any more"
    small = make_decode(num_blocks=10)
    small.kv_connector.announce(hand_over.keys)
    assert not can_move(prefill.manager, 0, small), "it could not even run alone there"


def test_while_a_crash_is_suspected_nothing_moves() -> None:
    prefill, target = Prefill(), make_decode()
    prefill.add(0)
    prefill.step()
    (hand_over,) = choose(prefill, target)
    target.kv_connector.announce(hand_over.keys)
    for _ in range(2):
        assert can_move(prefill.manager, 0, target) and prefill.manager.plan(0.0) is not None
        prefill.manager.restart()
    assert prefill.manager.quarantine and not can_move(prefill.manager, 0, target)
