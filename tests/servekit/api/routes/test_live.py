"""The live feed without a model: how often frames are built, who gets which, and when streams end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.types import Message

from servekit.api.app import create_app, replace_keys
from servekit.api.auth.keys import DEFAULT_TENANT, parse_keys_file
from servekit.api.routes.live import MAX_VIEWERS, MAX_VIEWERS_OF_TENANT, PERIOD_S, UNCHANGED_PERIOD_S, Feed, Viewers
from servekit.config import ServeConfig
from servekit.engine.live_view import LiveView
from servekit.engine.llm_engine import LLMEngine
from servekit.errors import QueueFull, WorkerNotReady
from servekit.observability.live_frames import LiveSequence
from servekit.server.server import Server
from tests.support.asgi import FILE, ask, bearer, guarded, make_scope
from tests.support.timing import again_if_late, assert_within

LIMIT_S = 60
SEQUENCES = [LiveSequence(number, "decode", 1, 1, 1, 9, 0.0) for number in range(2)]


class Looks:
    """An engine that has not started. Each look at it shows one more step, if it is busy; `num_looks` counts them."""

    def __init__(self, is_busy: bool = True) -> None:
        self.engine = LLMEngine(ServeConfig())
        self.num_looks = 0
        self._is_busy = is_busy
        self._look = self.engine.live_view
        self.engine.live_view = self.look  # type: ignore[method-assign]

    async def look(self) -> LiveView:
        self.num_looks += 1
        num_steps = self.num_looks if self._is_busy else 1
        state = replace((await self._look()).state, num_steps=num_steps, sequences=SEQUENCES)
        return LiveView(state, (("a", "of a"), ("b", "of b")))


def feed_of(looks: Looks) -> Feed:
    return Feed(looks.engine, looks.engine)


def always() -> bool:
    return True


def parse(event: bytes) -> tuple[int, dict[str, Any]]:
    """Return (id, frame) of an event."""
    fields = dict(line.split(": ", 1) for line in event.decode().rstrip("\n").split("\n"))
    assert fields.keys() == {"event", "id", "data"} and fields["event"] == "state"
    return int(fields["id"]), json.loads(fields["data"])


async def frames_of(events: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    assert await anext(events) == b"retry: 1000\n\n"
    async for event in events:
        yield parse(event)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# -- frames ------------------------------------------------------------------------------------------------------------


async def test_frames_are_built_five_times_a_second_however_many_watch() -> None:
    looks = Looks()
    feed = Feed(looks.engine, looks.engine)
    viewers = [frames_of(feed.events("a", always)) for _ in range(8)]
    started_s = looks.engine.now()
    async with asyncio.timeout(LIMIT_S):
        for _ in range(4):
            frames = await asyncio.gather(*(anext(viewer) for viewer in viewers))
            assert len({number for number, _ in frames}) == 1, "all viewers get the same frame"
    passed_s = looks.engine.now() - started_s
    assert passed_s >= 3 * PERIOD_S - 0.01
    assert looks.num_looks <= 2 + passed_s / PERIOD_S


async def test_each_tenant_sees_its_own_request_ids_only() -> None:
    feed = feed_of(Looks())
    for tenant, ids in (("a", ["of a", None]), ("b", [None, "of b"]), ("c", [None, None])):
        _, frame = parse((await feed.frame(tenant)).event)
        assert [each.get("request_id") for each in frame["sequences"]] == ids


@again_if_late
async def test_unchanged_frames_come_once_a_second_but_at_once_to_a_new_viewer() -> None:
    looks = Looks(is_busy=False)
    feed = Feed(looks.engine, looks.engine)
    viewer = frames_of(feed.events("", always))
    async with asyncio.timeout(LIMIT_S):
        _, first = await anext(viewer)
        _, second = await anext(viewer)
        assert second["now_s"] - first["now_s"] >= UNCHANGED_PERIOD_S - PERIOD_S
        started_s = looks.engine.now()
        await anext(frames_of(feed.events("", always)))
        assert_within(PERIOD_S / 2, looks.engine.now() - started_s)


async def test_slow_reader_gets_the_newest_frame() -> None:
    feed = feed_of(Looks())
    slow, quick = frames_of(feed.events("", always)), frames_of(feed.events("", always))
    async with asyncio.timeout(LIMIT_S):
        first, _ = await anext(slow)
        for _ in range(4):
            newest, _ = await anext(quick)
        late, _ = await anext(slow)
    assert first < newest <= late


async def test_single_frames_are_the_same_for_one_period_and_show_a_drain_at_once() -> None:
    looks, now_s = Looks(), 50.0
    engine, feed = looks.engine, Feed(looks.engine, looks.engine)
    engine._clock = lambda: now_s

    async def num_steps(tenant: str) -> int:
        frame: dict[str, int] = json.loads((await feed.frame(tenant)).json)
        return frame["num_steps"]

    assert [await num_steps(tenant) for tenant in "abca"] == [1, 1, 1, 1]
    now_s += PERIOD_S - 0.01
    assert await num_steps("a") == 1
    now_s += 0.02
    assert await num_steps("b") == 2
    engine.drain()
    assert json.loads((await feed.frame("a")).json)["state"] == "draining"


# -- limits ------------------------------------------------------------------------------------------------------------


def test_viewer_beyond_the_limit_is_refused() -> None:
    viewers = Viewers(Looks().engine)
    for _ in range(MAX_VIEWERS):
        viewers.add("")
    with pytest.raises(QueueFull, match=f"this server has {MAX_VIEWERS} viewers.*/ui/state") as refusal:
        viewers.add("")
    assert refusal.value.status == 503 and refusal.value.retry_after_s
    viewers.remove("")
    viewers.add("")


async def test_with_keys_one_tenant_cannot_take_all_places() -> None:
    app = create_app(LLMEngine(ServeConfig(api_key="key")))
    viewers, key = app.state.feeds.viewers, ("authorization", "Bearer key")
    for _ in range(MAX_VIEWERS_OF_TENANT):
        viewers.add(DEFAULT_TENANT)
    answer = await ask(app, "GET", "/ui/events", key)
    assert answer.status == 503 and f"your tenant has {MAX_VIEWERS_OF_TENANT} viewers" in answer.error["message"]
    assert int(answer.headers["retry-after"]) > 0
    assert (await ask(app, "GET", "/ui/state", key)).status == 200
    viewers.add("another", MAX_VIEWERS_OF_TENANT)


async def test_drain_is_the_last_frame_and_admits_no_viewers() -> None:
    looks = Looks()
    feed = Feed(looks.engine, looks.engine)
    viewer = frames_of(feed.events("", always))
    async with asyncio.timeout(LIMIT_S):
        await anext(viewer)
        looks.engine.drain()
        assert [frame["state"] async for _, frame in viewer] == ["draining"]
    with pytest.raises(WorkerNotReady, match="shutting down"):
        Viewers(looks.engine).add("")


# -- streams -----------------------------------------------------------------------------------------------------------


class Viewer:
    """A client that sends nothing, and may leave."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def receive(self) -> Message:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


async def test_stream_begins_with_the_retry_time_and_ends_with_its_client() -> None:
    app = create_app(Looks().engine)
    viewer, sent = Viewer(), asyncio.Queue[Message](maxsize=100)
    stream = asyncio.create_task(app(make_scope("GET", "/ui/events"), viewer.receive, sent.put))
    async with asyncio.timeout(LIMIT_S):
        start = await sent.get()
        headers = dict(start["headers"])
        assert start["status"] == 200 and headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-store" and headers[b"x-accel-buffering"] == b"no"
        assert (await sent.get())["body"] == b"retry: 1000\n\n"
        assert parse((await sent.get())["body"])[1]["state"] == "loading"
        assert app.state.feeds.viewers._num_viewers.total() == 1
        viewer.has_left.set()
        await stream
    assert app.state.feeds.viewers._num_viewers.total() == 0


async def test_stream_ends_with_the_last_frame_even_if_the_server_ends_first() -> None:
    """The server may stop its main loop before the viewers' next frame is due."""
    engine = Looks().engine
    app = create_app(engine)
    server, sent = Server(app, engine), asyncio.Queue[Message]()
    with server.capture_signals():  # the server handles SIGTERM, as when it serves
        stream = asyncio.create_task(app(make_scope("GET", "/ui/events"), Viewer().receive, sent.put))
        async with asyncio.timeout(LIMIT_S):
            for _ in range(3):
                await sent.get()
            server.end()
            for _ in range(8):  # more than a second
                frame = await sent.get()
                assert frame["more_body"] and parse(frame["body"])[1]["state"] == "loading"
            engine.drain()
            await stream
    messages = [sent.get_nowait() for _ in range(sent.qsize())]
    assert parse(messages[-2]["body"])[1]["state"] == "draining"
    assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


@pytest.mark.parametrize("kept", ["", '[[key]]\nkey = "narrow"\ntenant = "another"\n'])
async def test_stream_ends_properly_when_its_key_is_removed_or_changed(kept: str) -> None:
    other = '[[key]]\nkey = "other"\ntenant = "batch"\n'
    app, sent = guarded(), asyncio.Queue[Message]()
    scope = make_scope("GET", "/ui/events", bearer("narrow"))
    stream = asyncio.create_task(app(scope, Viewer().receive, sent.put))
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            await sent.get()
        replace_keys(app, parse_keys_file((FILE + other).encode(), "keys.toml"))
        assert (await sent.get())["more_body"], "its key is still there"
        replace_keys(app, parse_keys_file((other + kept).encode(), "keys.toml"))
        await stream
    messages = [sent.get_nowait() for _ in range(sent.qsize())]
    assert messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_client_that_does_not_read_holds_one_frame() -> None:
    looks = Looks()
    app = create_app(looks.engine)
    viewer, may_go_on, sent = Viewer(), asyncio.Event(), list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3:  # its first frame
            await may_go_on.wait()

    stream = asyncio.create_task(app(make_scope("GET", "/ui/events"), viewer.receive, send))
    await until(lambda: len(sent) == 3)
    quick = frames_of(app.state.feeds.of(looks.engine).events("", always))
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            newest, _ = await anext(quick)
    assert len(sent) == 3
    may_go_on.set()
    await until(lambda: len(sent) > 3)
    assert parse(sent[3]["body"])[0] >= newest
    viewer.has_left.set()
    await stream


async def test_bug_in_a_look_ends_the_stream_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    looks = Looks()
    app = create_app(looks.engine)
    looks.engine.live_view = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    async with asyncio.timeout(LIMIT_S):
        await ask(app, "GET", "/ui/events")
    assert "internal error in a request" in caplog.text and "ZeroDivisionError" in caplog.text
    assert app.state.feeds.viewers._num_viewers.total() == 0


async def test_head_request_gets_headers_and_is_no_viewer() -> None:
    app = create_app(Looks().engine)
    for path, kind in (("/ui/events", "text/event-stream"), ("/ui/state", "application/json")):
        answer = await ask(app, "HEAD", path)
        assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
        assert answer.headers["cache-control"] == "no-store"
    assert app.state.feeds.viewers._num_viewers.total() == 0


async def test_state_of_a_loading_server_shows_the_stage() -> None:
    answer = await ask(create_app(LLMEngine(ServeConfig())), "GET", "/ui/state")
    state = json.loads(answer.body)
    assert state.keys() == {"now_s", "state", "stage", "model_name", "version", "workers"}
    assert state["state"] == "loading" and state["workers"] == [{"state": state["stage"]}]
