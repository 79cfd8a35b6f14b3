"""A connection between an API process and the engine process delivers in order, is bounded, and reports its end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from servekit.api_processes import messages as ms
from servekit.api_processes.frame_connection import FrameConnection

LIMIT_S = 60


class End:
    """One end of a connection, and what arrived there."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.has_ended = asyncio.Event()
        self.connection: FrameConnection[Any]

    async def open(self, connected: socket.socket) -> End:
        on_end = self.has_ended.set
        self.connection = await FrameConnection.open(connected, ms.FromApiProcess, self.arrived.append, on_end)
        return self


async def until_arrived(end: End, number: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(end.arrived) < number:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_messages_arrive_in_order_and_the_end_is_reported() -> None:
    a, b = socket.socketpair()
    here, there = await End().open(a), await End().open(b)
    for number in range(1000):
        here.connection.send(ms.Abort(number))
    await until_arrived(there, 1000)
    assert [each.request for each in there.arrived] == list(range(1000))
    here.connection.close()
    async with asyncio.timeout(LIMIT_S):
        await there.has_ended.wait()
        await here.has_ended.wait()
    there.connection.send(ms.Abort(0))  # is ignored


async def test_a_peer_that_does_not_read_makes_it_full_and_reading_makes_room() -> None:
    a, b = socket.socketpair()
    here = await End().open(a)
    had_room = asyncio.Event()
    here.connection.on_room = had_room.set
    large = ms.AddPrompt(0, bytes(2**20), [], [])
    for _ in range(8):
        here.connection.send(large)
    assert here.connection.is_full
    there = await End().open(b)
    async with asyncio.timeout(LIMIT_S):
        await had_room.wait()
    await until_arrived(there, 8)
    assert not here.connection.is_full
    here.connection.close()
    there.connection.close()


async def test_bytes_that_are_no_message_end_the_connection() -> None:
    a, b = socket.socketpair()
    here = await End().open(a)
    b.sendall(b"\x00\x00\x00\x01\xc1")
    async with asyncio.timeout(LIMIT_S):
        await here.has_ended.wait()
    b.close()
