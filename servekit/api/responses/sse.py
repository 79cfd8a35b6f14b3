"""Stream a request's answer as server-sent events, or in another framing, in one task.

sse-starlette runs four tasks for a stream: they write, ping, and wait for the disconnect and for the server's end. This
response runs one. The protocol reports a disconnect by a callback, the engine fails open requests when it stops, and
all streams share one keep-alive timer. With thousands of streams this saves a third of the memory of each:
docs/performance.md has the figures, and `make bench-streams` repeats them. Other streams (the live feed) use
sse-starlette.

Almost all events are written by a callback of the event loop. The task is resumed only when a sequence ends, when the
client does not read what it gets, and for what is not a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.api.body_writer import BodyWriter, body_writer_of
from servekit.api.disconnect import disconnect_of
from servekit.api.responses.collect import split_into_events
from servekit.api.responses.http import error_body_for
from servekit.api.schemas.json_body import encode
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.request_state import RequestState
from servekit.errors import ServekitError
from servekit.requests.time_causes import RequestTimes

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # tells nginx to pass events on at once
]
COMMENT = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    """Return one server-sent event with the value as JSON."""
    return b"data: " + encode(value) + b"\n\n"


def named_event(value: Struct) -> bytes:
    """Return one server-sent event, named by the Struct's tag, which is its type."""
    return b"event: " + str(value.__struct_config__.tag).encode() + b"\n" + event(value)


class Framing(NamedTuple):
    """How a stream is divided into events."""

    headers: list[tuple[bytes, bytes]]  # one list, shared by all streams
    keep_alive: bytes  # sent while there are no tokens; clients ignore it
    write_error: Callable[[Any], bytes]  # returns the event with the body of an error


SERVER_SENT_EVENTS = Framing(HEADERS, COMMENT, event)


class EventFormat(Protocol):
    """Write one request's tokens as events."""

    framing: Framing
    end_of_stream: bytes  # ends every stream, also one that failed

    def events(self, deltas: list[TokenDelta]) -> bytes:
        """Return the event, or events, for some deltas of one sequence. With an interval of 1 it is one token."""

    def last_events(self) -> bytes:
        """Return what follows the last token of a complete answer."""


class KeepAlive:
    """Wake streams that have sent nothing for `interval_s` to 1.25 times that, with one timer for all of them."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._silent_since_s: dict[ClientQueue, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, queue: ClientQueue) -> None:
        """Note that the queue's stream begins, or has just sent something."""
        self._silent_since_s[queue] = time.monotonic()
        if self._timer is None and self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s / 4, self._wake_silent)

    def forget(self, queue: ClientQueue) -> None:
        """Note that the queue's stream has ended."""
        self._silent_since_s.pop(queue, None)

    def _wake_silent(self) -> None:
        loop, last_s = asyncio.get_running_loop(), time.monotonic() - self._interval_s
        for queue, since_s in self._silent_since_s.items():
            if since_s <= last_s:
                queue.wake()
        self._timer = loop.call_later(self._interval_s / 4, self._wake_silent) if self._silent_since_s else None


class EventStream(Response):
    """Send events as tokens arrive, and keep-alives while there are none.

    If the request fails, the last event says why. However the stream ends, even before its first event, the request's
    sequences are aborted.
    """

    def __init__(self, request: Request, state: RequestState, event_format: EventFormat) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = event_format.framing.headers
        self._request = request
        self._state = state
        self._format = event_format
        self._keep_alive: KeepAlive = request.app.state.keep_alive
        self._writer: BodyWriter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = body_writer_of(scope)
        disconnect = disconnect_of(scope)
        disconnect.set_callback(self._on_disconnect)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = b""
            try:
                if scope["method"] != "HEAD":  # which asks for the headers only
                    last = await self._stream(send)
            except ServekitError as error:
                last = self._format.framing.write_error(error_body_for(self._request, error))
            await _send(send, last + self._format.end_of_stream, more_body=False, times=self._state.request.times)
        except ClientDisconnect:
            pass  # there is no client to answer
        finally:
            disconnect.set_callback(None)
            self._state.abort()

    async def _stream(self, send: Send) -> bytes:
        """Send all events but the last ones. Returns these, so that the end of the stream is in the same write."""
        state, queue, keep_alive = self._state, self._state.queue, self._keep_alive
        times = state.request.times
        write_now = None if self._writer is None else self._write_now
        num_unfinished, written = state.num_answers, b""
        keep_alive.note(queue)
        try:
            while num_unfinished:
                if written:
                    await _send(send, written, times=times)
                    keep_alive.note(queue)
                deltas = await queue.get(write_now)
                num_ended = sum([delta.finish_reason is not None for delta in deltas])
                num_unfinished -= num_ended
                if times is not None and num_ended:
                    times.answered()
                written = self._events(deltas) if deltas else self._format.framing.keep_alive
        finally:
            keep_alive.forget(queue)
        return written + self._format.last_events()

    def _write_now(self, deltas: list[TokenDelta]) -> bool:
        """Write the events of these tokens at once, and return True.

        Returns False, and writes nothing, if a sequence ends or the client does not read.
        """
        writer = self._writer
        assert writer is not None
        if not writer.is_ready:
            return False
        for delta in deltas:
            if delta.finish_reason is not None:
                return False
        written = self._events(deltas)
        if written:
            writer.write(written)
            self._keep_alive.note(self._state.queue)
        return True

    def _events(self, deltas: list[TokenDelta]) -> bytes:
        """Return the bytes of these tokens' events."""
        if len(deltas) == 1:  # as almost always, with an interval of 1 and a reader that keeps up
            return self._format.events(deltas)
        return b"".join(map(self._format.events, split_into_events(deltas, self._state.interval)))

    def _on_disconnect(self) -> None:
        """Abort the sequences at once, whatever the stream is waiting for."""
        self._state.queue.fail(ClientDisconnect())
        self._state.abort()


async def _send(send: Send, body: bytes, more_body: bool = True, times: RequestTimes | None = None) -> None:
    began_s = 0.0 if times is None else times.clock()
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
    if times is not None:
        times.written(began_s)
