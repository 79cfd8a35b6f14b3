"""GET /ui/state and /ui/events: what the scheduler does, for whoever watches.

While nobody watches there is nothing: no task, no timer. While somebody does, one task makes a frame for all of them,
and what that costs the event loop, with the sending of it, is bounded by construction: after whatever took t nothing is
done for a hundred times t. A viewer has room for one frame, so who reads slowly misses some, and nothing piles up.

Viewers are no requests for the model: none has a place in the line, and a drain tells them and does not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.api.event_stream import HEADERS
from servekit.api.http import Endpoint, caller_of, engine_of, respond
from servekit.bell import Bell
from servekit.departure import departure_of
from servekit.engine import LLMEngine
from servekit.errors import QueueFull, shutting_down
from servekit.live_view import LiveState
from servekit.schemas.decoding import encode

log = logging.getLogger("servekit")

MOST_VIEWERS = 32
RETRY_AFTER_S = 5

TICK_S = 0.1
REST = 100  # times what a frame cost
MOST_SLEEP_S = 0.5  # without a look at whether the server drains
STILL_S = 1.0  # between frames in which nothing but the time is new
# Of the time in which a viewer's frame is written it is not known what was waiting for its reader. No send takes the
# loop longer than this: it is a copy of some ten thousand bytes into the kernel.
MOST_SEND_S = 1e-3

BROWSERS_COME_BACK = b"retry: 1000\n\n"  # after so many milliseconds
_LAST_STATES = ("draining", "failed")


class Viewer:
    """One who watches, and the newest frame that it has not had."""

    __slots__ = ("_bell", "_frame", "_is_over", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self._bell = Bell()
        self._frame: bytes | None = None
        self._is_over = False

    def show(self, frame: bytes) -> None:
        """In the place of one that it has not come to."""
        self._frame = frame
        self._bell.set()

    def end(self) -> None:
        """There is no frame after the one that it has not had."""
        self._is_over = True
        self._bell.set()

    async def next(self) -> bytes | None:
        """The newest frame, once for each; None when there are no more."""
        while self._frame is None and not self._is_over:
            self._bell.clear()
            await self._bell.wait()
        frame, self._frame = self._frame, None
        return frame


class Feed:
    """All who watch one engine, and the task that tells them, which is there while anybody does."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._num_frames = 0
        self._spent_s = 0.0  # on the newest frames, by making and by sending them
        self._told: dict[str, tuple[bytes, float]] = {}  # by tenant: the newest frame without its time, and when it was

    def join(self, tenant: str) -> Viewer:
        """One more; the first frame comes with the next tick. Raises QueueFull or WorkerNotReady."""
        if self._engine.state in _LAST_STATES:
            raise shutting_down()
        if len(self._viewers) >= MOST_VIEWERS:
            raise QueueFull(
                f"{len(self._viewers)} are watching already, and no more may; close another window, or ask for single "
                "frames at /ui/state",
                retry_after_s=RETRY_AFTER_S,
            )
        viewer = Viewer(tenant)
        self._viewers.add(viewer)
        self._told.pop(tenant, None)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live feed")
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """One fewer. What is more than once told happens once."""
        self._viewers.discard(viewer)
        viewer.end()
        if not self._viewers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._told.clear()

    def note_send(self, duration_s: float) -> None:
        """A frame was written to a viewer, with some waiting for its reader maybe."""
        self._spent_s += min(duration_s, MOST_SEND_S)

    # -- the task --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._engine.state not in _LAST_STATES:
                self._tell_all()
                await self._rest()
            self._tell_all()
        except Exception:
            log.exception("whoever watches is told no more")
            self._task = None  # whoever comes back is told by another
        finally:
            for viewer in self._viewers:
                viewer.end()

    def _tell_all(self) -> None:
        started_s = time.perf_counter()
        for tenant in {viewer.tenant for viewer in self._viewers}:
            if (frame := self._new_frame(tenant)) is not None:
                for viewer in self._viewers:
                    if viewer.tenant == tenant:
                        viewer.show(frame)
        self._spent_s = time.perf_counter() - started_s

    def _new_frame(self, tenant: str) -> bytes | None:
        """A frame for this tenant, if there is anything in it that was not in the one before, or that was long ago."""
        state = self._engine.look(tenant)
        encoded = encode(state)
        _, _, rest = encoded.partition(b",")  # behind the time, which is the first of its fields
        before, told_s = self._told.get(tenant, (b"", 0.0))
        if rest == before and state.now_s - told_s < STILL_S:
            return None
        self._told[tenant] = rest, state.now_s
        self._num_frames += 1
        return b"event: state\nid: %d\ndata: %b\n\n" % (self._num_frames, encoded)

    async def _rest(self) -> None:
        """Until the next tick, and until what was spent is a hundredth of the time; at once if the server drains."""
        began_s = time.perf_counter()
        while self._engine.state not in _LAST_STATES:
            left_s = began_s + max(TICK_S, REST * self._spent_s) - time.perf_counter()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, MOST_SLEEP_S))


class _Watching(Response):
    """The stream of frames to one viewer."""

    def __init__(self, feed: Feed, tenant: str) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = HEADERS
        self._feed = feed
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body"})
            return
        viewer = self._feed.join(self._tenant)
        departure = departure_of(scope)
        departure.watch(lambda: self._feed.leave(viewer))
        try:
            await send(start)
            await send({"type": "http.response.body", "body": BROWSERS_COME_BACK, "more_body": True})
            while (frame := await viewer.next()) is not None:
                started_s = time.perf_counter()
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                self._feed.note_send(time.perf_counter() - started_s)
            await send({"type": "http.response.body"})
        finally:
            departure.watch(None)
            self._feed.leave(viewer)


async def ui_state(request: Request) -> Response:
    """What the scheduler does at this moment: lengths, states and counts, and no word of prompts and answers."""
    response = respond(engine_of(request).look(caller_of(request).tenant))
    response.headers["Cache-Control"] = "no-store"
    return response


async def ui_events(request: Request) -> Response:
    """The same as server-sent events, ten a second at most: each is whole, and who reads slowly misses some."""
    return _Watching(request.app.state.feed, caller_of(request).tenant)


ENDPOINTS: list[Endpoint] = [
    Endpoint("GET", "/ui/state", ui_state, gives=(LiveState,)),
    Endpoint("GET", "/ui/events", ui_events, streams=(LiveState,)),
]
