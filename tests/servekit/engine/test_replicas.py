"""Claims about several cores behind one engine: which one gets a sequence, and where it goes from a lost worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.protocol.messages import BlocksFetched, StepResult
from servekit.routing import block_fetches
from servekit.routing.router import Router
from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.commands import AnnounceBlocks, Commit, Finish, Plan
from servekit.scheduler.sequence import FinishReason
from tests.support.replicas import BLOCK_SIZE, READY, Fleet


def test_answers_to_one_prompt_go_to_one_replica_and_prompts_are_spread() -> None:
    fleet = Fleet(64, 64)
    chosen = [fleet.add(n=3).index for _ in range(10)]
    assert set(chosen) == {0, 1}
    assert fleet.replicas.num_waiting == 30 and fleet.replicas.queued.total.num_sequences == 30
    assert fleet.replicas.queued.of("").num_tokens == 150
    assert fleet.replicas.queued.by_tenant()[""].num_sequences == 30
    for first in range(0, 30, 3):
        assert sum({first, first + 1, first + 2} <= set(ids) for ids in fleet.ids()) == 1


def test_slots_are_free_until_as_many_sequences_wait_or_run() -> None:
    fleet = Fleet(64, 64)
    num_slots = sum(replica.core.manager.config.max_num_seqs for replica in fleet.replicas.all)
    for _ in range(num_slots - 1):
        fleet.add()
    assert fleet.replicas.has_free_slots
    fleet.add()
    assert not fleet.replicas.has_free_slots


async def test_replicas_that_share_tenants_learn_what_the_others_computed() -> None:
    fleet = Fleet(64, 64, scheduling_policy="fair")
    for _ in range(6):
        fleet.add()
    for replica in fleet.replicas.all:
        replica.core.apply(Plan(0.0))
    queues = [replica.core.manager.waiting_queue for replica in fleet.replicas.all]
    computed = [queue.num_served("") for queue in queues]
    assert min(computed) > 0
    for _ in range(2):
        await fleet.replicas.exchange_service()
        assert [queue.num_served("") for queue in queues] == [sum(computed)] * 2


def record_calls(patch: pytest.MonkeyPatch, owner: type, *names: str) -> list[str]:
    """Return a list to which each call of these methods is appended."""
    events: list[str] = []

    def recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            events.append(name)
            return method(*arguments)

        return call

    for name in names:
        patch.setattr(owner, name, recorded(name, getattr(owner, name)))
    return events


async def tick_forever(events: list[str]) -> None:
    """Stand for all other work of the event loop."""
    while True:
        events.append("tick")
        await asyncio.sleep(0)


async def test_an_exchange_holds_the_event_loop_for_one_manager_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(64, 64, 64, scheduling_policy="fair")
    for _ in range(6):
        fleet.add()
    events = record_calls(monkeypatch, ServiceExchange, "collect", "command")
    ticking = asyncio.create_task(tick_forever(events))
    await fleet.replicas.exchange_service()
    ticking.cancel()
    assert [each for each in events if each != "tick"] == ["collect"] * 3 + ["command"] * 3
    assert all("tick" in pair for pair in pairwise(events))


async def test_rebalancing_holds_the_event_loop_for_one_prompt_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(256, 256)
    await fleet.lose(1)
    for _ in range(20):
        fleet.add(length=40)
    events = record_calls(monkeypatch, Router, "_better_replica")
    ticking = asyncio.create_task(tick_forever(events))
    await fleet.replace(1)
    ticking.cancel()
    assert fleet.ids()[1] and events.count("_better_replica") > len(fleet.ids()[1])
    assert all("tick" in pair for pair in pairwise(events))


async def test_sequences_of_a_lost_worker_go_to_the_others_and_the_registry_knows_them() -> None:
    fleet = Fleet(64, 64, 64)
    for _ in range(12):
        fleet.add(n=2)
    await fleet.lose(1)
    assert not fleet.ids()[1] and fleet.all_ids() == list(range(24))
    for replica in fleet.replicas.all:
        replica.core.manager.check()
        for sequence_id in replica.core.manager.sequence_ids:
            output = fleet.registry.output(sequence_id)
            assert output is not None and output.sequence is replica.core.manager.find(sequence_id)
    assert fleet.add() is not fleet.replicas.all[1]


async def test_without_another_worker_sequences_wait_for_the_first_one_that_is_ready() -> None:
    fleet = Fleet(64, 64)
    for _ in range(8):
        fleet.add()
    await fleet.lose(0)
    await fleet.lose(1, is_idle=True)
    assert fleet.all_ids() == list(range(8)) and fleet.replicas.num_ready == 0
    fleet.add()  # waits, too
    await fleet.replace(0)
    assert fleet.ids() == [list(range(9)), []]


async def test_suspects_wait_for_a_worker_of_their_own_and_all_at_one_replica() -> None:
    fleet = Fleet(64, 64, 64)
    for _ in range(6):
        fleet.add()
    await fleet.lose(0)
    lost = fleet.ids()[1]
    await fleet.lose(1)  # some of its sequences were in flight in the first loss, too
    suspects = fleet.replicas.all[1].core.manager.quarantine.sequence_ids
    assert suspects and set(suspects) < set(lost) and fleet.ids()[1] == suspects
    assert fleet.replicas.all[2].takes_sequences and not fleet.replicas.all[2].core.manager.quarantine
    await fleet.replace(0)
    assert fleet.ids()[1] == suspects, "they stay while another replica has a worker again"
    await fleet.replace(1)
    assert not fleet.replicas.all[1].takes_sequences
    assert {fleet.add().index for _ in range(6)} <= {0, 2}


async def test_what_fits_on_the_largest_replica_only_waits_for_it() -> None:
    fleet = Fleet(8, 64)
    limit = fleet.replicas.limits.max_total_tokens
    assert limit == fleet.replicas.all[1].core.manager.config.max_total_tokens
    assert fleet.add(limit - 5, 5) is fleet.replicas.all[1]
    small = fleet.num_added
    while fleet.add() is not fleet.replicas.all[1]:
        small = fleet.num_added
    await fleet.lose(1)
    assert 0 in fleet.ids()[1], "it does not fit on the other one"
    assert small in fleet.ids()[0]
    assert fleet.add(limit - 5, 5) is fleet.replicas.all[1]


async def test_waiting_sequences_move_to_a_worker_that_is_back() -> None:
    fleet = Fleet(256, 256)
    await fleet.lose(1)
    for _ in range(200):
        fleet.add(length=40)
    assert not fleet.ids()[1]
    await fleet.replace(1)
    moved = fleet.ids()[1]
    assert moved and fleet.all_ids() == list(range(200))
    await fleet.replace(1)
    assert set(moved) <= set(fleet.ids()[1]), "none goes back"


def test_state_is_that_of_all_replicas() -> None:
    fleet = Fleet(64, 64)
    first, second = fleet.replicas.all
    assert [each.state for each in fleet.replicas.all] == ["ready", "ready"] and fleet.replicas.stage == "serving"
    first.executor.is_ready = False  # type: ignore[misc]
    assert first.state == "recovering" and fleet.replicas.num_ready == 1
    assert fleet.supervisor.has_other_worker(first.core) and not fleet.supervisor.has_other_worker(second.core)
    first.is_vacated = True
    assert first.state == "vacated" and first.info()["state"] == "vacated"
    assert fleet.add() is second


def test_an_end_reaches_a_sequence_wherever_it_is() -> None:
    fleet = Fleet(64, 64)
    for _ in range(4):
        fleet.add()
    fleet.replicas.finish([Finish(each, FinishReason.ABORT) for each in range(4)])
    assert fleet.ids() == [[], []]


def compute_first_tokens(fleet: Fleet, index: int) -> None:
    """Execute all steps of a replica that compute prompts."""
    manager = fleet.replicas.all[index].core.manager
    while any(not manager.find(each).num_output_tokens for each in manager.sequence_ids):  # type: ignore[union-attr]
        plan = fleet.replicas.all[index].core.apply(Plan(0.0))
        assert plan is not None
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        fleet.replicas.all[index].core.apply(Commit(StepResult(plan.epoch, plan.step_id, (7,) * num_sampled, 0.0), 0.0))


async def test_prompts_go_to_prefill_replicas_and_sequences_with_tokens_to_decode_replicas() -> None:
    fleet = Fleet(64, 64, 64, prefill_replicas=1)
    prefill, first, second = fleet.replicas.all
    chosen = [fleet.add(length=21, max_tokens=9, n=2).index for _ in range(3)]
    assert chosen == [0, 0, 0] and fleet.replicas.taking_cores == [prefill.core]
    fleet.supervisor.hand_over(prefill.core)
    assert fleet.ids()[1:] == [[], []], "no sequence has a token"
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    assert fleet.ids()[0] == [] and fleet.all_ids() == list(range(6)) and fleet.replicas.num_handed_over == 6
    assert {tuple(each) for each in fleet.ids()[1:]} == {(0, 1, 4, 5), (2, 3)}, "answers to one prompt stay together"
    for replica in (first, second):
        assert replica.core.manager.kv_connector.num_keys >= 21 // prefill.core.manager.config.block_size
        for sequence_id in replica.core.manager.sequence_ids:
            assert fleet.registry.output(sequence_id).sequence is replica.core.manager.find(sequence_id)  # type: ignore[union-attr]
    await fleet.supervisor.stop(graceful=False)


async def test_without_replicas_of_one_kind_the_other_kind_does_everything() -> None:
    fleet = Fleet(64, 64, prefill_replicas=1)
    fleet.add()
    await fleet.lose(0)
    assert fleet.ids() == [[], [0]] and fleet.add().index == 1
    await fleet.replace(0)
    assert fleet.add().index == 0
    await fleet.lose(1, is_idle=True)
    assert fleet.ids() == [[0, 1, 2], []]
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(fleet.replicas.all[0].core)
    assert fleet.ids() == [[0, 1, 2], []], "no decode replica takes sequences"
    await fleet.supervisor.stop(graceful=False)


def far_fleet(num_blocks: int = 64) -> tuple[Fleet, list[Any]]:
    """A prefill and a decode replica, whose workers joined on machines of their own; and their executors."""
    fleet = Fleet(num_blocks, num_blocks, prefill_replicas=1)
    for replica in fleet.replicas.all:
        replica.placement = None
        replica.executor.ready = replace(READY, transfer_addresses=(f"tcp://10.0.0.{replica.index}:8101",))
    return fleet, [replica.executor for replica in fleet.replicas.all]


async def test_a_sequence_moves_to_another_machine_when_its_blocks_have_come() -> None:
    fleet, executors = far_fleet()
    prefill, decode = fleet.replicas.all
    fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    (request,) = executors[1].requests
    assert request.addresses == ("tcp://10.0.0.0:8101",) and len(request.keys) == 21 // BLOCK_SIZE
    fleet.supervisor.hand_over(prefill.core)
    assert len(executors[1].requests) == 1 and fleet.ids() == [[0], []], "it goes on meanwhile"
    fleet.replicas.fetched(decode, BlocksFetched(request.number, request.keys))
    assert fleet.ids() == [[], [0]] and fleet.replicas.num_handed_over == 1
    assert decode.core.manager.kv_connector.num_keys == len(request.keys)
    fleet.replicas.fetched(decode, BlocksFetched(request.number, request.keys))
    assert fleet.ids() == [[], [0]], "a repeated answer changes nothing"
    await fleet.supervisor.stop(graceful=False)


async def test_no_more_fetches_begin_than_an_agent_may_have_and_the_next_one_begins_when_one_has_ended() -> None:
    fleet, executors = far_fleet(512)
    prefill, decode = fleet.replicas.all
    for _ in range(7):
        fleet.add(length=9, max_tokens=9)
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    assert len(executors[1].requests) == block_fetches.MAX_FETCHES
    first = executors[1].requests[0]
    fleet.replicas.fetched(decode, BlocksFetched(first.number, first.keys))
    fleet.supervisor.hand_over(prefill.core)
    assert len(executors[1].requests) == block_fetches.MAX_FETCHES + 1
    await fleet.supervisor.stop(graceful=False)


async def test_a_prompt_that_is_there_already_is_not_fetched_again() -> None:
    fleet, executors = far_fleet()
    prefill, decode = fleet.replicas.all
    fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    sequence = prefill.core.manager.find(0)
    assert sequence is not None
    decode.core.apply(AnnounceBlocks(tuple(sequence.kv.hashes)))
    fleet.supervisor.hand_over(prefill.core)
    assert fleet.ids() == [[], [0]] and not executors[1].requests
    await fleet.supervisor.stop(graceful=False)


@pytest.mark.parametrize("num_come", [0, 2])
async def test_after_a_failed_transfer_a_sequence_stays_and_only_what_is_missing_is_fetched_later(
    num_come: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, executors = far_fleet()
    prefill, decode = fleet.replicas.all
    failed = list[int]()
    fleet.replicas.on_failed_fetch = failed.append
    fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    (request,) = executors[1].requests
    fleet.replicas.fetched(decode, BlocksFetched(request.number, request.keys[:num_come]))
    assert (
        fleet.ids() == [[0], []]
        and f"has fetched {num_come} of its {len(request.keys)} KV" in caplog.text
        and failed == [1]
    )
    assert fleet.replicas.fetches.num_failed == 1
    fleet.supervisor.hand_over(prefill.core)
    assert len(executors[1].requests) == 1, "not at once"
    fleet.replicas.fetches._pauses.clear()
    fleet.supervisor.hand_over(prefill.core)
    assert executors[1].requests[1].keys == request.keys[num_come:]
    fleet.replicas.fetched(decode, BlocksFetched(2, request.keys[num_come:]))
    assert fleet.ids() == [[], [0]]
    await fleet.supervisor.stop(graceful=False)


async def test_a_sequence_that_ended_or_whose_target_was_lost_meanwhile_does_not_move() -> None:
    fleet, executors = far_fleet()
    prefill, decode = fleet.replicas.all
    for _ in range(2):
        fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    first, second = executors[1].requests
    fleet.replicas.finish([Finish(0, FinishReason.ABORT)])
    fleet.replicas.fetched(decode, BlocksFetched(first.number, first.keys))
    assert fleet.ids() == [[1], []]
    executors[1].is_ready = False
    fleet.replicas.fetched(decode, BlocksFetched(second.number, second.keys))
    assert fleet.ids() == [[1], []]
    await fleet.supervisor.stop(graceful=False)


async def test_a_target_that_does_not_answer_is_given_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_fetches, "FETCH_TIMEOUT_S", 0.0)
    fleet, executors = far_fleet()
    prefill, decode = fleet.replicas.all
    fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    for _ in range(2):
        fleet.supervisor.hand_over(prefill.core)
    (request,) = executors[1].requests
    assert "the agent of replica 1 did not report in time" in caplog.text and fleet.replicas.fetches.num_failed == 1
    fleet.replicas.fetched(decode, BlocksFetched(request.number, request.keys))
    assert fleet.ids() == [[0], []], "too late"
    await fleet.supervisor.stop(graceful=False)


async def test_a_replica_whose_blocks_others_cannot_reach_decodes_itself() -> None:
    fleet, executors = far_fleet()
    prefill = fleet.replicas.all[0]
    executors[0].ready = READY
    fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    assert not executors[1].requests and fleet.ids() == [[0], []]
    await fleet.supervisor.stop(graceful=False)


async def test_a_worker_with_one_agent_is_asked_to_fetch_from_those_of_all_ranks() -> None:
    fleet, executors = far_fleet()
    prefill = fleet.replicas.all[0]
    addresses = ("tcp://10.0.0.1:8101", "tcp://10.0.0.2:8101")
    executors[0].ready = replace(READY, transfer_addresses=addresses)
    fleet.add(length=21, max_tokens=9)
    compute_first_tokens(fleet, 0)
    fleet.supervisor.hand_over(prefill.core)
    (request,) = executors[1].requests
    assert request.addresses == addresses
    await fleet.supervisor.stop(graceful=False)
