"""The door's own limits: how many connections, how much of a head and for how long, and how long an answer lies unread.

uvicorn has none of these. What the parser collects before it tells anybody (one header can be of any length), what a
connection does while no request is there yet, and what the other side does not read are seen here only, so here they
are bounded, by a subclass that uvicorn makes for each connection. Bodies are bounded where they are read.

A client that closes its sending side has left, as with Go's server and nginx: whoever closes both sides looks the same
until something is written, and a long answer would be computed for nobody. So `nc -N` gets no answer, and no HTTP
client does that.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from servekit.api.http import error_body
from servekit.bell import Bell
from servekit.config import ServeConfig
from servekit.departure import departure_of
from servekit.errors import (
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    ServekitError,
    TooManyConnections,
    shutting_down,
)
from servekit.logs import fields
from servekit.schemas.decoding import encode

log = logging.getLogger("servekit")

MAX_HEADERS = 256  # each is some hundred bytes of objects, however few its own bytes are
MAX_PIPELINED = 16  # requests behind the one that is answered; more than clients that pipeline at all would send
# Closing with bytes unread resets the connection, and the client may lose the answer that says why.
LINGER_S = 2.0
MAX_LINGERING = 64  # connections beyond the limit that are given time to read so
# Bytes of an answer that the kernel holds and has not sent. By default it takes megabytes for each connection, and says
# that there is room again only after a third of them: a reader could not be told from one that stopped.
MAX_UNSENT_BYTES = 2**16
MIN_BYTES_TAKEN = 2**12  # of an answer in a send_timeout; whoever takes less does not read
RESERVED_FILES = 192  # beside connections: pipes, models, sandboxes, what lingers
LOG_INTERVAL_S = 1.0  # between lines about refusals; in between they are for the debug level only


@dataclass
class Door:
    """What all connections of a server share."""

    limits: ServeConfig
    max_connections: int
    count_refusal: Callable[[str], None]
    lingering: set[LimitedHttpProtocol] = field(default_factory=set)  # beyond max_connections
    silent_until_s: float = 0.0

    def note_refusal(self, code: str, client: tuple[str, int] | None, reason: str) -> None:
        """Of what is refused here there is no request yet that could be in the log. Whoever connects often enough could
        fill it, so most of a flood is told at the debug level."""
        self.count_refusal(code)
        now = time.monotonic()
        level = logging.INFO if now >= self.silent_until_s else logging.DEBUG
        if level == logging.INFO:
            self.silent_until_s = now + LOG_INTERVAL_S
        told = {} if client is None else {"client": client[0]}
        log.log(level, "refused at the door: %s", reason, extra=fields(code=code, **told))


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. Parsing, the requests' tasks, and keep-alive are uvicorn's."""

    door: ClassVar[Door]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = self.door.limits
        self.timeout_keep_alive = self.limits.keep_alive_timeout  # type: ignore[assignment]  # not whole seconds only
        self._answering: RequestResponseCycle | None = None
        self._is_in_head = True
        self._num_untold_bytes = 0  # fed since the parser last told of something that is bounded elsewhere
        self._ignores_input = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_unsent_bytes = 0

    # -- connections ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow._is_writable_event = cast(asyncio.Event, Bell(is_set=True))
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        # Whatever the kernel does not take at once pauses the stream: then "paused" is "unread", also while closing.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) <= self.door.max_connections:
            self._arm_head_timer()
            return
        self.connections.discard(self)
        limit = f"{self.door.max_connections} connections are open already (max_connections)"
        if len(self.door.lingering) >= MAX_LINGERING:
            self._note_refusal(TooManyConnections.code, limit)
            transport.abort()
            return
        self._refuse(TooManyConnections(f"{limit}; close idle ones, or try again later", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.lingering.discard(self)
        for timer in (self._head_timer, self._linger_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        # uvicorn tells the request that came last; with pipelining, another one is being answered.
        if self._answering is not None and not self._answering.response_complete:
            self._tell_of_departure(self._answering)
        self.pipeline.clear()

    def shutdown(self) -> None:
        """The server ends. Who is in the midst of a head is told so, and who waits for an answer gets it; idle ones are
        closed."""
        has_begun_head = self._is_in_head and (self.cycle is not None or self._num_untold_bytes > 0)
        if has_begun_head and not self._is_answering() and self._linger_timer is None:
            self._refuse(shutting_down())
        else:
            super().shutdown()

    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    @staticmethod
    def _tell_of_departure(cycle: RequestResponseCycle) -> None:
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False  # uvicorn would invite the body of a client that has gone
        cycle.message_event.set()
        departure_of(cast(dict[str, Any], cycle.scope)).happen()

    # -- what comes in -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Feed the parser in pieces that end where the limit does."""
        unread = memoryview(data)
        limit = self.limits.max_header_bytes
        while unread and not self._ignores_input:
            piece = unread[: limit + 1 - self._num_untold_bytes]
            unread = unread[len(piece) :]
            self._num_untold_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                # To us, the request was any other. What follows it is in another protocol, or a body that is lost.
                self._end_input()
            except httptools.HttpParserError as error:
                if not self._ignores_input:
                    self._refuse(InvalidRequest(f"this is not HTTP/1.1: {error}", code="invalid_http"))
            if self._num_untold_bytes > limit and not self._ignores_input:
                self._refuse_headers(f"of more than {limit} bytes (max_header_bytes)")

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._arm_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            return  # a trailer; nobody asks for any
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse_headers(f"of more than {MAX_HEADERS} lines")
            raise ValueError  # the parser is to stop

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_untold_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if len(self.pipeline) >= MAX_PIPELINED:
            self._end_input()
            raise ValueError  # the parser is to stop
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.message_event = cast(asyncio.Event, Bell(self.cycle.message_event.is_set()))
        # Somebody who pipelines may leave, too, and only who reads can notice it.
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._num_untold_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_untold_bytes = 0
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        super().on_message_complete()
        # A large body pauses reading, and nobody asks for more of one that is whole. Who does not read hears of no
        # departure.
        if self.cycle is self._answering:
            self.flow.resume_reading()

    def _arm_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout, self._on_head_timeout)

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        limit = f"{self.limits.header_timeout:g} s (header_timeout)"
        if self.cycle is None and self._num_untold_bytes == 0:
            self._note_refusal(RequestTimeout.code, f"nothing came within {limit}")
            self.transport.close()  # browsers open connections ahead of need, and would take a 408 for an answer
            return
        self._refuse(RequestTimeout(f"the request's head did not come within {limit}; send it at once"))

    # -- what goes out -------------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The answer came before the body's end. uvicorn drops the rest, however long that may take.
        if self.cycle is self._answering and self.cycle.more_body and not self.transport.is_closing():
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
        self._send_timer = self.loop.call_later(self.limits.send_timeout, self._on_send_timeout)

    def _on_send_timeout(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() <= self._num_unsent_bytes - MIN_BYTES_TAKEN:
            self._await_reader()
            return
        self._note_refusal(
            "send_timeout", f"the answer was left unread for {self.limits.send_timeout:g} s (send_timeout)"
        )
        # A reset: else the kernel goes on to offer what was not read, and keeps it.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()  # the request is told that its client has gone

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _note_refusal(self, code: str, reason: str) -> None:
        self.door.note_refusal(code, self.client, reason)

    def _refuse_headers(self, much: str) -> None:
        self._refuse(HeadersTooLarge(f"the request has headers {much}; send fewer or shorter ones"))

    def _end_input(self) -> None:
        """Nothing more is read as a request. What is being answered is answered to its end, then we close."""
        self._ignores_input = True
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._answering is not None:
            self._answering.keep_alive = False

    def _refuse(self, error: ServekitError) -> None:
        """Answer, unless that would get into the midst of another answer; and read no further."""
        self._note_refusal(error.answer_code, error.message)
        self._end_input()
        is_reading_body = self._answering is self.cycle and self.cycle is not None and self.cycle.more_body
        if is_reading_body and not self.cycle.response_started:
            self._tell_of_departure(self.cycle)  # what is wrong is its own body, so this is its answer
        elif self._is_answering() or self._linger_timer is not None or self.transport.is_closing():
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
        self.transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        """Let the client finish what it is sending and read its answer, for a while."""
        if self not in self.connections:
            self.door.lingering.add(self)
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)


def limited_protocol(config: ServeConfig, count_refusal: Callable[[str], None]) -> type[LimitedHttpProtocol]:
    """What `uvicorn.Config` takes as `http`. `count_refusal` is told the code of each refusal."""

    class BoundProtocol(LimitedHttpProtocol):
        door = Door(config, connections_that_fit(config.max_connections), count_refusal)

    return BoundProtocol


def connections_that_fit(max_connections: int) -> int:
    """How many of these the process may have open, with its limit on files raised as far as that goes and needs.

    A server that finds the limit by running into it cannot start a worker, either.
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
        told = "max_connections = %d, but this process may open %d files only (ulimit -n): %d connections are accepted"
        log.warning(told, max_connections, wanted, fitting)
    return fitting
