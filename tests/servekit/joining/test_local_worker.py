"""Tests of the ranks that an agent starts: to the server, they are one worker. The ranks are stand-ins."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import msgspec
import pytest
from msgspec.structs import replace

from servekit.executor.placement import Placement
from servekit.joining import local_worker
from servekit.joining.local_worker import LocalGroup
from servekit.protocol.messages import (
    BlocksListed,
    FromWorker,
    Heartbeat,
    ListBlocks,
    Loading,
    Profiled,
    RankInfo,
    Shutdown,
    StartProfile,
    StepResult,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from tests.servekit.executor.conftest import LOAD, PLAN, use_stand_ins

ENOUGH_S = 60.0
PLACEMENT = Placement("cpu", cpus=((3,), (0, 1)))
TWO_RANKS = replace(LOAD, tensor_parallel_size=2, heartbeat_timeout_s=60.0)


class Recorder:
    """The agent's side: what the ranks send, without signs of life, and why they have ended."""

    def __init__(self) -> None:
        self.has_beaten = asyncio.Event()  # a sign of life that the group sends for its ranks
        self.messages: asyncio.Queue[FromWorker] = asyncio.Queue()
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.group: LocalGroup | None = None

    def start(self, *behaviours: str) -> LocalGroup:
        arguments = [f"ranks: {', '.join(behaviours)}"]
        self.group = LocalGroup(TWO_RANKS, PLACEMENT, arguments, self._on_message, self.ends.put_nowait)
        return self.group

    def send(self, message: ToWorker) -> None:
        assert self.group is not None
        self.group.send(msgspec.msgpack.encode(message))

    def _on_message(self, payload: bytes) -> None:
        message: FromWorker = msgspec.msgpack.decode(payload, type=FromWorker)
        if isinstance(message, Heartbeat | Loading):
            self.has_beaten.set()
        else:
            self.messages.put_nowait(message)

    async def receive(self) -> FromWorker:
        async with asyncio.timeout(ENOUGH_S):
            return await self.messages.get()

    async def end(self) -> str:
        async with asyncio.timeout(ENOUGH_S):
            return await self.ends.get()


@pytest.fixture
async def ranks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Recorder]:
    use_stand_ins(monkeypatch)
    monkeypatch.setattr(local_worker, "HEARTBEAT_S", 0.01)
    recorder = Recorder()
    yield recorder
    if recorder.group is not None:
        await recorder.group.end()


async def test_two_ranks_are_one_worker_to_the_server(ranks: Recorder) -> None:
    ranks.start("works", "acknowledges")
    ready = await ranks.receive()
    assert isinstance(ready, WorkerReady) and ready.ranks == (RankInfo("cpu", "3"), RankInfo("cpu", "0-1"))
    for _ in range(3):
        ranks.send(PLAN)
        assert await ranks.receive() == StepResult(0, 0, (7,), 0.0)
    ranks.send(StartProfile("", 5))
    assert await ranks.receive() == Profiled(num_steps=5)
    for start, keys in ((0, (b"k" * 16,)), (1, ())):
        ranks.send(ListBlocks(start))
        assert await ranks.receive() == BlocksListed(keys), "of one rank, and not of each"
    async with asyncio.timeout(ENOUGH_S):
        await ranks.has_beaten.wait()
    ranks.send(Shutdown())
    assert await ranks.end() == "the ranks of the worker have exited"
    assert ranks.messages.empty()


@pytest.mark.parametrize(
    ("behaviour", "is_out_of_memory", "expected"),
    [
        ("runs out of memory", True, "rank 1 of the model worker ran out of memory"),
        (
            "acknowledges other tokens",
            False,
            "rank 1 of the model worker answered StepAcknowledged, which does",
        ),
        ("fails", False, "rank 1 of 2: the model worker failed"),
    ],
)
async def test_the_server_is_told_why_the_ranks_were_lost(
    ranks: Recorder, behaviour: str, is_out_of_memory: bool, expected: str
) -> None:
    ranks.start("works", behaviour)
    await ranks.receive()
    ranks.send(PLAN)
    message = await ranks.receive()
    while isinstance(message, StepResult):  # of the first rank, whose answer another one may have fitted
        message = await ranks.receive()
    assert isinstance(message, WorkerFailed) and message.message.startswith(expected)
    assert message.is_out_of_memory == is_out_of_memory and not message.is_config_error
    assert expected in await ranks.end()


async def test_a_rank_that_is_killed_ends_all(ranks: Recorder) -> None:
    group = ranks.start("hangs", "acknowledges")
    await ranks.receive()
    ranks.send(PLAN)
    pids = [worker.pid for worker in group._group._ranks]
    assert pids[1] is not None
    os.kill(pids[1], signal.SIGKILL)
    message = await ranks.receive()
    assert (
        isinstance(message, WorkerFailed) and "rank 1 of 2: the model worker was killed by SIGKILL" in message.message
    )
    await ranks.end()
    await group.end()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_ranks_that_do_not_load_alike_are_not_ready(ranks: Recorder) -> None:
    ranks.start("works", "has other blocks")
    message = await ranks.receive()
    assert isinstance(message, WorkerFailed) and "answered WorkerReady, which does not fit" in message.message
