"""Tests of a connection to a worker: its end is reported once, whatever ends it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from servekit.joining.socket_stream import SocketStream
from tests.servekit.joining.clients import ENOUGH_S


async def connected() -> tuple[SocketStream, socket.socket]:
    """A stream, and the socket of its peer."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    return SocketStream(reader, writer, "the peer"), theirs


async def test_a_mistake_in_what_handles_the_bytes_is_reported_as_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the connection would stay open without a reader, and without an error."""
    stream, peer = await connected()
    ends: asyncio.Queue[str] = asyncio.Queue()

    def fail(data: bytes) -> None:
        raise AssertionError("a mistake")

    stream.start(fail, ends.put_nowait)
    peer.send(b"hello")
    async with asyncio.timeout(ENOUGH_S):
        assert await ends.get() == "was disconnected by an internal error (AssertionError: a mistake)"
    assert await stream.wait_ended(ENOUGH_S) and "Traceback" in caplog.text
    await stream.end()
    assert ends.empty()
    peer.close()


async def test_the_end_of_the_peer_is_reported_after_its_last_bytes() -> None:
    stream, peer = await connected()
    events: asyncio.Queue[object] = asyncio.Queue()
    stream.start(events.put_nowait, events.put_nowait)
    peer.send(b"last")
    peer.close()
    async with asyncio.timeout(ENOUGH_S):
        assert [await events.get(), await events.get()] == [b"last", "closed the connection"]
    await stream.end()
