"""One connection's protocol, over a real socket, with a small ASGI application behind it."""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from servekit.api.body_writer import body_writer_of
from servekit.api.disconnect import disconnect_of
from servekit.config import ServeConfig
from servekit.server import http_protocol
from servekit.server.http_protocol import LimitedHttpProtocol, limited_protocol
from tests.support.pauses import pause

LIMIT_S = 60
LARGE = 2**24  # bytes, more than the kernel holds for a client that does not read


class Service:
    """A listening server, and what its application has seen."""

    def __init__(self) -> None:
        self.port = 0
        self.protocol: type[LimitedHttpProtocol]
        self.refusals: list[str] = []
        self.scopes: list[Scope] = []
        self.bodies: list[bytes] = []
        self.was_ready: list[bool] = []  # of the writer of /written: before the head, for each part, and at the end
        self.has_disconnected = asyncio.Event()
        self.may_end = asyncio.Event()
        self.state = ServerState()
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def num_lingering(self) -> int:
        return len(self.protocol.shared.lingering)

    @property
    def connections(self) -> list[LimitedHttpProtocol]:
        return [cast(LimitedHttpProtocol, each) for each in self.state.connections]

    def drain(self, refuses: bool = False) -> None:
        self.protocol.shared.is_draining, self.protocol.shared.is_refusing = True, refuses
        for connection in self.connections:
            connection.drain()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """/refuse answers before the body is read; /wait never answers; /echo reads the body first; /large is long.

        /late waits for `may_end` before it answers, /stream between the first and the last part of its answer.
        """
        self.scopes.append(scope)
        if scope["path"] == "/wait":
            disconnect_of(scope).set_callback(self.has_disconnected.set)
            await self.has_disconnected.wait()
            return
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.may_end.wait()
            await send({"type": "http.response.body", "body": b"last"})
            return
        if scope["path"] == "/written":
            await self._write(scope, send)
            return
        if scope["path"] == "/late":
            await self.may_end.wait()
        body = bytes(LARGE) if scope["path"] == "/large" else b"refused"
        if scope["path"] == "/echo":
            body = b""
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            self.bodies.append(body)
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _write(self, scope: Scope, send: Send) -> None:
        """Write past the application's layers as long as the protocol is ready for that, at most LARGE bytes."""
        writer = body_writer_of(scope)
        assert writer is not None
        self.was_ready.append(writer.is_ready)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        num_written = 0
        while writer.is_ready and num_written < LARGE:
            writer.write(b"written ")
            num_written += 8
            self.was_ready.append(True)
        self.was_ready.append(writer.is_ready)
        await send({"type": "http.response.body", "body": b"sent"})
        self.was_ready.append(writer.is_ready)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Service]:
    service = Service()
    service.protocol = limited_protocol(ServeConfig(**settings), service.refusals.append)
    config = uvicorn.Config(
        service, http=service.protocol, ws="none", interface="asgi3", lifespan="off", log_config=None
    )
    config.load()
    state = service.state
    server = await asyncio.get_running_loop().create_server(
        lambda: service.protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    service.port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(LIMIT_S):
            yield service
    finally:
        server.close()
        for connection in [*state.connections, *service.protocol.shared.lingering]:
            connection.transport.abort()  # type: ignore[attr-defined]
        service.has_disconnected.set()
        service.may_end.set()
        for writer in service.writers:
            if not writer.is_closing():  # asyncio cannot abort one that closed after its last write
                writer.transport.abort()
        await asyncio.sleep(0.01)


def head(path: str, content_length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {content_length}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def send_until_closed(writer: asyncio.StreamWriter) -> int:
    """Send until the server closes or resets the connection. Returns about how many bytes it took."""
    num_bytes = 0
    with suppress(ConnectionError):
        while True:
            writer.write(bytes(2**16))
            await writer.drain()
            num_bytes += 2**16
            await asyncio.sleep(0)
    return num_bytes


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


# -- chunks ------------------------------------------------------------------------------------------------------------


def chunked(pieces: list[bytes]) -> bytes:
    head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])


async def test_body_of_one_byte_chunks_is_refused_after_the_first_of_them() -> None:
    num_chunks = http_protocol.MAX_SHORT_CHUNKS
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(chunked([b"a"] * num_chunks) * 2)  # each body has its own count
        for _ in range(2):
            assert (await reader.readuntil(b"a" * num_chunks)).startswith(b"HTTP/1.1 200")
        writer.write(chunked([b"a"] * 100 * num_chunks))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400") and b"send larger chunks" in answer
        assert service.refusals == ["invalid_http"]


async def test_many_chunks_of_ordinary_length_are_one_body() -> None:
    pieces = [bytes([at % 256]) * 512 for at in range(4 * http_protocol.MAX_SHORT_CHUNKS)]
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(chunked(pieces))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert service.bodies == [b"".join(pieces)]


# -- answers before the body's end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_client_can_send_its_whole_body_and_then_read_an_early_answer(connection: str) -> None:
    """As urllib and http.client do: they read nothing until everything is sent."""
    num_bytes = 2**25
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/refuse", num_bytes, f"Connection: {connection}"))
        for _ in range(num_bytes // 2**20):
            writer.write(bytes(2**20))
            await writer.drain()
        assert (await reader.readuntil(b"refused")).startswith(b"HTTP/1.1 200")
        if connection == "close":
            assert await reader.read() == b""
        else:
            writer.write(head("/echo", 3) + b"abc")
            assert (await reader.readuntil(b"abc")).startswith(b"HTTP/1.1 200")
        writer.close()
        await until(lambda: service.num_lingering == 0)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_lingering_ends_at_its_bound_of_bytes(connection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DISCARDED_BYTES", 2**20)
    async with serving() as service:
        _, writer = await service.connect()
        writer.write(head("/refuse", 2**40, f"Connection: {connection}"))
        assert await send_until_closed(writer) < 2**25, "the kernel's buffers take some more"
        await until(lambda: service.num_lingering == 0)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_lingering_ends_at_its_bound_of_time(connection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.3)
    async with serving() as service:
        _, writer = await service.connect()
        started_s = asyncio.get_running_loop().time()
        writer.write(head("/refuse", 2**40, f"Connection: {connection}"))
        with suppress(ConnectionError):
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        # The bound of bytes would end it after a day, and serving() waits for a minute.
        assert asyncio.get_running_loop().time() - started_s >= 0.25


async def test_lingering_ends_soon_when_the_client_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_IDLE_S", 0.1)
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/refuse", 2**40, "Connection: close"))
        await reader.read()
        await until(lambda: service.num_lingering == 1)
        await until(lambda: service.num_lingering == 0)


async def test_only_so_many_connections_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_LINGERING", 2)
    async with serving() as service:
        for _ in range(4):
            reader, writer = await service.connect()
            writer.write(head("/refuse", 2**40))
            assert (await reader.readuntil(b"refused")).startswith(b"HTTP/1.1 200")
        assert service.num_lingering == 2
        assert await reader.read() == b"", "the last one is closed at once"


# -- requests to change the protocol -----------------------------------------------------------------------------------

H2C = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)


@pytest.mark.parametrize("pieces", [1, 3, 400])
async def test_body_of_a_request_with_an_upgrade_header_is_read(pieces: int) -> None:
    """Java's HttpClient sends this with its first request."""
    async with serving() as service:
        reader, writer = await service.connect()
        request = head("/echo", 11, *H2C) + b"hello world" + head("/echo", 3) + b"abc"
        for at in range(0, len(request), -(-len(request) // pieces)):
            writer.write(request[at : at - (-len(request) // pieces)])
            await asyncio.sleep(0)
        await reader.readuntil(b"hello world")
        await reader.readuntil(b"abc")
        assert service.bodies == [b"hello world", b"abc"]
        names = [name for name, _ in service.scopes[0]["headers"]]
        assert b"upgrade" not in names and b"http2-settings" in names


async def test_a_chain_of_upgrade_requests_is_bounded_like_any_pipeline() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write((head("/echo", 1, *H2C) + b"a") * 200)
        answers = await reader.read()
        assert answers.count(b"HTTP/1.1 200") <= http_protocol.MAX_PIPELINED + 1
        writer.close()


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_every_upgrade_is_ignored_whatever_the_body(protocol: str, is_chunked: bool) -> None:
    lines = ["Connection: Upgrade", f"Upgrade: {protocol}", "Expect: 100-continue"]
    async with serving() as service:
        reader, writer = await service.connect()
        if is_chunked:
            lines.append("Transfer-Encoding: chunked")
            writer.write("\r\n".join(["POST /echo HTTP/1.1", "Host: a", *lines, "\r\n"]).encode())
        else:
            writer.write(head("/echo", 5, *lines))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"5\r\nhello\r\n0\r\n\r\n" if is_chunked else b"hello")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        assert service.bodies == [b"hello", b""]


# -- versions, codings and connection headers --------------------------------------------------------------------------


UNSUPPORTED = "http_feature_unsupported"


@pytest.mark.parametrize(
    ("line", "headers", "status", "code"),
    [
        ("GET / HTTP/2.0", [], 505, "http_version_unsupported"),
        ("GET / HTTP/0.9", [], 505, "http_version_unsupported"),
        ("POST /echo HTTP/1.1", ["Transfer-Encoding: gzip, chunked"], 501, UNSUPPORTED),
        (
            "POST /echo HTTP/1.1",
            ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"],
            501,
            "http_feature_unsupported",
        ),
        ("POST /echo HTTP/1.1", ["Transfer-Encoding: gzip"], 501, UNSUPPORTED),
        ("POST /echo HTTP/1.1", ["Transfer-Encoding: chunked, chunked"], 400, "invalid_http"),
    ],
)
async def test_what_the_server_does_not_speak_is_refused_and_the_connection_closed(
    line: str, headers: list[str], status: int, code: str
) -> None:
    smuggled = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write("\r\n".join([line, "Host: a", *headers, "\r\n"]).encode() + smuggled)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 %d " % status) and answer.count(b"content-length") == 1
        assert answer.count(b"connection: close\r\n") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code
        assert not service.scopes


@pytest.mark.parametrize("value", ["chunked", "CHUNKED", "  chunked "])
async def test_chunked_alone_is_read(value: str) -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(f"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: {value}\r\n\r\n".encode())
        writer.write(b"3\r\nabc\r\n0\r\n\r\n")
        await reader.readuntil(b"abc")
        assert service.bodies == [b"abc"]


@pytest.mark.parametrize("path", ["/stream", "/echo"])
async def test_http_1_0_gets_no_chunks_and_the_close_ends_the_answer(path: str) -> None:
    async with serving() as service:
        service.may_end.set()
        reader, writer = await service.connect()
        writer.write(f"POST {path} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: 3\r\n\r\nabc".encode())
        names, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in names and names.count(b"connection:") == 1 and b"connection: close" in names
        assert body == {"/stream": b"firstlast", "/echo": b"abc"}[path]


# -- pipelined requests ------------------------------------------------------------------------------------------------


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _half_close(writer: asyncio.StreamWriter) -> None:
    writer.write_eof()


@pytest.mark.parametrize("leave", [_close, _half_close])
@pytest.mark.parametrize("num_bytes", [1_000, 100_000, 1_000_000])
async def test_disconnect_is_seen_behind_a_pipelined_body_of_any_size(
    num_bytes: int, leave: Callable[[asyncio.StreamWriter], Awaitable[None]]
) -> None:
    async with serving() as service:
        _, writer = await service.connect()
        writer.write(head("/wait", 0))
        await until(lambda: len(service.scopes) == 1)
        writer.write(head("/echo", num_bytes) + bytes(num_bytes))
        await writer.drain()
        await leave(writer)
        await service.has_disconnected.wait()
        assert len(service.scopes) == 1


async def test_large_pipelined_body_is_dropped_and_the_first_answer_arrives() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/echo", 5) + b"first" + head("/echo", 200_000) + bytes(200_000))
        answer = await reader.read()
        assert answer.endswith(b"first") and service.bodies == [b"first"]
        writer.close()


# -- draining ----------------------------------------------------------------------------------------------------------

STREAM_END = b"4\r\nlast\r\n0\r\n\r\n"


async def test_answer_that_begins_in_a_drain_announces_the_close() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/late", 0))
        await until(lambda: len(service.scopes) == 1)
        service.drain()
        assert all(connection.delays_exit for connection in service.connections)
        service.may_end.set()
        answer = await reader.read()
        assert answer.endswith(b"refused") and answer.count(b"connection: close\r\n") == 1
        writer.close()
        await until(lambda: not service.connections)


@pytest.mark.parametrize("has_asked", [False, True])
async def test_idle_connection_closes_after_one_more_answer(has_asked: bool) -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        if has_asked:
            writer.write(head("/echo", 3) + b"one")
            assert b"connection: close" not in await reader.readuntil(b"one")
        await until(lambda: len(service.connections) == 1)
        service.drain()
        assert service.connections[0].delays_exit, "a request may be on its way"
        writer.write(head("/echo", 3) + b"two")
        answer = await reader.read()
        assert answer.endswith(b"two") and b"connection: close\r\n" in answer
        writer.close()


@pytest.mark.parametrize("has_asked", [False, True])
async def test_idle_connection_closes_when_no_request_comes(has_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "DRAIN_IDLE_TIMEOUT_S", 0.05)
    async with serving(header_timeout=600, keep_alive_timeout=600) as service:
        reader, writer = await service.connect()
        if has_asked:
            writer.write(head("/echo", 3) + b"one")
            await reader.readuntil(b"one")
        await until(lambda: len(service.connections) == 1)
        service.drain()
        assert await reader.read() == b""
        await until(lambda: not service.connections)


async def test_a_pause_of_the_server_is_not_the_clients_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(header_timeout=5) as service:
        reader, writer = await service.connect()
        whole = head("/echo", 3) + b"abc"
        writer.write(whole[:10])
        await until(lambda: len(service.connections) == 1 and service.connections[0]._has_begun_head())
        pause(monkeypatch, 6)
        await asyncio.sleep(0.05)
        writer.write(whole[10:])
        await reader.readuntil(b"abc")
        assert not service.refusals


async def test_request_that_arrives_at_the_moment_of_the_close_is_answered() -> None:
    """The event loop may have been busy when it arrived."""
    async with serving() as service:
        reader, writer = await service.connect()
        await until(lambda: len(service.connections) == 1)
        writer.write(head("/echo", 3) + b"abc")  # asyncio sends at once, and has not read it yet
        service.connections[0].timeout_keep_alive_handler()
        await reader.readuntil(b"abc")


async def test_stream_ends_properly_in_a_drain_and_the_next_answer_announces_the_close() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/stream", 0))
        assert b"connection: close" not in await reader.readuntil(b"first\r\n")
        service.drain()
        service.may_end.set()
        await reader.readuntil(STREAM_END)
        assert service.connections[0].delays_exit
        writer.write(head("/echo", 3) + b"abc")
        answer = await reader.read()
        assert answer.endswith(b"abc") and b"connection: close\r\n" in answer


async def test_pipelined_requests_are_all_answered_and_the_last_answer_announces_the_close() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/late", 0) + head("/echo", 3) + b"two" + head("/echo", 5) + b"three")
        await until(lambda: len(service.connections) == 1 and len(service.connections[0].pipeline) == 2)
        service.drain()
        service.may_end.set()
        answers = (await reader.read()).split(b"HTTP/1.1 200")[1:]
        assert [b"connection: close\r\n" in answer for answer in answers] == [False, False, True]
        assert service.bodies == [b"two", b"three"]


async def test_drain_waits_for_no_refusal() -> None:
    async with serving() as service:
        old, new = await service.connect(), await service.connect()
        old[1].write(head("/late", 0))
        await until(lambda: len(service.scopes) == 1 and len(service.connections) == 2)
        service.drain(refuses=True)
        new[1].write(head("/late", 0))
        await until(lambda: len(service.scopes) == 2)
        assert sorted(connection.delays_exit for connection in service.connections) == [False, True]


# -- refusals ----------------------------------------------------------------------------------------------------------


async def test_connection_beyond_the_limit_gets_an_error_answer() -> None:
    async with serving(max_connections=1) as service:
        await service.connect()
        reader, _ = await service.connect()
        content = (await reader.read()).partition(b"\r\n\r\n")[2]
        error = json.loads(content)["error"]
        assert error["code"] == "too_many_connections"
        assert "the server has 1 open connections, its limit (max_connections)" in error["message"]
        assert service.refusals == ["too_many_connections"]


async def test_at_the_end_clients_that_read_get_the_whole_answer_and_others_are_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "FINAL_SEND_TIMEOUT_S", 2.0)
    async with serving(send_timeout=600) as service:
        slow, silent = await service.connect(), await service.connect()
        for _, writer in (slow, silent):
            writer.write(head("/large", 0))
        await until(lambda: all(connection._send_timer is not None for connection in service.connections))
        for connection in service.connections:
            connection.shutdown()
        received = b""
        while piece := await slow[0].read(2**20):
            received += piece
            await asyncio.sleep(0.02)  # in all longer than the timeout
        assert received.endswith(bytes(LARGE))
        await until(lambda: service.refusals == ["send_timeout"])
        with pytest.raises(ConnectionResetError):
            await silent[0].readexactly(2 * LARGE)


async def test_reset_is_a_disconnect() -> None:
    async with serving() as service:
        _, writer = await service.connect()
        writer.write(head("/wait", 0))
        await until(lambda: len(service.scopes) == 1)
        writer.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: close resets
        writer.transport.abort()
        await service.has_disconnected.wait()


# -- parts that are written past the layers ----------------------------------------------------------------------------


async def test_parts_that_are_written_at_once_are_chunks_until_the_client_does_not_read() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(head("/written", 0, "Connection: close"))
        await until(lambda: len(service.was_ready) > 1 and not service.was_ready[-1])
        lines = (await reader.read()).partition(b"\r\n\r\n")[2].split(b"\r\n")
        num_written = service.was_ready.count(True)
        assert 0 < num_written < LARGE // 8, "the kernel takes some"
        assert lines == [b"8", b"written "] * num_written + [b"4", b"sent", b"0", b"", b""]
        assert service.was_ready == [False] + [True] * num_written + [False, False]


async def test_nothing_is_written_at_once_to_a_client_that_knows_no_chunks() -> None:
    async with serving() as service:
        reader, writer = await service.connect()
        writer.write(b"GET /written HTTP/1.0\r\n\r\n")
        assert (await reader.read()).partition(b"\r\n\r\n")[2] == b"sent"
        assert service.was_ready == [False] * 3


async def test_a_request_that_is_answered_is_freed_without_the_garbage_collector() -> None:
    """It hardly ever looks at old objects, so what is in a circle of references takes memory for long."""
    async with serving() as service:
        reader, writer = await service.connect()
        gc.disable()
        try:
            writer.write(head("/late", 0))
            await until(lambda: len(service.scopes) == 1)
            cycle = weakref.ref(service.connections[0].cycle)
            service.may_end.set()
            await reader.readuntil(b"refused")
            writer.write(head("/refuse", 0))  # the connection keeps its last request
            await reader.readuntil(b"refused")
            service.scopes.clear()
            await until(lambda: cycle() is None)
        finally:
            gc.enable()
