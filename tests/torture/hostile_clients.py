"""Run faulty clients, or polite ones that send the same requests, in a process of the lowest priority.

python -m tests.torture.hostile_clients FAULT PORT TIMES (hostile | polite)
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

AT_ONCE = 32
NUM_EVENTS = 70
STORM_INTERVAL_S = 0.06  # 530 requests/s in total
TIMEOUT_S = 30.0  # by then the server has closed every connection that it closes


class Outcome(Struct):
    """How many cases ended as expected: closed by the client, or by the server where it has to."""

    num_expected: int = 0
    others: list[str] = msgspec.field(default_factory=list)


class Client:
    """One raw connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(cls, port: int, receive_buffer: int | None = None) -> Client:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        return cls(connection)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def post(self, path: str, body: dict[str, object]) -> None:
        data = msgspec.json.encode(body)
        await self.send(b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(data), data))

    async def read(self, num_bytes: int = 2**16) -> bytes:
        return await self._loop.sock_recv(self.socket, num_bytes)

    async def read_events(self, num_events: int) -> None:
        while num_events > 0:
            received = await self.read()
            if not received:
                raise EOFError
            num_events -= received.count(b"data: ")

    async def read_until_closed(self) -> None:
        with suppress(ConnectionError):
            while await self.read():
                pass

    def reset(self) -> None:
        reset_on_close(self.socket)


def reset_on_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


Fault = Callable[[int, random.Random, bool], Awaitable[None]]


def _story(max_tokens: int, **fields: object) -> dict[str, object]:
    return {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": max_tokens, **fields}


async def _leave(port: int, chance: random.Random, polite: bool, leave: Callable[[Client], None]) -> Client:
    client = await Client.connect(port)
    num_tokens = chance.randint(1, 20)
    await client.post("/generate_stream", _story(num_tokens if polite else 300))
    await client.read_events(num_tokens)
    if not polite:
        leave(client)
    return client


async def reset(port: int, chance: random.Random, polite: bool) -> None:
    (await _leave(port, chance, polite, Client.reset)).socket.close()


async def half_close(port: int, chance: random.Random, polite: bool) -> None:
    client = await _leave(port, chance, polite, lambda client: client.socket.shutdown(socket.SHUT_WR))
    if not polite:
        await client.read_until_closed()
    client.socket.close()


_LONG_STORY = _story(NUM_EVENTS, logprobs=20)  # more than 100 KB, which fills all buffers between server and client


async def _leave_unread(port: int, polite: bool, num_bytes: int) -> None:
    """Read `num_bytes` a second until the server resets the connection, which only the socket's error shows."""
    client = await Client.connect(port, None if polite else 2048)
    await client.post("/generate_stream", _LONG_STORY)
    if polite:
        await client.read_events(NUM_EVENTS)
    while not polite and not client.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        await asyncio.sleep(1 if num_bytes else 0.1)
        with suppress(ConnectionError):
            if num_bytes and not await client.read(num_bytes):
                break
    client.socket.close()


async def never_read(port: int, chance: random.Random, polite: bool) -> None:
    await _leave_unread(port, polite, 0)


async def read_a_byte_a_second(port: int, chance: random.Random, polite: bool) -> None:
    await _leave_unread(port, polite, 1)


async def _drip(port: int, polite: bool, head: bytes, rest: bytes) -> None:
    client = await Client.connect(port)
    if polite:
        await client.send(b"GET /health HTTP/1.1\r\n\r\n")
        await client.read()
        await asyncio.sleep(1)
    else:
        await client.send(head)
        reading = asyncio.create_task(client.read_until_closed())
        for byte in rest:
            if reading.done():
                break
            try:
                await client.send(bytes([byte]))
            except ConnectionError:
                break
            await asyncio.wait([reading], timeout=0.2)
        await reading
    client.socket.close()


async def slow_head(port: int, chance: random.Random, polite: bool) -> None:
    await _drip(port, polite, b"", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")


async def slow_body(port: int, chance: random.Random, polite: bool) -> None:
    await _drip(port, polite, b"POST /generate HTTP/1.1\r\nContent-Length: 1000\r\n\r\n", b'{"prompt": "' + b"a" * 988)


async def abort_storm(port: int, chance: random.Random, polite: bool) -> None:
    # Both send equally often: otherwise clients that disconnect early would send more requests, which is no fault.
    over = asyncio.create_task(asyncio.sleep(STORM_INTERVAL_S))
    client = await Client.connect(port)
    await client.post("/generate", _story(2 if polite else 300))
    if polite:
        await client.read()
    else:
        await asyncio.sleep(chance.random() * 0.03)
    client.socket.close()
    await over


async def garbage(port: int, chance: random.Random, polite: bool) -> None:
    client = await Client.connect(port)
    if polite:
        await client.send(b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
    else:
        beginnings = (b"", b"GET / HTTP/1.1\r\n", b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            await client.send(chance.choice(beginnings) + chance.randbytes(chance.randint(1, 3000)))
    await client.read_until_closed()
    client.socket.close()


FAULTS: dict[str, Fault] = {
    "reset": reset,
    "half-close": half_close,
    "never reads": never_read,
    "reads 1 byte/s": read_a_byte_a_second,
    "slow head": slow_head,
    "slow body": slow_body,
    "abort storm": abort_storm,
    "garbage": garbage,
}


async def _run(faults: list[str], port: int, times: int, polite: bool) -> Outcome:
    outcome = Outcome()
    cases = iter([(fault, number) for number in range(times) for fault in faults])

    async def repeat() -> None:
        for fault, number in cases:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await FAULTS[fault](port, random.Random(f"{fault} {number}"), polite)
                outcome.num_expected += 1
            except (OSError, EOFError) as error:  # includes TimeoutError
                outcome.others.append(f"{fault}: {error!r}")

    await asyncio.gather(*(repeat() for _ in range(AT_ONCE)))
    return outcome


def main() -> None:
    os.nice(19)
    faults, port, times, manner = sys.argv[1:]
    outcome = asyncio.run(_run(faults.split(","), int(port), int(times), manner == "polite"))
    print(msgspec.json.encode(outcome).decode())


if __name__ == "__main__":
    main()
