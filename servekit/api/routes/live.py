"""GET /ui/state and /ui/events: frames that show what the scheduler does.

A frame is built at most FRAMES_PER_S times a second, however many clients watch; each tenant's form of it is encoded
once. Without viewers none is built. A viewer is sent the newest frame whenever its connection takes one, so a slow
reader skips frames and nothing piles up.

Viewers do not count as requests for the model: they take no slot of their API key, and a draining server ends their
streams and does not wait for them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from msgspec.structs import replace
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.api.auth.keys import Key, Keyring
from servekit.api.endpoint import Endpoint, caller_of, models_of
from servekit.api.key_accounts import RequestAccount
from servekit.api.schemas.json_body import encode
from servekit.engine.caller import Caller
from servekit.engine.interface import Models, ServedModel
from servekit.engine.live_view import LiveView
from servekit.errors import QueueFull, shutting_down
from servekit.observability.live_frames import LiveModel, LiveState

FRAMES_PER_S = 5
PERIOD_S = 1 / FRAMES_PER_S
UNCHANGED_PERIOD_S = 1.0  # between frames that differ in nothing but the time
MAX_VIEWERS = 32
MAX_VIEWERS_OF_TENANT = 8  # with API keys: so that one tenant's windows do not use up the places of the others
RETRY_AFTER_S = 5
LINE_END = "\n"  # of the events; sse-starlette's own is \r\n
RECONNECT_AFTER_MS = 1000  # how long a browser's EventSource waits before it connects again

_FINAL_STATES = ("draining", "failed")


class Frame(NamedTuple):
    """One look at the scheduler, as one tenant may see it."""

    seen_s: float
    state: str
    json: bytes
    event: bytes  # the same as a server-sent event

    @property
    def content(self) -> bytes:
        """Everything but the time, which is the first field."""
        return self.json.partition(b",")[2]


class Viewers:
    """Counts the viewers, and limits their number."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._num_viewers: Counter[str] = Counter()  # by tenant

    def add(self, tenant: str, max_of_tenant: int = MAX_VIEWERS) -> None:
        """Count a viewer. Raises QueueFull or WorkerNotReady."""
        if self._models.state in _FINAL_STATES:
            raise shutting_down()
        num_viewers = self._num_viewers.total()
        if num_viewers >= MAX_VIEWERS:
            raise _too_many_viewers(f"this server has {num_viewers} viewers, which is its limit")
        if self._num_viewers[tenant] >= max_of_tenant:
            raise _too_many_viewers(f"your tenant has {self._num_viewers[tenant]} viewers, which is its limit")
        self._num_viewers[tenant] += 1

    def remove(self, tenant: str) -> None:
        self._num_viewers[tenant] -= 1
        self._num_viewers += Counter()  # drops zeros: tenants come and go


class Feed:
    """The newest frame of one model."""

    def __init__(self, model: ServedModel, models: Models) -> None:
        self.model = model
        self._models = models
        self._view: LiveView | None = None
        self._frames: dict[str | None, Frame] = {}  # of the view, by tenant; None: without any tenant's request ids
        self._number = 0

    async def frame(self, tenant: str) -> Frame:
        """Return the newest frame. It is less than PERIOD_S old, and shows the engine's present state."""
        view = self._view
        if view is None or self._is_stale(view):
            view = await self.model.live_view()
            if view is not self._view:  # another viewer may have waited for the same one
                self._view = view
                self._frames.clear()
                self._number += 1
        if tenant not in self._frames:
            state = view.for_tenant(tenant)
            if self._models.has_choice:
                models = [LiveModel(each.name, each.state, each.kind) for each in self._models.served(Caller(tenant))]
                state = replace(state, models=models)
            if state is not view.state:
                self._frames[tenant] = self._encode(state)
            else:  # most tenants own none of the sequences, and share one frame
                if None not in self._frames:
                    self._frames[None] = self._encode(state)
                self._frames[tenant] = self._frames[None]
        return self._frames[tenant]

    def _encode(self, state: LiveState) -> Frame:
        json = encode(state)
        event = b"id: %d\nevent: state\ndata: %b\n\n" % (self._number, json)
        return Frame(state.now_s, state.state, json, event)

    def _is_stale(self, view: LiveView) -> bool:
        return view.state.state != self.model.state or self.model.now() - view.state.now_s >= PERIOD_S

    async def events(self, tenant: str, is_wanted: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield frames as server-sent events, at most FRAMES_PER_S a second, until the engine drains or fails.

        The events also end within PERIOD_S after `is_wanted` has become false.
        """
        yield ServerSentEvent(retry=RECONNECT_AFTER_MS, sep=LINE_END).encode()
        sent: Frame | None = None
        while is_wanted():
            frame = await self.frame(tenant)
            if (
                sent is None
                or frame.content != sent.content
                or frame.seen_s - sent.seen_s >= UNCHANGED_PERIOD_S - PERIOD_S / 2
            ):
                sent = frame
                yield frame.event
            if frame.state in _FINAL_STATES:
                return
            # All viewers wake when this frame becomes stale, so that one new frame serves all of them.
            await asyncio.sleep(max(0.0, frame.seen_s + PERIOD_S - self.model.now()))


class Feeds:
    """The feed of each model, and the viewers of all of them."""

    def __init__(self, models: Models) -> None:
        self.viewers = Viewers(models)
        self._models = models
        self._feeds: dict[str, Feed] = {}  # by model

    def of(self, model: ServedModel) -> Feed:
        """Return the feed of a model."""
        feed = self._feeds.get(model.name)
        if feed is None or feed.model is not model:
            feed = self._feeds[model.name] = Feed(model, self._models)
        return feed


def _too_many_viewers(reason: str) -> QueueFull:
    return QueueFull(
        f"{reason}; close another window, or get single frames from /ui/state", retry_after_s=RETRY_AFTER_S
    )


class _LiveStream(EventSourceResponse):
    """The stream of frames to one viewer.

    It ends with the last frame when the server drains or fails, when the client disconnects, and when its API key is
    removed or changed.
    """

    def __init__(self, feeds: Feeds, keyring: Keyring, request: Request, max_of_tenant: int) -> None:
        feed = feeds.of(_model(request))
        tenant: str = caller_of(request).tenant
        key: Key | None = request.scope["state"].get("api_key")
        super().__init__(
            feed.events(tenant, lambda: key is None or key in keyring.keys),
            ping=0,  # frames come once a second at least
            sep=LINE_END,
            # By default sse-starlette cancels its streams when the server begins to end, which may be before the last
            # frame is due. With this, it waits for the stream's own end. http_protocol.py bounds the wait for a client
            # that does not read.
            shutdown_grace_period=float("inf"),
        )
        del self.headers["Connection"]  # http_protocol.py sets it: it depends on the request and on a drain
        self._viewers = feeds.viewers
        self._tenant = tenant
        self._max_of_tenant = max_of_tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await super().__call__(scope, receive, send)
            return
        self._viewers.add(self._tenant, self._max_of_tenant)
        scope["state"]["is_viewer"] = True
        try:
            # The stream lasts as long as a page is open. If it took one of the key's concurrent requests, a key that
            # has one could either watch or send requests, but not both.
            account: RequestAccount | None = scope["state"].get("account")
            if account is not None:
                account.end()
            await super().__call__(scope, receive, send)
        finally:
            self._viewers.remove(self._tenant)


def is_viewer(scope: Scope) -> bool:
    """Return whether the request is a viewer's stream. A draining server does not wait for these."""
    return bool(scope.get("state", {}).get("is_viewer"))


def _model(request: Request) -> ServedModel:
    """Return the model in the query parameter `model`, by default the default one. Raises ModelNotFound."""
    return models_of(request).find(request.query_params.get("model"), caller_of(request))


async def ui_state(request: Request) -> Response:
    """Return what the scheduler does now: lengths, states and counts, but no text of prompts or answers."""
    feed = request.app.state.feeds.of(_model(request))
    headers = {"Cache-Control": "no-store"}
    return Response((await feed.frame(caller_of(request).tenant)).json, headers=headers, media_type="application/json")


async def ui_events(request: Request) -> Response:
    """Stream what the scheduler does as server-sent events, at most 5 a second. Each event is a whole state.

    A client that reads slowly skips events.
    """
    keyring: Keyring = request.app.state.keyring
    max_of_tenant = MAX_VIEWERS_OF_TENANT if keyring.keys else MAX_VIEWERS
    return _LiveStream(request.app.state.feeds, keyring, request, max_of_tenant)


ENDPOINTS: list[Endpoint] = [
    Endpoint("GET", "/ui/state", ui_state, gives=(LiveState,)),
    Endpoint("GET", "/ui/events", ui_events, streams=(LiveState,)),
]
