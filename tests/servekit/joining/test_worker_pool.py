"""Tests of the workers that have joined and wait for work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.joining.address import UnixAddress
from servekit.joining.worker_pool import WorkerPool
from servekit.protocol.handshake import HandshakeFailed, Refused
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, LoraAdapter
from servekit.protocol.messages import FromWorker, Leaving, LoadModel, Shutdown
from tests.servekit.joining.clients import ENOUGH_S, KEY, LOAD, READY, StandInWorker, close_all, connect, shake_hands


class Pool:
    """A pool that listens in a folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        (folder / "key").write_bytes(KEY)
        (folder / "key").chmod(0o600)
        self.address = UnixAddress(f"{folder}/workers.sock")
        config = ServeConfig(listen_workers=str(self.address), worker_key_file=str(folder / "key"), **settings)
        self.refusals: list[str] = []
        self.pool = WorkerPool(config, self.refusals.append)
        self.pool.start(replace(LOAD, num_kv_blocks=None))

    async def join(self, answer: FromWorker = READY) -> tuple[StandInWorker, LoadModel]:
        worker = await StandInWorker.join(self.address)
        load = await worker.receive()
        assert isinstance(load, LoadModel)
        worker.send(answer)
        return worker, load

    async def wait_for_idle(self, number: int) -> None:
        async with asyncio.timeout(ENOUGH_S):
            while len(self.pool._idle) != number:  # noqa: ASYNC110  # it has no event for that
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def pooling(folder: Path, **settings: Any) -> AsyncIterator[Pool]:
    pool = Pool(folder, **settings)
    try:
        yield pool
    finally:
        closing = asyncio.create_task(close_all())  # it would wait for a worker that does not exit
        await pool.pool.stop()
        await closing


async def test_workers_are_given_in_the_order_in_which_they_became_ready(tmp_path: Path) -> None:
    async with pooling(tmp_path) as pool:
        waiting = asyncio.create_task(pool.pool.next_worker())
        _, load = await pool.join()
        first = await waiting
        assert load.num_kv_blocks is None and first.ready == READY
        _, load = await pool.join()
        assert load.num_kv_blocks == READY.num_blocks and load.fingerprint == READY.model.fingerprint
        second = await pool.pool.next_worker()
        assert second is not first
        for worker in (first, second):
            await worker.connection.end()


async def test_a_worker_that_waits_and_lacks_a_new_adapter_is_shut_down_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = LoraAdapter(1, "/adapters/a", "f" * 32, "a")
    async with pooling(tmp_path) as pool:
        workers = [(await pool.join())[0] for _ in range(3)]
        await pool.wait_for_idle(3)
        checking = asyncio.create_task(pool.pool.check_adapter(adapter))
        for worker, fingerprint in zip(workers, ("f" * 32, "another"), strict=False):
            assert await worker.receive() == LoadAdapter(adapter)
            worker.send(AdapterLoaded("", fingerprint, 8))
        assert await workers[2].receive() == LoadAdapter(adapter)
        await workers[2].stream.end()  # lost
        await checking
        assert await workers[1].receive() == Shutdown()
        await pool.wait_for_idle(1)
        assert (await pool.pool.next_worker()).connection.loss is None
    assert caplog.text.count("is not used: its files of the adapter 'a'") == 1


@pytest.mark.parametrize("is_taken_first", [False, True])
async def test_a_worker_that_begins_to_serve_while_an_adapter_is_loaded_is_asked_too_and_leaves_if_it_lacks_it(
    is_taken_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is taken before it is asked, or while it is."""
    adapter = LoraAdapter(1, "/adapters/a", "f" * 32, "a")
    async with pooling(tmp_path) as pool:
        worker, _ = await pool.join()
        await pool.wait_for_idle(1)
        taken = await pool.pool.next_worker() if is_taken_first else None
        checking = asyncio.create_task(pool.pool.check_adapter(adapter))
        assert await worker.receive() == LoadAdapter(adapter)
        taken = taken or await pool.pool.next_worker()
        left = asyncio.Event()
        taken.connection.on_leaving = left.set  # as the executor sets it
        worker.send(AdapterLoaded("there is none"))
        await checking
        assert left.is_set() and taken.connection.is_leaving
        await asyncio.gather(taken.connection.end(), worker.stream.end())
    assert caplog.text.count("is not used: it cannot serve the LoRA adapter 'a' in /adapters/a: there is none") == 1


async def test_a_worker_that_the_caller_has_asked_is_not_asked_again(tmp_path: Path) -> None:
    async with pooling(tmp_path) as pool:
        await pool.join()
        worker = await pool.pool.next_worker()
        async with asyncio.timeout(ENOUGH_S):
            await pool.pool.check_adapter(LoraAdapter(1, "/adapters/a", "f" * 32, "a"), [worker.connection])
        await asyncio.gather(worker.connection.end(), close_all())


async def test_a_worker_that_becomes_ready_while_an_adapter_is_loaded_is_asked_about_it(tmp_path: Path) -> None:
    """Another worker is being asked, so the adapter is not loaded yet."""
    adapter = LoraAdapter(1, "/adapters/a", "f" * 32, "a")
    async with pooling(tmp_path) as pool:
        first, _ = await pool.join()
        await pool.wait_for_idle(1)
        checking = asyncio.create_task(pool.pool.check_adapter(adapter))
        assert await first.receive() == LoadAdapter(adapter)
        second, _ = await pool.join()
        assert await second.receive() == LoadAdapter(adapter)
        second.send(AdapterLoaded("there is none"))
        refused = await second.receive()
        assert isinstance(refused, Refused) and refused.reason == "other_adapters"
        first.send(AdapterLoaded("", adapter.fingerprint, 8))
        await checking
        assert not pool.pool.adapters(), "the registry has it from now on"
        await second.stream.end()
        await pool.wait_for_idle(1)


async def test_a_worker_that_is_lost_while_it_waits_is_not_given(tmp_path: Path) -> None:
    async with pooling(tmp_path) as pool:
        lost, _ = await pool.join()
        await pool.wait_for_idle(1)
        await lost.stream.end()
        await pool.wait_for_idle(0)
        waiting = asyncio.create_task(pool.pool.next_worker())
        await pool.join()
        worker = await waiting
        assert worker.connection.loss is None
        await worker.connection.end()


async def test_a_worker_that_leaves_while_it_waits_is_shut_down(tmp_path: Path) -> None:
    async with pooling(tmp_path) as pool:
        leaving, _ = await pool.join()
        await pool.wait_for_idle(1)
        leaving.send(Leaving())
        assert await leaving.receive() == Shutdown()
        assert not pool.pool._idle


async def test_a_worker_with_another_number_of_blocks_is_shut_down(tmp_path: Path) -> None:
    """It began to load when no number was known. It joins again, and then gets the number."""
    async with pooling(tmp_path) as pool:
        await pool.join()
        await pool.wait_for_idle(1)
        other, _ = await pool.join(replace(READY, num_blocks=9))
        assert await other.receive() == Shutdown()
        assert len(pool.pool._idle) == 1


async def test_workers_join_when_the_servers_own_are_ready_and_must_compute_the_same(tmp_path: Path) -> None:
    """Model and data type are those of its own workers. The first one that joins sets the number of blocks."""
    async with pooling(tmp_path, data_parallel_size=2) as pool:
        with pytest.raises(HandshakeFailed, match="own workers load the model") as refused:
            await shake_hands(await connect(pool.address))
        assert not refused.value.is_permanent, "the worker tries again"
        pool.pool.first = replace(READY, num_blocks=999)
        other, load = await pool.join(replace(READY, dtype="bfloat16"))
        assert load.num_kv_blocks is None and load.fingerprint == READY.model.fingerprint
        refusal = await other.receive()
        assert isinstance(refusal, Refused) and refusal.reason == "other_model"
        await other.stream.end()
        await pool.join()
        await pool.wait_for_idle(1)
        _, load = await pool.join()
        assert load.num_kv_blocks == READY.num_blocks
        await pool.wait_for_idle(2)
        assert pool.refusals == ["loading", "other_model"]


async def test_a_worker_that_one_caller_does_not_accept_waits_for_another_one(tmp_path: Path) -> None:
    async with pooling(tmp_path) as pool:
        has_ten_gpus = asyncio.create_task(pool.pool.next_worker(lambda worker: worker.ready.device == "cuda:9"))
        await pool.join()
        await pool.wait_for_idle(1)
        assert pool.pool.take_worker(lambda worker: worker.ready.device != "cpu") is None and not has_ten_gpus.done()
        worker = pool.pool.take_worker(lambda worker: worker.ready.device == "cpu")
        assert worker is not None and pool.pool.take_worker(lambda _: True) is None
        await worker.connection.end()
        await pool.join(replace(READY, device="cuda:9"))
        async with asyncio.timeout(ENOUGH_S):
            await (await has_ten_gpus).connection.end()


def test_workers_that_exchange_blocks_have_a_random_name_of_their_group(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    (tmp_path / "key").chmod(0o600)

    async def group(num_bytes: int) -> bytes:
        settings = {"listen_workers": f"unix:{tmp_path}/s", "worker_key_file": str(tmp_path / "key")}
        pool = WorkerPool(ServeConfig(**settings))
        pool.start(replace(LOAD, kv_transfer_bytes=num_bytes))
        name = pool.load_model().kv_transfer_group
        await pool.stop()
        return name

    names = [asyncio.run(group(num_bytes)) for num_bytes in (0, 2**20, 2**20)]
    assert [len(name) for name in names] == [0, 16, 16] and names[1] != names[2]


async def test_a_draining_server_refuses_workers_unless_it_needs_one(tmp_path: Path) -> None:
    async with pooling(tmp_path) as pool:
        pool.pool.is_draining = True
        with pytest.raises(HandshakeFailed, match="draining"):
            await shake_hands(await connect(pool.address))
        waiting = asyncio.create_task(pool.pool.next_worker())
        await pool.join()
        worker = await waiting
        await worker.connection.end()


async def test_stopping_shuts_down_waiting_workers(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    worker, _ = await pool.join()
    await pool.wait_for_idle(1)
    stopping = asyncio.create_task(pool.pool.stop())
    assert await worker.receive() == Shutdown()
    await close_all()
    await stopping
