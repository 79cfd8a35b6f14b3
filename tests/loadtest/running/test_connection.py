"""Test connections over real sockets, against servers that do one thing each."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from loadtest.errors import LoadTestError
from loadtest.record import Outcome
from loadtest.running import connection_pool
from loadtest.running.address import resolve
from loadtest.running.clock import Heartbeat, Timer, now_s
from loadtest.running.connection_pool import Pool
from loadtest.running.exchange import Exchange
from tests.support.timing import again_if_late, assert_on_time, assert_within, until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
LIMITED = b'{"error":{"code":"rate_limited"}}'


def run(main: Coroutine[Any, Any, None]) -> None:
    """On the loop that runs use; nothing may get lost in its exception handler."""
    lost: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        async with asyncio.timeout(60):
            await main

    uvloop.run(watched())
    assert not lost


class Asked(Exchange):
    """An exchange that can be waited for."""

    __slots__ = ("ended",)

    def __init__(self, body: bytes = b"{}") -> None:
        super().__init__(body)
        self.ended = asyncio.Event()

    def on_end(self) -> None:
        self.ended.set()


@asynccontextmanager
async def served(handle: Handler) -> AsyncIterator[str]:
    """A server's URL; each connection is handled once, and then closed unless the handler has done so."""
    tasks: set[asyncio.Task[None]] = set()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(once(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def pool_to(url: str, **settings: Any) -> AsyncIterator[Pool]:
    pool = Pool(asyncio.get_running_loop(), resolve(url), "/generate", **settings)
    try:
        yield pool
    finally:
        await pool.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """(head, body)"""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(next(line for line in head.split("\r\n") if line.lower().startswith("content-length")).split(":")[1])
    return head, await reader.readexactly(length)


def saying(*pieces: bytes, closes: bool = True, pause_s: float = 0.0) -> Handler:
    """Answers one request with these, and closes or stays."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if not closes:
            await reader.read()

    return handle


async def resetting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await read_request(reader)
    writer.write(STREAM + b"1\r\nx\r\n")
    await writer.drain()
    await asyncio.sleep(0.05)
    linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # on, 0 s: close with a reset
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


# -- outcomes ----------------------------------------------------------------------------------------------------------

ANSWERS: dict[str, tuple[Handler, int, Outcome | None, str]] = {
    "a length": (saying(WHOLE, closes=False), 200, None, ""),
    "chunks": (saying(STREAM + b"2\r\n{}\r\n", b"0\r\n\r\n", closes=False), 200, None, ""),
    "until closed": (saying(b"HTTP/1.1 200 OK\r\n\r\n", b"{}"), 200, None, ""),
    "after 100": (saying(b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, closes=False), 200, None, ""),
    "refused": (saying(WHOLE.replace(b"200 OK", b"503 No"), closes=False), 503, None, ""),
    "no content": (saying(b"HTTP/1.1 204 No Content\r\n\r\n", closes=False), 204, None, ""),
    "nothing": (saying(), 0, Outcome.CUT, "closed before the answer"),
    "half a head": (saying(b"HTTP/1.1 200 OK\r\ncontent-"), 0, Outcome.CUT, "closed before the answer"),
    "too short": (
        saying(WHOLE.replace(b"length: 2", b"length: 9")),
        200,
        Outcome.CUT,
        "closed in the middle of the answer",
    ),
    "half a chunk": (saying(STREAM + b"9\r\n{}"), 200, Outcome.CUT, "closed in the middle of the answer"),
    "no last chunk": (saying(STREAM + b"2\r\n{}\r\n"), 200, Outcome.CUT, "closed in the middle of the answer"),
    "a reset": (resetting, 200, Outcome.CUT, "connection reset by peer in the middle of the answer"),
    "no HTTP": (saying(b"SSH-2.0-OpenSSH\r\n"), 0, Outcome.GARBLED, "not HTTP/1.1"),
    "bad chunks": (saying(STREAM + b"zz\r\n"), 200, Outcome.GARBLED, "not HTTP/1.1"),
    "two answers": (saying(WHOLE + WHOLE, closes=False), 200, Outcome.GARBLED, "not HTTP/1.1"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_each_way_to_end_has_its_outcome(answer: tuple[Handler, int, Outcome | None, str]) -> None:
    handler, status, outcome, error = answer

    async def main() -> None:
        async with served(handler) as url, pool_to(url) as pool:
            asked = Asked()
            began_s = now_s()
            pool.send(asked)
            await asked.ended.wait()
            assert (asked.status, asked.outcome) == (status, outcome)
            assert asked.error.startswith(error) if outcome else not asked.error
            assert began_s <= asked.started_s <= asked.ended_s <= now_s()

    run(main())


def test_a_complete_body_is_delivered() -> None:
    async def main() -> None:
        pieces = (STREAM + b"1\r\n{\r\n", b"1\r\n", b"}\r\n0\r", b"\n\r\n")
        async with served(saying(*pieces, closes=False, pause_s=0.01)) as url, pool_to(url) as pool:
            asked = Asked()
            pool.send(asked)
            await asked.ended.wait()
            assert asked.is_stream and bytes(asked.received) == b"{}"
            assert list(asked.ends) == [1, 2]
            assert asked.first_s == asked.times_s[0] and asked.times_s[1] - asked.times_s[0] >= 0.015
            assert asked.ended_s - asked.times_s[1] >= 0.005, "the end came later than the last of the body"

    run(main())


def test_a_missing_server_is_unreached() -> None:
    async def main() -> None:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))  # and does not listen
            async with pool_to(f"http://127.0.0.1:{reserved.getsockname()[1]}") as pool:
                asked = [Asked() for _ in range(5)]
                for each in asked:
                    pool.send(each)
                    assert not each.is_ended, (
                        "it fails later, or a client of a closed loop would ask from within its end"
                    )
                for each in asked:
                    await each.ended.wait()
                    assert (each.outcome, each.error) == (Outcome.UNREACHED, "connection refused")
                    assert 0 < each.started_s <= each.ended_s
                assert pool.num_connections == 0

    run(main())


def test_limits_of_the_client_are_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_files(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def main() -> None:
        async with pool_to("http://127.0.0.1:1") as pool:
            asked = Asked()
            with monkeypatch.context() as patch:
                patch.setattr("loadtest.running.connection_pool.socket.socket", out_of_files)
                pool.send(asked)
            assert not asked.is_ended
            await asked.ended.wait()
            assert asked.outcome is Outcome.UNREACHED and "ulimit -n" in asked.error

    run(main())


@pytest.mark.parametrize("when", ["waiting", "connecting", "asked", "streaming"])
def test_a_cancelled_exchange_ends_at_once_and_closes_its_connection(when: str) -> None:
    async def main() -> None:
        pieces = [STREAM + b"1\r\nx\r\n"] if when == "streaming" else []
        async with served(saying(*pieces, closes=False)) as url, pool_to(url, max_connections=1) as pool:
            first, asked = Asked(), Asked()
            if when == "waiting":
                pool.send(first)
            pool.send(asked)
            if when != "connecting":
                await asyncio.sleep(0.015)
            pool.cancel(asked, Outcome.TIMEOUT, "before the answer")
            assert asked.is_ended and (asked.outcome, asked.error) == (Outcome.TIMEOUT, "before the answer")
            if when == "waiting":
                pool.cancel(first, Outcome.TIMEOUT, "")
            await until(lambda: pool.num_connections == 0)
            again = Asked()
            pool.send(again)
            await until(lambda: again.started_s > 0)  # so its place is free again
            assert not again.is_ended
            pool.cancel(again, Outcome.CUT, "")

    run(main())


# -- connections that are kept -----------------------------------------------------------------------------------------


class Counting:
    """Answers every request over a connection, and notes where they come from."""

    def __init__(self, answer: bytes = WHOLE, pause_s: float = 0.0) -> None:
        self.peers: list[tuple[str, int]] = []
        self.heads: list[str] = []
        self.num_open = self.most_open = 0
        self._answer = answer
        self._pause_s = pause_s

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(writer.get_extra_info("peername"))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            while True:
                head, _ = await read_request(reader)
                self.heads.append(head)
                await asyncio.sleep(self._pause_s)
                writer.write(self._answer)
        finally:
            self.num_open -= 1


async def ask(pool: Pool, num: int = 1) -> list[Asked]:
    asked = [Asked() for _ in range(num)]
    for each in asked:
        pool.send(each)
    for each in asked:
        await each.ended.wait()
        assert each.outcome is None and each.status == 200
    return asked


def test_a_connection_is_reused() -> None:
    async def main() -> None:
        server = Counting()
        async with served(server) as url, pool_to(url, api_key="secret") as pool:
            for _ in range(5):
                (asked,) = await ask(pool)
                assert asked.started_s <= asked.ended_s
            assert len(server.peers) == 1 == pool.num_connections
            assert "POST /generate HTTP/1.1\r\n" in server.heads[0]
            assert "Authorization: Bearer secret\r\n" in server.heads[0]
            assert f"Host: {url.removeprefix('http://')}\r\n" in server.heads[0]

    run(main())


def test_without_keep_alive_each_request_has_a_connection_of_its_own_and_says_so() -> None:
    async def main() -> None:
        server = Counting()
        async with served(server) as url, pool_to(url, keep_alive=False) as pool:
            for _ in range(3):
                (asked,) = await ask(pool)
                assert asked.outcome is None and asked.status == 200
            assert len(server.peers) == 3 and all("\r\nConnection: close\r\n" in head for head in server.heads)
        async with served(server) as url, pool_to(url, keep_alive=False, max_connections=2) as pool:
            await ask(pool, 5)
            assert len(server.peers) == 8, "those who wait for a connection get a new one, too"

    run(main())


def test_a_server_that_closes_without_saying_so_loses_no_request_without_keep_alive() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM + chunk(b"data: {}\n\n") + b"0\r\n\r\n")  # HTTP/1.1, so the connection seems to stay open
        await writer.drain()
        await reader.read(1)  # the client's next request, or its end

    async def outcomes(pool: Pool) -> list[Outcome | None]:
        found = []
        for _ in range(2):
            asked = Asked()
            pool.send(asked)
            await asked.ended.wait()
            found.append(asked.outcome)
        return found

    async def main() -> None:
        async with served(silent) as url:
            async with pool_to(url) as pool:
                assert await outcomes(pool) == [None, Outcome.CUT]
            async with pool_to(url, keep_alive=False) as pool:
                assert await outcomes(pool) == [None, None]

    run(main())


def test_a_connection_idle_for_long_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "MAX_IDLE_S", 0.02)

    async def main() -> None:
        server = Counting()
        async with served(server) as url, pool_to(url, max_connections=3) as pool:
            await ask(pool, 3)
            await asyncio.sleep(0.05)
            await ask(pool, 1)
            assert len(server.peers) == 4 and pool.num_connections == 1, "and all that were idle so long are closed"

    run(main())


def test_bytes_after_an_answer_do_not_reach_the_next_one() -> None:
    async def main() -> None:
        files: list[int] = []
        more: list[object] = []

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            files.append(writer.get_extra_info("socket").fileno())
            while True:
                await read_request(reader)
                writer.write(WHOLE)

        async with served(handle) as url, pool_to(url, on_extra_bytes=more.append) as pool:
            (first,) = await ask(pool)
            os.write(files[0], WHOLE)  # it is there, and the loop has not read it
            (second,) = await ask(pool)
            assert more == [first] and len(files) == 2
            os.write(files[1], b"x")
            await until(lambda: more == [first, second] and pool.num_connections == 0)

    run(main())


def test_a_408_on_an_idle_connection_is_no_extra_data() -> None:
    async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(WHOLE)
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")

    async def main() -> None:
        more: list[object] = []
        async with served(impatient) as url, pool_to(url, on_extra_bytes=more.append) as pool:
            await ask(pool)
            await until(lambda: pool.num_connections == 0)
            assert not more

    run(main())


def test_an_answer_that_ends_by_closing_is_complete() -> None:
    async def main() -> None:
        server = Counting(WHOLE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        async with served(server) as url, pool_to(url) as pool:
            for _ in range(3):
                await ask(pool)
            assert len(server.peers) == 3
        async with served(server) as url, pool_to(url, max_connections=1) as pool:
            await ask(pool, 3)
            assert len(server.peers) == 6, "also by those who waited for it"

    run(main())


def test_requests_without_a_free_connection_wait_in_order() -> None:
    async def main() -> None:
        server = Counting(pause_s=0.01)
        async with served(server) as url, pool_to(url, max_connections=2) as pool:
            asked = await ask(pool, 8)
            assert server.most_open == 2 and len(server.peers) == 2
            starts = [each.started_s for each in asked]
            assert starts == sorted(starts)
            assert starts[7] - starts[0] >= 0.025, "three rounds were before it"

    run(main())


def test_connections_come_from_each_address_and_go_to_each() -> None:
    async def main() -> None:
        server = Counting(pause_s=0.02)
        async with served(server) as url:
            addresses = resolve(url)
            other = addresses[0]._replace(host="other")
            sources = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
            pool = Pool(asyncio.get_running_loop(), [*addresses, other], "/generate", sources=sources)
            await ask(pool, 12)
            counts = [sum(host == source for host, _ in server.peers) for source in sources]
            assert counts == [4, 4, 4]
            assert sum("Host: other" in head for head in server.heads) == 6
            await pool.close()

    run(main())


@pytest.mark.parametrize(
    "url", ["https://localhost", "localhost:8000", "http://127.0.0.1:8000/v1", "http://", "http://127.0.0.1:99999"]
)
def test_urls_that_are_not_supported_are_refused(url: str) -> None:
    with pytest.raises(LoadTestError, match=r"is not supported; write|cannot be resolved"):
        resolve(url)


# -- the clock ---------------------------------------------------------------------------------------------------------


@again_if_late
def test_a_timer_fires_on_time_and_not_before() -> None:
    async def main() -> None:
        rung: list[float] = []
        alarm = Timer(asyncio.get_running_loop(), lambda: rung.append(now_s()))
        late: list[float] = []
        for number in range(10):
            due_s = now_s() + 0.001 + number * 0.000_13
            alarm.set(due_s + 1.0)
            alarm.set(due_s)  # it moves
            await until(lambda number=number: len(rung) > number)  # type: ignore[misc]
            late.append(rung[-1] - due_s)
        assert len(rung) == 10 and min(late) >= -1e-6
        assert_within(0.002, sorted(late)[2], "and not at the next full millisecond but one")
        alarm.set(now_s() - 5.0)
        await until(lambda: len(rung) == 11)  # what is over is rung for at once
        alarm.close()

    run(main())


def stand_still(seconds: float) -> None:
    end_s = now_s() + seconds
    while now_s() < end_s:
        pass


@again_if_late
async def test_a_stall_counts_as_as_many_late_beats_as_it_lasts() -> None:
    start_s = now_s()
    heartbeat = Heartbeat(asyncio.get_running_loop(), start_s, 0.01, lambda: None)
    await asyncio.sleep(0.03)
    stand_still(0.1)
    await asyncio.sleep(0.03)
    heartbeat.stop()
    assert_on_time(abs(len(heartbeat.lags_s) - (now_s() - start_s) / 0.01) <= 1, "each beat is counted once")
    # 100 ms are ten beats, which were 100, 90, 80, … ms late.
    assert max(heartbeat.lags_s) >= 0.085
    assert sum(lag > 0.045 for lag in heartbeat.lags_s) >= 5
    assert sum(heartbeat.lags_s) >= 0.4


async def test_a_stall_at_the_end_is_counted() -> None:
    heartbeat = Heartbeat(asyncio.get_running_loop(), now_s(), 0.01, lambda: None)
    await asyncio.sleep(0.005)
    stand_still(0.05)
    heartbeat.stop()
    assert max(heartbeat.lags_s) > 0.03
