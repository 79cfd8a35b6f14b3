"""Tests of ranks that join one by one: they are one worker when all have come, and each loss is the loss of all."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import WorkerLost
from servekit.executor.model_executor import ModelExecutor
from servekit.joining.listener import WorkerListener
from servekit.protocol.handshake import HandshakeFailed, Offer
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, LoraAdapter
from servekit.protocol.messages import (
    BlocksFetched,
    FetchBlocks,
    Leaving,
    LoadModel,
    RankInfo,
    Shutdown,
    StepAcknowledged,
    StepResult,
    WorkerReady,
)
from tests.servekit.executor.conftest import PLAN
from tests.servekit.joining.clients import (
    ENOUGH_S,
    LOAD,
    OFFER,
    READY,
    RecordingHandler,
    StandInWorker,
    connect,
    listening,
    shake_hands,
)

RENDEZVOUS = "tcp://10.0.0.1:29500"


def make_handler() -> RecordingHandler:
    handler = RecordingHandler()
    handler.load = replace(LOAD, tensor_parallel_size=2)
    return handler


def offer_of(rank: int, rendezvous: str = RENDEZVOUS) -> Offer:
    return replace(OFFER, host=f"gpu-{rank}", rendezvous=rendezvous, rank=rank, num_ranks=2)


async def join(listener: WorkerListener, rank: int, rendezvous: str = RENDEZVOUS) -> StandInWorker:
    stream = await connect(listener.address)
    return StandInWorker(stream, await shake_hands(stream, offer=offer_of(rank, rendezvous)))


async def loaded(worker: StandInWorker) -> LoadModel:
    message = await worker.receive()
    assert isinstance(message, LoadModel)
    return message


def ready_of(rank: int) -> WorkerReady:
    return replace(READY, ranks=(RankInfo("cpu", str(rank)),))


async def wait_for_log(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(ENOUGH_S):
        while text not in caplog.text:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0.01)


async def serve_group(handler: RecordingHandler, ranks: list[StandInWorker], executor: ModelExecutor) -> None:
    """Let the ranks load the model, and give their group to the executor."""
    for rank, worker in enumerate(ranks):
        assert (await loaded(worker)).rank == rank
        worker.send(ready_of(rank))
    executor.adopt(await handler.next_worker())


async def test_ranks_of_two_machines_are_one_worker_when_both_have_joined() -> None:
    handler = make_handler()
    async with listening(handler) as listener:
        last = await join(listener, 1)
        await join(listener, 1, "tcp://10.0.0.2:29500")  # of another group, which stays incomplete
        first = await join(listener, 0)
        messages = [await loaded(first), await loaded(last)]
        assert [message.rank for message in messages] == [0, 1]
        assert messages[0].rendezvous == messages[1].rendezvous
        assert messages[0].rendezvous.startswith(f"{RENDEZVOUS}/")
        for rank, worker in enumerate((first, last)):
            worker.send(ready_of(rank))
        joined = await handler.next_worker()
        assert joined.offer.host == "gpu-0 and gpu-1"
        assert joined.ready.ranks == (RankInfo("cpu", "0", "gpu-0"), RankInfo("cpu", "1", "gpu-1"))

        executor = ModelExecutor(ServeConfig(), lambda: None)
        executor.adopt(joined)
        executor.send(PLAN)
        assert await first.receive() == await last.receive() == PLAN
        result = StepResult(0, 0, (7,), 0.0)
        first.send(result)
        last.send(StepAcknowledged.of(result))
        assert await executor.receive() == result
        await executor.stop(graceful=False)
        assert handler.joined.empty() and handler.refusals == []


async def test_blocks_have_come_when_each_rank_has_its_parts() -> None:
    handler, keys = make_handler(), tuple(bytes([number]) * 16 for number in range(3))
    async with listening(handler) as listener:
        ranks = [await join(listener, rank) for rank in range(2)]
        for rank, worker in enumerate(ranks):
            await loaded(worker)
            worker.send(replace(ready_of(rank), transfer_addresses=(f"tcp://10.0.0.{rank}:8101",)))
        joined = await handler.next_worker()
        assert joined.ready.transfer_addresses == ("tcp://10.0.0.0:8101", "tcp://10.0.0.1:8101")
        executor, answers = ModelExecutor(ServeConfig(), lambda: None), asyncio.Queue[BlocksFetched]()
        executor.on_fetched = answers.put_nowait
        executor.adopt(joined)

        executor.fetch(1, ("tcp://10.0.1.0:8101", "tcp://10.0.1.1:8101"), keys)
        for rank, worker in enumerate(ranks):
            assert await worker.receive() == FetchBlocks(1, (f"tcp://10.0.1.{rank}:8101",), keys)
        executor.fetch(2, ("tcp://10.0.1.0:8101",), keys)  # all ranks of the other worker are on one machine
        for worker in ranks:
            assert await worker.receive() == FetchBlocks(2, ("tcp://10.0.1.0:8101",), keys)
        ranks[0].send(BlocksFetched(7, keys))
        ranks[0].send(BlocksFetched(2, keys))
        ranks[0].send(BlocksFetched(1, keys))
        ranks[1].send(BlocksFetched(1, keys[:2]))
        async with asyncio.timeout(ENOUGH_S):
            assert await answers.get() == BlocksFetched(1, keys[:2]), "what both have"
            ranks[1].send(BlocksFetched(2, keys))
            assert await answers.get() == BlocksFetched(2, keys)
        await executor.stop(graceful=False)


async def test_a_worker_with_one_agent_is_asked_to_fetch_from_ranks_on_several_machines() -> None:
    handler, addresses = RecordingHandler(), ("tcp://10.0.1.0:8101", "tcp://10.0.1.1:8101")
    async with listening(handler) as listener:
        worker = await StandInWorker.join(listener.address)
        await loaded(worker)
        worker.send(READY)
        executor = ModelExecutor(ServeConfig(), lambda: None)
        executor.adopt(await handler.next_worker())
        executor.fetch(1, addresses, (b"k" * 16,))
        assert await worker.receive() == FetchBlocks(1, addresses, (b"k" * 16,))
        await executor.stop(graceful=False)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((AdapterLoaded("", "f" * 32, 8), AdapterLoaded("", "f" * 32, 8)), ""),
        ((AdapterLoaded("", "f" * 32, 8), AdapterLoaded("there is none")), "there is none"),
        ((AdapterLoaded("", "f" * 32, 8), AdapterLoaded("", "e" * 32, 8)), "are not the same on all machines"),
    ],
)
async def test_each_rank_checks_an_adapter_on_its_machine(answers: tuple[AdapterLoaded, ...], expected: str) -> None:
    handler, question = make_handler(), LoadAdapter(LoraAdapter(1, "/adapters/a"))
    async with listening(handler) as listener:
        ranks = [await join(listener, rank) for rank in range(2)]
        executor = ModelExecutor(ServeConfig(), lambda: None)
        await serve_group(handler, ranks, executor)
        asking = asyncio.create_task(executor.ask(question))
        for rank, answer in zip(ranks, answers, strict=True):
            assert await rank.receive() == question
            rank.send(answer)
        found = await asking
        assert isinstance(found, AdapterLoaded)
        assert expected in found.refusal if expected else found == answers[0]
        await executor.stop(graceful=False)


async def test_each_group_has_a_name_of_its_own_in_the_store() -> None:
    """A rank that is left of an earlier group at the same address meets nobody there."""
    handler = make_handler()
    async with listening(handler) as listener:
        names = []
        for _ in range(2):
            first, last = await join(listener, 0), await join(listener, 1)
            names.append((await loaded(first)).rendezvous)
            await first.stream.end()
            await last.wait_ended()
        assert names[0] != names[1]


async def test_the_loss_of_one_rank_is_the_loss_of_the_worker_and_ends_all_connections() -> None:
    handler, losses = make_handler(), list[int]()
    async with listening(handler) as listener:
        ranks = [await join(listener, rank) for rank in range(2)]
        executor = ModelExecutor(ServeConfig(), lambda: losses.append(1))
        await serve_group(handler, ranks, executor)
        executor.send(PLAN)
        assert await ranks[1].receive() == PLAN
        await ranks[1].stream.end()
        with pytest.raises(WorkerLost, match="rank 1 of 2: the model worker closed the connection"):
            await executor.receive()
        assert losses == [1], "reported once"
        await executor.stop()
        await ranks[0].wait_ended()


@pytest.mark.parametrize("is_let_go", [False, True])
async def test_the_worker_leaves_when_one_rank_wants_to_or_the_server_lets_it_go(is_let_go: bool) -> None:
    handler, leaving = make_handler(), list[int]()
    async with listening(handler) as listener:
        ranks = [await join(listener, rank) for rank in range(2)]
        executor = ModelExecutor(ServeConfig(), lambda: None, on_leaving=lambda: leaving.append(1))
        await serve_group(handler, ranks, executor)
        assert not executor.is_leaving
        if is_let_go:
            assert executor.worker is not None
            executor.worker.let_go()
        for rank in () if is_let_go else ranks:
            rank.send(Leaving())
        async with asyncio.timeout(ENOUGH_S):
            while not leaving:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert executor.is_leaving
        executor.mark_left()
        assert [await rank.receive() for rank in ranks] == [Shutdown(), Shutdown()]
        assert leaving == [1]
        await executor.stop()


async def test_a_rank_that_ends_before_the_others_come_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    handler = make_handler()
    async with listening(handler) as listener:
        gone = await join(listener, 0)
        await wait_for_log(caplog, "the model is loaded when rank 1 has come")
        await gone.stream.end()
        await wait_for_log(caplog, "has gone, while it waited for other ranks")
        last = await join(listener, 1)
        await wait_for_log(caplog, "the model is loaded when rank 0 has come")
        first = await join(listener, 0)
        assert (await loaded(last)).rank == 1 and (await loaded(first)).rank == 0


async def test_a_second_rank_of_the_same_number_takes_the_place_of_the_first_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = make_handler()
    async with listening(handler) as listener:
        older, newer = await join(listener, 1), await join(listener, 1)
        await older.wait_ended()
        first = await join(listener, 0)
        assert (await loaded(newer)).rank == 1 and (await loaded(first)).rank == 0
    assert "takes the place of" in caplog.text


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 3), (1, 1), (2, 2)])
async def test_ranks_that_are_not_as_many_as_the_servers_are_refused(rank: int, num_ranks: int) -> None:
    handler = make_handler()
    async with listening(handler) as listener:
        offer = replace(offer_of(rank), num_ranks=num_ranks)
        with pytest.raises(HandshakeFailed, match=f"rank {rank} of {num_ranks} .* among 2 ranks") as refused:
            await shake_hands(await connect(listener.address), offer=offer)
        assert refused.value.is_permanent and handler.refusals == ["other_size"]


async def test_the_end_of_the_listener_closes_the_connections_of_ranks_that_wait() -> None:
    handler = make_handler()
    async with listening(handler) as listener:
        waiting = await join(listener, 0)
        await listener.stop()
        await waiting.wait_ended()


async def test_ranks_with_different_models_are_no_worker_and_the_log_says_how_they_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = make_handler()
    async with listening(handler) as listener:
        ranks = [await join(listener, rank) for rank in range(2)]
        ranks[0].send(ready_of(0))
        ranks[1].send(replace(ready_of(1), model=replace(READY.model, fingerprint="e" * 64)))
        for rank in ranks:
            await rank.wait_ended()
        assert handler.joined.empty() and handler.refusals == ["load_failed"]
    assert "rank 1 of the model worker answered WorkerReady" in caplog.text and "its fingerprint is" in caplog.text
