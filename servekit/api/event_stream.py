"""A request's answer as server-sent events, in one task.

Libraries for it run several: one that writes, others that wait for the client's departure, for the server's end and for
the time of the next comment. For tens of thousands of streams that is most of what each one costs, and here there are
better places: the protocol tells of a departure, the engine fails what is left at its end, comments share a timer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.api.answers import events_of
from servekit.api.http import tell_error
from servekit.client_queue import ClientQueue, TokenDelta
from servekit.departure import departure_of
from servekit.errors import ServekitError
from servekit.schemas.decoding import encode
from servekit.submission import Submission

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
COMMENT = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


class KeepAlive:
    """Wakes streams to which nothing has come for an interval, or a quarter more; with one timer for all of them."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._silent_since_s: dict[ClientQueue, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, queue: ClientQueue) -> None:
        """Its stream has just said something, or begins."""
        self._silent_since_s[queue] = time.monotonic()
        if self._timer is None and self._interval_s:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s / 4, self._look)

    def forget(self, queue: ClientQueue) -> None:
        """Its stream has ended."""
        self._silent_since_s.pop(queue, None)

    def _look(self) -> None:
        loop, last_s = asyncio.get_running_loop(), time.monotonic() - self._interval_s
        for queue, since_s in self._silent_since_s.items():
            if since_s <= last_s:
                queue.wake()
        self._timer = loop.call_later(self._interval_s / 4, self._look) if self._silent_since_s else None


class EventStream(Response):
    """Events as tokens come, comments while there are none; if the request fails, the last event says why.

    `write` puts some deltas of one sequence into bytes; with an interval of one, each token is an event of its own.
    `finish` has the last word of an answer that is whole, and `end` comes after everything.

    However the stream ends, even before its first event, the work for it ends too.
    """

    def __init__(
        self,
        request: Request,
        submission: Submission,
        write: Callable[[list[TokenDelta]], bytes],
        finish: Callable[[], bytes] = bytes,
        end: bytes = b"",
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = HEADERS  # the same for all
        self._request = request
        self._submission = submission
        self._write = write
        self._finish = finish
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        departure = departure_of(scope)
        departure.watch(self._on_departure)
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                if scope["method"] != "HEAD":  # which is about these headers only
                    await self._stream(send)
            except ServekitError as error:
                await _send(send, event(tell_error(self._request, error)))
            await _send(send, self._end, more_body=False)
        except ClientDisconnect:
            pass  # nobody is there to be told
        finally:
            departure.watch(None)
            self._submission.abort()

    async def _stream(self, send: Send) -> None:
        submission, queue, write = self._submission, self._submission.queue, self._write
        num_unfinished = submission.num_answers
        keep_alive: KeepAlive = self._request.app.state.keep_alive
        keep_alive.note(queue)
        try:
            while num_unfinished:
                deltas = await queue.get()
                written = b"".join(map(write, events_of(deltas, submission.interval))) if deltas else COMMENT
                if written:
                    await _send(send, written)
                    keep_alive.note(queue)
                for delta in deltas:
                    num_unfinished -= delta.finish_reason is not None
        finally:
            keep_alive.forget(queue)
        if last := self._finish():
            await _send(send, last)

    def _on_departure(self) -> None:
        """The work ends at once, whatever the stream is waiting for."""
        self._submission.queue.fail(ClientDisconnect())
        self._submission.abort()


async def _send(send: Send, body: bytes, more_body: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
