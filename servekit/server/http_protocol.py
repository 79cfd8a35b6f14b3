"""Limit HTTP connections: their number, the size and time of heads, and the time that answers stay unread.

uvicorn has none of these limits. Three things are visible only in the protocol, so they are bounded here, by a subclass
that uvicorn creates for each connection: what the parser collects before it reports anything (one header can have any
length), what a connection does before its first request, and what the client does not read. Bodies are bounded where
they are read (servekit.api.request_body).

A client that closes its sending side counts as disconnected, as with Go's server and nginx. A client that closed both
sides looks the same until the server writes, and a long answer would be computed for a client that has disconnected. So
`nc -N` gets no answer; HTTP clients do not half-close.

The subclass overrides internals of uvicorn, which pyproject.toml therefore bounds; they are listed and checked in
tests/servekit/server/test_uvicorn_internals.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import resource
import socket
import struct
import sys
import termios
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.aio.single_waiter_event import SingleWaiterEvent
from servekit.api.body_writer import offer_body_writer
from servekit.api.disconnect import disconnect_of
from servekit.api.responses.http import error_body
from servekit.api.routes.live import is_viewer
from servekit.api.schemas.json_body import encode
from servekit.config import ServeConfig
from servekit.errors import (
    HeadersTooLarge,
    HttpFeatureUnsupported,
    HttpVersionUnsupported,
    InvalidRequest,
    RequestTimeout,
    ServekitError,
    TooManyConnections,
    shutting_down,
)
from servekit.protocol.logging import fields

log = logging.getLogger("servekit")

MAX_HEADERS = 256  # each header costs some hundred bytes of objects, however short it is
# Each chunk of a chunked body costs some microseconds of parsing and callbacks, however short it is. So all but the
# first ones must have this length on average. Clients send kilobytes.
MAX_SHORT_CHUNKS = 256
MIN_CHUNK_BYTES = 256
MAX_PIPELINED = 16  # requests that wait for the one being answered; no known client sends more
# Closing a connection while the client still sends resets it, and the client may never see the answer. So the server
# half-closes, and reads and discards for a while: at most this long, this long without any byte, and this many bytes.
LINGER_S = 10.0
LINGER_IDLE_S = 2.0
MAX_DISCARDED_BYTES = 2**28
# Reading and discarding a gigabyte takes half a second of the event loop. So bytes of a connection beyond this are read
# at a limited rate, which all such connections share.
MAX_UNPACED_BYTES = 2**24
DISCARDED_BYTES_PER_S = 2**26
MAX_LINGERING = 64  # connections; further ones are closed at once
# Bytes of an answer that the kernel holds unsent. By default it takes megabytes per connection, and reports free space
# only after a third of them was sent. A slow reader would then look like one that stopped.
MAX_UNSENT_BYTES = 2**16
MIN_BYTES_TAKEN = 2**12  # bytes of an answer in each send_timeout; a client that takes less counts as not reading
FINAL_SEND_TIMEOUT_S = 2.0  # the send_timeout when the server ends
# When the server drains, an idle connection closes after this time without a request. A client that sends requests more
# often gets `Connection: close` in its next answer, so it never sends a request into a connection that is closing.
DRAIN_IDLE_TIMEOUT_S = 0.5
RESERVED_FILES = 192  # besides connections: pipes, model files, sandboxes, lingering connections
LOG_INTERVAL_S = 1.0  # between refusals that are logged at info level; the others are logged at debug level


@dataclass
class ConnectionLimits:
    """The limits of one server, and what its connections share."""

    config: ServeConfig
    max_connections: int
    count_refusal: Callable[[str], None]
    lingering: set[LimitedHttpProtocol] = field(default_factory=set)
    next_info_s: float = 0.0
    is_draining: bool = False  # each connection closes after its next answer
    is_refusing: bool = False  # the server drains, and that answer is a refusal

    def note_refusal(self, code: str, client: tuple[str, int] | None, reason: str) -> None:
        """Count and log a refusal. There is no request yet that would be logged.

        A client that connects often could fill the log, so most refusals of a flood are logged at debug level.
        """
        self.count_refusal(code)
        now = time.monotonic()
        level = logging.INFO if now >= self.next_info_s else logging.DEBUG
        if level == logging.INFO:
            self.next_info_s = now + LOG_INTERVAL_S
        address = {} if client is None else {"client": client[0]}
        log.log(level, "connection refused: %s", reason, extra=fields(code=code, **address))


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. uvicorn's protocol does the parsing, the tasks of requests, and keep-alive."""

    shared: ClassVar[ConnectionLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = self.shared.config
        self.timeout_keep_alive = self.limits.keep_alive_timeout  # type: ignore[assignment]  # may be a fraction
        self._answering: RequestResponseCycle | None = None
        self._is_refusing = False  # the server refused all requests when the one that is answered came
        self._is_in_head = True
        self._is_upgrade = False  # the head asks for another protocol, which is ignored
        self._num_unreported_bytes = 0  # fed since the parser last reported something that is bounded elsewhere
        self._num_chunks = 0  # chunks of the body that is being received, and their bytes
        self._num_chunk_bytes = 0
        self._ignores_input = False
        self._num_discarded_bytes = 0
        self._last_discard_s = 0.0
        self._linger_until_s = 0.0
        self._head_timer: PauseTolerantTimer | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._send_timer: PauseTolerantTimer | None = None
        self._send_timeout_s = self.limits.send_timeout
        self._num_unsent_bytes = 0

    # -- connections ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow._is_writable_event = cast(asyncio.Event, SingleWaiterEvent(is_set=True))
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        # Whatever the kernel does not take at once pauses the stream. So "paused" means "unread", also while closing.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) <= self.shared.max_connections:
            self._arm_head_timer()
            return
        self.connections.discard(self)
        limit = f"the server has {self.shared.max_connections} open connections, its limit (max_connections)"
        if len(self.shared.lingering) >= MAX_LINGERING:
            self._note_refusal(TooManyConnections.code, limit)
            transport.abort()
            return
        self._refuse(TooManyConnections(f"{limit}; close idle connections, or try again later", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.lingering.discard(self)
        for timer in (self._head_timer, self._linger_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # uvicorn notifies the request that came last. With pipelining, another one is being answered.
        if self._answering is not None and not self._answering.response_complete:
            self._notify_disconnect(self._answering)
        self.pipeline.clear()

    def drain(self) -> None:
        """Close after the current answer, or after the next one, or when no request comes for a while.

        The last answer says so (`Connection: close`). A stream that has begun cannot, so there the next answer does.
        """
        assert self.shared.is_draining
        self.timeout_keep_alive = min(self.timeout_keep_alive, DRAIN_IDLE_TIMEOUT_S)  # type: ignore[assignment]
        if self._running is not None:
            self._close_after_last(self._running)
        elif not self._has_begun_head() and self._linger_timer is None:
            self._await_request()

    @property
    def delays_exit(self) -> bool:
        """Whether a drain waits for this connection: it answers an admitted request, or another one may be coming."""
        if self._running is not None:
            return self.is_answering and not self._is_refusing
        return self.timeout_keep_alive_task is not None and not self.transport.is_closing()

    def shutdown(self) -> None:
        """Close when the server ends. An unfinished head gets an error, and a running request its answer."""
        self._send_timeout_s = min(self._send_timeout_s, FINAL_SEND_TIMEOUT_S)
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._await_reader()
        if self._linger_timer is not None:
            self.half_close()
            self._linger_until_s = time.monotonic() + FINAL_SEND_TIMEOUT_S
        elif self._has_begun_head() and self._running is None:
            self._refuse(shutting_down())
        else:
            super().shutdown()

    def _has_begun_head(self) -> bool:
        return self._is_in_head and (self.cycle is not None or self._num_unreported_bytes > 0)

    @property
    def is_answering(self) -> bool:
        """Whether it answers a request, other than a viewer's."""
        return self._running is not None and not is_viewer(cast(Scope, self._running.scope))

    @property
    def _running(self) -> RequestResponseCycle | None:
        """The request that is being answered."""
        return None if self._answering is None or self._answering.response_complete else self._answering

    @staticmethod
    def _notify_disconnect(cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False  # else uvicorn would ask a client that has disconnected for its body
        cycle.message_event.set()
        disconnect_of(cast(dict[str, Any], cycle.scope)).happen()

    # -- input ---------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser in pieces that end where the limit on heads does."""
        if self._linger_timer is not None:
            self._count_discarded(len(data))
        unread = memoryview(data)
        limit = self.limits.max_header_bytes
        while unread and not self._ignores_input:
            piece = unread[: limit + 1 - self._num_unreported_bytes]
            unread = unread[len(piece) :]
            self._num_unreported_bytes += len(piece)
            try:
                self._feed(piece)
            except httptools.HttpParserUpgrade:
                # A CONNECT request: it was handled like any other, and what follows is in another protocol.
                self._end_input()
            except httptools.HttpParserError as error:
                if not self._ignores_input:
                    self._refuse(InvalidRequest(f"not a valid HTTP/1.1 request: {error}", code="invalid_http"))
            if self._num_unreported_bytes > limit and not self._ignores_input:
                self._refuse_headers(f"are larger than {limit} bytes (max_header_bytes)")

    def _feed(self, piece: memoryview) -> None:
        """Feed the parser. Java's client asks for HTTP/2 in the head of its first request (`Upgrade: h2c`).

        A server may ignore that (RFC 9110, section 7.8), but the parser then skips the body. So a new parser gets the
        same head without that header, and then the body.
        """
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._is_upgrade:
                raise
            self._is_upgrade = False
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
            head = b"".join([b"%b %b HTTP/%b\r\n" % (method, self.url, version), *headers, b"\r\n"])
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            self.parser.feed_data(head)
            rest = piece[upgrade.args[0] :]
            if rest:
                self._feed(rest)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._num_chunks = self._num_chunk_bytes = 0
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._arm_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer; no handler reads them
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_headers(f"are more than {MAX_HEADERS}")
            raise ValueError  # stops the parser

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._is_upgrade = True
            return
        self._check_http()
        self._is_in_head = False
        self._num_unreported_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end_input()
            raise ValueError  # stops the parser
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.message_event = cast(asyncio.Event, SingleWaiterEvent(self.cycle.message_event.is_set()))
            # Until its body has arrived, an answer must not close the connection at once: see MAX_LINGERING.
            self.cycle.transport = cast(asyncio.Transport, _LingeringTransport(self))
        # A client that pipelines may disconnect, too, and only a connection that is read notices that.
        self.flow.resume_reading()

    def _check_http(self) -> None:
        """Refuse another version of HTTP, and transfer codings that would be part of the body (RFC 9112, 6.1)."""
        version = self.parser.get_http_version()
        headers = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        codings = [coding.strip(b" \t") for value in headers for coding in value.split(b",")]
        if version not in ("1.0", "1.1"):
            self._refuse(HttpVersionUnsupported(f"HTTP/{version} is not supported; use HTTP/1.1"))
        elif any(coding != b"chunked" for coding in codings):
            shown = b", ".join(codings).decode("latin-1")[:40]
            self._refuse(
                HttpFeatureUnsupported(f"transfer-encoding {shown!r} is not supported; send the body as 'chunked'")
            )
        else:
            return
        raise ValueError  # stops the parser

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_SHORT_CHUNKS + self._num_chunk_bytes // MIN_CHUNK_BYTES:
            self._refuse(
                InvalidRequest(
                    f"the request body's first {self._num_chunks} chunks have {self._num_chunk_bytes} bytes; the limit "
                    f"is {MAX_SHORT_CHUNKS} chunks of less than {MIN_CHUNK_BYTES} bytes: send larger chunks, or "
                    "Content-Length",
                    code="invalid_http",
                )
            )
            raise ValueError  # stops the parser

    def on_body(self, body: bytes) -> None:
        self._num_unreported_bytes = 0
        self._num_chunk_bytes += len(body)
        if self.cycle is not self._answering and len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT:
            # uvicorn would stop reading until this pipelined request is answered, and miss a disconnect meanwhile. So
            # the request is dropped instead. Clients may retry it (RFC 9112, section 9.3.2).
            self._end_input()
            raise ValueError  # stops the parser
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return  # the head comes again, without its Upgrade header
        self._num_unreported_bytes = 0
        self._stop_lingering()
        super().on_message_complete()
        if self.cycle.keep_alive or not self.shared.is_draining:
            self.cycle.transport = self.transport
        # A large body pauses reading. When it is complete, no handler asks for more, so nothing would resume it, and a
        # disconnect would go unnoticed.
        if self.cycle is self._answering:
            self.flow.resume_reading()

    def _arm_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = PauseTolerantTimer(self.limits.header_timeout, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        limit = f"{self.limits.header_timeout:g} s (header_timeout)"
        if self.cycle is None and self._num_unreported_bytes == 0:
            self._note_refusal(RequestTimeout.code, f"no request arrived within {limit}")
            self.transport.close()  # browsers connect early; a 408 would answer a later request
            return
        self._refuse(RequestTimeout(f"the request's headers did not arrive within {limit}; send them faster"))

    # -- output --------------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        self._is_refusing = self.shared.is_refusing
        if self.shared.is_draining:
            self._close_after_last(cycle)
        if cycle.scope["http_version"] == "1.0":
            app = cast(ASGI3Application, _WithoutChunks(app, cycle))
        offer_body_writer(cast(dict[str, Any], cycle.scope), _ChunkWriter(cycle))
        super()._start_asgi_task(cycle, app)

    def _close_after_last(self, cycle: RequestResponseCycle) -> None:
        """Close the connection after this answer, unless more requests wait or it is too late to announce that.

        The client may have sent another request before it knows. So the connection half-closes, and does not reset.
        """
        if not self.pipeline and not cycle.response_started:
            cycle.keep_alive = False
            cycle.transport = cast(asyncio.Transport, _LingeringTransport(self))

    def _await_request(self) -> None:
        """Close the connection if no request begins within the keep-alive timeout."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close, unless a request has arrived that the event loop has not read yet. Closing would reset its client."""
        if self.transport.is_closing():
            return
        if self._num_unread_bytes():
            self._await_request()
            return
        # Send the FIN at once. The event loop closes the socket in its next iteration; a request could come before.
        with suppress(OSError), socket.socket(fileno=os.dup(self._fileno)) as same:
            same.shutdown(socket.SHUT_WR)
        super().timeout_keep_alive_handler()

    def _num_unread_bytes(self) -> int:
        """Return how many bytes the kernel has received and the event loop has not read."""
        return int.from_bytes(fcntl.ioctl(self._fileno, termios.FIONREAD, bytes(4)), sys.byteorder)

    @property
    def _fileno(self) -> int:
        fileno: int = self.transport.get_extra_info("socket").fileno()
        return fileno

    def on_response_complete(self) -> None:
        super().on_response_complete()
        is_half_closed = self._linger_timer is not None
        if is_half_closed:
            self._unset_keepalive_if_required()
        elif self.cycle is self._answering and self.cycle.more_body and not self.transport.is_closing():
            # The answer came before the body's end. If the rest of the body arrives, the connection can be used again.
            self._unset_keepalive_if_required()
            self._linger()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _await_reader(self) -> None:
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = PauseTolerantTimer(self._send_timeout_s, self._on_send_timeout)

    def _on_send_timeout(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() <= self._num_unsent_bytes - MIN_BYTES_TAKEN:
            self._await_reader()
            return
        self._note_refusal(
            "send_timeout", f"the client did not read its answer for {self._send_timeout_s:g} s (send_timeout)"
        )
        # Reset the connection. Otherwise the kernel keeps what was not read, and goes on offering it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()  # this also reports the disconnect to the request

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _note_refusal(self, code: str, reason: str) -> None:
        self.shared.note_refusal(code, self.client, reason)

    def _refuse_headers(self, problem: str) -> None:
        self._refuse(HeadersTooLarge(f"the request's headers {problem}; send fewer or shorter ones"))

    def _end_input(self) -> None:
        """Handle no further input. The request being answered gets its whole answer; then the connection closes."""
        self._ignores_input = True
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._answering is not None:
            self._answering.keep_alive = False
            self._answering.transport = cast(asyncio.Transport, _LingeringTransport(self))

    def _refuse(self, error: ServekitError) -> None:
        """Answer with the error, unless that would fall into another answer; handle no further input."""
        self._note_refusal(error.answer_code, error.message)
        self._end_input()
        is_reading_body = self._answering is self.cycle and self.cycle is not None and self.cycle.more_body
        if is_reading_body and not self.cycle.response_started:
            self._notify_disconnect(self.cycle)  # the error is in this request's own body, so this is its answer
        elif self._running is not None or self._linger_timer is not None or self.transport.is_closing():
            return
        body = encode(error_body(error))
        head = [
            STATUS_LINE[error.status],
            *(b"%s: %s\r\n" % header for header in self.server_state.default_headers),
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n",
        ]
        if error.retry_after_s is not None:
            head.append(b"retry-after: %d\r\n" % error.retry_after_s)
        self.transport.write(b"".join([*head, b"\r\n", body]))
        self.half_close()

    # -- lingering -----------------------------------------------------------------------------------------------------

    def half_close(self) -> None:
        """Send what is left and then no more, and discard what the client still sends, within bounds.

        The client can finish sending and read its answer. The connection closes when it closes its side.
        """
        if self.transport.is_closing():
            return
        self._ignores_input = True
        self.pipeline.clear()
        if self._linger():
            self.transport.write_eof()
            self.flow.resume_reading()

    def _linger(self) -> bool:
        """Keep reading until the bounds of lingering. Closes now, and returns False, if too many connections linger."""
        if len(self.shared.lingering) >= MAX_LINGERING and self not in self.shared.lingering:
            self.transport.close()
            return False
        self.shared.lingering.add(self)
        now = time.monotonic()
        self._last_discard_s, self._linger_until_s = now, now + LINGER_S
        self._num_discarded_bytes = 0
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(min(LINGER_IDLE_S, LINGER_S), self._on_linger_timer)
        return True

    def _stop_lingering(self) -> None:
        """The rest of the body has arrived, so the connection waits for its next request."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
            self.shared.lingering.discard(self)
            self._await_request()

    def _count_discarded(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        self._last_discard_s = time.monotonic()
        if self._num_discarded_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()
        elif self._num_discarded_bytes > MAX_UNPACED_BYTES:
            self.transport.pause_reading()
            pause_s = num_bytes * len(self.shared.lingering) / DISCARDED_BYTES_PER_S
            self.loop.call_later(pause_s, self._continue_discarding)

    def _continue_discarding(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _on_linger_timer(self) -> None:
        now = time.monotonic()
        close_s = min(self._last_discard_s + LINGER_IDLE_S, self._linger_until_s)
        if now >= close_s:
            self.transport.abort()
        else:
            self._linger_timer = self.loop.call_later(close_s - now, self._on_linger_timer)


class _WithoutChunks:
    """An application for an HTTP/1.0 client, which knows no chunks: the close ends an answer without content-length."""

    __slots__ = ("_app", "_cycle")

    def __init__(self, app: ASGI3Application, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        cycle, has_length = self._cycle, False

        async def send_without_chunks(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False  # otherwise uvicorn chooses it
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts down from it
            await send(message)

        await self._app(scope, receive, send_without_chunks)


class _ChunkWriter:
    """A BodyWriter that writes parts as chunks, as uvicorn does.

    The cycle has the request's scope, which has the writer. So the writer's reference to the cycle is weak. Otherwise
    only the garbage collector would free a request, and it hardly ever looks at old objects (GC_THRESHOLDS).
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)

    @property
    def is_ready(self) -> bool:
        """Whether the answer is in chunks, and uvicorn would write the next one without waiting."""
        cycle = self._cycle()
        if cycle is None or not cycle.chunked_encoding:
            return False
        return not (cycle.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, part: bytes) -> None:
        cycle = self._cycle()
        assert cycle is not None, "the request is answered"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class _LingeringTransport:
    """The transport of a request whose connection may still receive bytes: `close` half-closes, and discards those."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: LimitedHttpProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.half_close()


def limited_protocol(config: ServeConfig, count_refusal: Callable[[str], None]) -> type[LimitedHttpProtocol]:
    """Return what `uvicorn.Config` takes as `http`. `count_refusal` is called with the code of each refusal.

    With several API processes, each may have its part of the connections.
    """
    max_connections = -(-config.max_connections // config.api_processes)

    class BoundProtocol(LimitedHttpProtocol):
        shared = ConnectionLimits(config, connections_that_fit(max_connections), count_refusal)

    return BoundProtocol


def connections_that_fit(max_connections: int) -> int:
    """Return how many of these connections the process may open, after raising its limit on files as far as needed.

    A server that runs into the limit of open files cannot start a worker, either.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    fitting = min(max_connections, max(wanted - RESERVED_FILES, wanted // 4))
    if fitting < max_connections:
        log.warning(
            "max_connections = %d is lowered to %d: this process may open only %d files (raise ulimit -n)",
            max_connections,
            fitting,
            wanted,
        )
    return fitting
