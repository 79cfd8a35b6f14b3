"""GET /ui/state and /ui/events: what the scheduler does, for whoever watches.

While nobody watches there is nothing: no task, no timer. While somebody does, one task looks once for all of them, and
what that costs the event loop, with the sending of it, is bounded by construction: after whatever took t nothing is
done for a hundred times t, and for five seconds at most. A viewer has room for one frame, so who reads slowly misses
some, and nothing piles up. Who asks for single frames gets the same one for as long.

Viewers are no requests for the model: none has a place in the line, and a drain tells them and does not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.api.event_stream import HEADERS
from servekit.api.http import Endpoint, caller_of
from servekit.bell import Bell
from servekit.departure import departure_of
from servekit.engine import LLMEngine
from servekit.errors import QueueFull, shutting_down
from servekit.live_view import LiveState
from servekit.schemas.decoding import encode

log = logging.getLogger("servekit")

MOST_VIEWERS = 32
MOST_OF_A_TENANT = 8  # where there are keys: one tenant's open windows are not to keep the others out
RETRY_AFTER_S = 5

TICK_S = 0.1
REST = 100  # times what a frame cost
MOST_REST_S = 5.0  # whatever it cost: clients take a feed that is silent for half a minute for lost
OLDEST_S = 1.0  # a single frame
MOST_SLEEP_S = 0.5  # without a look at whether the server drains
STILL_S = 1.0  # between frames in which nothing but the time is new
# While a viewer's frame waits for its reader, others use the thread's time. No send takes the loop longer than this: it
# is a copy of some ten thousand bytes into the kernel.
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


class _Look:
    """One look at the scheduler, in the words for each tenant, which are put together once."""

    def __init__(self, engine: LLMEngine) -> None:
        started_s = time.thread_time()
        self._view = engine.look()
        self._encoded: dict[str | None, bytes] = {}  # by tenant; None: for all who have nothing in it
        self.state = self._view.state.state
        self.seen_s = self._view.state.now_s
        self.cost_s = time.thread_time() - started_s

    def of(self, tenant: str) -> bytes:
        started_s = time.thread_time()
        state = self._view.of(tenant)
        key = None if state is self._view.state else tenant
        if key not in self._encoded:
            self._encoded[key] = encode(state)
        self.cost_s += time.thread_time() - started_s
        return self._encoded[key]


class Feed:
    """All who watch one engine, and the task that tells them, which is there while anybody does."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.tasks: set[asyncio.Task[None]] = set()  # of those who watch: nobody is to wait for them
        self._viewers: set[Viewer] = set()
        self._task: asyncio.Task[None] | None = None
        self._num_frames = 0
        self._spent_s = 0.0  # of the thread's time, on the newest frames, by making and by sending them
        self._newest: _Look | None = None
        self._told: dict[str, tuple[bytes, float]] = {}  # by tenant: the newest frame without its time, and when it was

    def join(self, tenant: str, most: int = MOST_VIEWERS) -> Viewer:
        """One more, of so many that the tenant may have at most; the first frame comes with the next tick.

        Raises QueueFull or WorkerNotReady.
        """
        if self._engine.state in _LAST_STATES:
            raise shutting_down()
        if len(self._viewers) >= MOST_VIEWERS:
            raise QueueFull(
                f"{len(self._viewers)} are watching already, and no more may; close another window, or ask for single "
                "frames at /ui/state",
                retry_after_s=RETRY_AFTER_S,
            )
        if sum(viewer.tenant == tenant for viewer in self._viewers) >= most:
            raise QueueFull(
                f"{most} of your tenant are watching already, and no more may; close another window, or ask for single "
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
        """A frame was written to a viewer, in so much of the thread's time, which others had a part of maybe."""
        self._spent_s += min(duration_s, MOST_SEND_S)

    def newest(self, tenant: str) -> bytes:
        """A single frame; the same for all who ask within a hundred times what it cost."""
        look = self._newest
        if look is None or look.state != self._engine.state or self._engine.now() - look.seen_s >= _lasts_s(look):
            look = self._newest = _Look(self._engine)
        return look.of(tenant)

    # -- the task --------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._engine.state not in _LAST_STATES:
                await self._tell_all()
                await self._rest()
            await self._tell_all()
        except Exception:
            log.exception("whoever watches is told no more")
            self._task = None  # whoever comes back is told by another
        # Not where it is cancelled: whoever watches by then came later, and is told by another.
        for viewer in self._viewers:
            viewer.end()

    async def _tell_all(self) -> None:
        self._spent_s = 0.0
        with self._charged():
            look = self._newest = _Look(self._engine)
        for tenant in {viewer.tenant for viewer in self._viewers}:
            with self._charged():
                self._tell(tenant, look)
            await asyncio.sleep(0)

    def _tell(self, tenant: str, look: _Look) -> None:
        if (frame := self._new_frame(tenant, look)) is not None:
            for viewer in self._viewers:
                if viewer.tenant == tenant:
                    viewer.show(frame)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """What is done in it is paid for with a rest. It must not await: the thread's time would be others'. And by the
        clock on the wall a thread that was kept from its core would seem to have worked."""
        started_s = time.thread_time()
        yield
        self._spent_s += time.thread_time() - started_s

    def _new_frame(self, tenant: str, look: _Look) -> bytes | None:
        """A frame for this tenant, if there is anything in it that was not in the one before, or that was long ago."""
        encoded = look.of(tenant)
        _, _, rest = encoded.partition(b",")  # behind the time, which is the first of its fields
        before, told_s = self._told.get(tenant, (b"", 0.0))
        if rest == before and look.seen_s - told_s < STILL_S:
            return None
        self._told[tenant] = rest, look.seen_s
        self._num_frames += 1
        return b"event: state\nid: %d\ndata: %b\n\n" % (self._num_frames, encoded)

    async def _rest(self) -> None:
        """Until the next tick, and until what was spent is a hundredth of the time; at once if the server drains."""
        began_s = time.monotonic()
        while self._engine.state not in _LAST_STATES:
            left_s = began_s + min(max(TICK_S, REST * self._spent_s), MOST_REST_S) - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, MOST_SLEEP_S))


def _lasts_s(look: _Look) -> float:
    """For how long it is told to who asks for single frames."""
    return min(max(TICK_S, REST * look.cost_s), OLDEST_S)


class _Watching(Response):
    """The stream of frames to one viewer."""

    def __init__(self, feed: Feed, tenant: str, most: int) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = HEADERS
        self._feed = feed
        self._tenant = tenant
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body"})
            return
        viewer = self._feed.join(self._tenant, self._most)
        task = asyncio.current_task()
        assert task is not None
        self._feed.tasks.add(task)
        task.add_done_callback(self._feed.tasks.discard)
        departure = departure_of(scope)
        departure.watch(lambda: self._feed.leave(viewer))
        try:
            await send(start)
            await send({"type": "http.response.body", "body": BROWSERS_COME_BACK, "more_body": True})
            while (frame := await viewer.next()) is not None:
                started_s = time.thread_time()
                await send({"type": "http.response.body", "body": frame, "more_body": True})
                self._feed.note_send(time.thread_time() - started_s)
            await send({"type": "http.response.body"})
        finally:
            departure.watch(None)
            self._feed.leave(viewer)


async def ui_state(request: Request) -> Response:
    """What the scheduler does at this moment: lengths, states and counts, and no word of prompts and answers."""
    feed: Feed = request.app.state.feed
    headers = {"Cache-Control": "no-store"}
    return Response(feed.newest(caller_of(request).tenant), headers=headers, media_type="application/json")


async def ui_events(request: Request) -> Response:
    """The same as server-sent events, ten a second at most: each is whole, and who reads slowly misses some."""
    most = MOST_OF_A_TENANT if request.app.state.keyring.keys else MOST_VIEWERS
    return _Watching(request.app.state.feed, caller_of(request).tenant, most)


ENDPOINTS: list[Endpoint] = [
    Endpoint("GET", "/ui/state", ui_state, gives=(LiveState,)),
    Endpoint("GET", "/ui/events", ui_events, streams=(LiveState,)),
]
