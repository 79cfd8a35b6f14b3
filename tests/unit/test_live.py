"""Claims about the live feed that need no model: one task while anybody watches, and room for one frame each."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from starlette.types import Message

from servekit.api import create_app, live
from servekit.api.live import MOST_OF_A_TENANT, MOST_VIEWERS, Feed
from servekit.config import ServeConfig
from servekit.departure import departure_of
from servekit.engine import LLMEngine
from servekit.errors import QueueFull, WorkerNotReady
from servekit.keys import DEFAULT_TENANT
from servekit.live_view import LiveSequence
from servekit.viewing import View
from tests.unit.test_access import ask, make_scope

LIMIT_S = 30


def make_engine(is_busy: bool = False) -> LLMEngine:
    """Not started; a busy one has something new to tell at each look."""
    engine = LLMEngine(ServeConfig())
    if is_busy:
        whole, numbers = engine.look, itertools.count(1)
        engine.look = lambda: View(replace(whole().state, num_steps=next(numbers)))  # type: ignore[method-assign]
    return engine


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def feed_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "live feed"]


def parse(frame: bytes) -> tuple[int, dict[str, Any]]:
    kind, number, data, *rest = frame.decode().split("\n")
    assert kind == "event: state" and rest == ["", ""]
    return int(number.removeprefix("id: ")), json.loads(data.removeprefix("data: "))


# -- the task ----------------------------------------------------------------------------------------------------------


async def test_there_is_a_task_while_anybody_watches_and_none_otherwise() -> None:
    feed = Feed(make_engine(is_busy=True))
    assert not feed_tasks()
    first, second = feed.join("a"), feed.join("b")
    assert len(feed_tasks()) == 1
    assert await first.next() and await second.next()
    feed.leave(first)
    assert await second.next() and len(feed_tasks()) == 1
    feed.leave(second)
    feed.leave(second)
    await until(lambda: not feed_tasks())
    third = feed.join("a")
    assert await third.next(), "and again"
    feed.leave(third)
    await until(lambda: not feed_tasks())


async def test_who_has_left_is_told_no_more() -> None:
    feed = Feed(make_engine(is_busy=True))
    viewer, other = feed.join(""), feed.join("")
    feed.leave(viewer)
    assert await viewer.next() is None
    assert await other.next() and await other.next()
    assert await viewer.next() is None
    feed.leave(other)


async def test_a_bug_of_ours_ends_the_streams_and_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine()
    feed, whole = Feed(engine), engine.look
    viewer = feed.join("")
    assert await viewer.next()
    engine.look = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    async with asyncio.timeout(LIMIT_S):
        assert await viewer.next() is None
    assert "whoever watches is told no more" in caplog.text
    feed.leave(viewer)
    engine.look = whole  # type: ignore[method-assign]
    again = feed.join("")
    async with asyncio.timeout(LIMIT_S):
        assert await again.next()
    feed.leave(again)


async def test_who_comes_as_the_last_one_leaves_is_told_by_a_task_of_its_own() -> None:
    feed = Feed(make_engine(is_busy=True))
    last = feed.join("")
    assert await last.next()
    feed.leave(last)
    newcomer = feed.join("")  # the task that was there has not run yet, to hear that it is cancelled
    async with asyncio.timeout(LIMIT_S):
        assert await newcomer.next() and await newcomer.next()
    assert len(feed_tasks()) == 1
    feed.leave(newcomer)


async def test_after_what_took_t_nothing_is_done_for_a_hundred_times_t(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed(make_engine())
    for spent_s, least_s in ((0.0, live.TICK_S), (0.004, 0.4)):
        feed._spent_s, began_s = spent_s, time.monotonic()
        await feed._rest()
        assert time.monotonic() - began_s >= least_s
    monkeypatch.setattr(live, "MOST_REST_S", 0.2)
    feed._spent_s = 1e9
    async with asyncio.timeout(LIMIT_S):
        await feed._rest()
    feed._spent_s, began_s = 0.0, time.monotonic()
    resting = asyncio.create_task(feed._rest())
    await asyncio.sleep(0)
    feed.note_send(1e-3)
    feed.note_send(30.0)  # it waited for its reader
    assert feed._spent_s == 1e-3 + live.MOST_SEND_S, "what waits is no work"
    await resting
    assert time.monotonic() - began_s >= 0.2, "sending counts, too"


async def test_time_in_which_the_thread_was_kept_from_its_core_is_no_work() -> None:
    engine = make_engine()
    feed, whole = Feed(engine), engine.look

    def look() -> View:
        time.sleep(0.2)
        return whole()

    engine.look = look  # type: ignore[method-assign]
    viewer = feed.join("")
    await feed._tell_all()
    assert 0 < feed._spent_s < 0.2
    engine.look = whole  # type: ignore[method-assign]
    feed.leave(viewer)


# -- frames ------------------------------------------------------------------------------------------------------------


async def test_frames_come_one_after_the_other_and_one_look_is_for_all_tenants() -> None:
    engine = make_engine()
    feed, whole, numbers = Feed(engine), engine.look, itertools.count(1)
    sequences = [LiveSequence(number, "decode", 1, 1, 1, 9, 0.0) for number in range(2)]

    def look() -> View:
        state = replace(whole().state, num_steps=next(numbers), sequences=sequences)
        return View(state, (("a", "of a"), ("b", "of b")))

    engine.look = look  # type: ignore[method-assign]
    one, two, other = feed.join("a"), feed.join("a"), feed.join("b")
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            frame = await one.next()
            assert frame is not None and frame is await two.next()
            theirs = await other.next()
            assert theirs is not None
            told, told_to_other = parse(frame)[1], parse(theirs)[1]
            assert [each.get("request_id") for each in told["sequences"]] == ["of a", None]
            assert [each.get("request_id") for each in told_to_other["sequences"]] == [None, "of b"]
            assert told["num_steps"] == told_to_other["num_steps"]
    assert next(numbers) <= 5, "a look for each tick, whoever sees it"
    for viewer in (one, two, other):
        feed.leave(viewer)


async def test_where_nothing_is_new_frames_come_once_a_second_but_at_once_to_a_newcomer() -> None:
    feed = Feed(make_engine())
    viewer, times = feed.join(""), []
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            frame = await viewer.next()
            assert frame is not None
            times.append(parse(frame)[1]["now_s"])
        assert min(after - before for before, after in itertools.pairwise(times)) >= live.STILL_S
        number = parse(frame)[0]
        newcomer = feed.join("")
        frame = await newcomer.next()
        assert frame is not None and parse(frame)[0] == number + 1
    feed.leave(viewer)
    feed.leave(newcomer)


async def test_who_does_not_read_gets_the_newest_frame_when_it_does() -> None:
    feed = Feed(make_engine(is_busy=True))
    slow, quick = feed.join(""), feed.join("")
    numbers = []
    async with asyncio.timeout(LIMIT_S):
        for _ in range(4):
            frame = await quick.next()
            assert frame is not None
            numbers.append(parse(frame)[0])
        assert numbers == list(range(numbers[0], numbers[0] + 4))
        late = await slow.next()
    assert late is not None and parse(late)[0] == numbers[-1]
    feed.leave(slow)
    feed.leave(quick)


async def test_who_asks_for_single_frames_gets_the_same_one_for_as_long_as_the_loop_is_to_rest() -> None:
    engine = make_engine()
    feed, whole, numbers, now_s = Feed(engine), engine.look, itertools.count(1), 50.0
    engine._clock = lambda: now_s
    sequences = [LiveSequence(1, "decode", 1, 1, 1, 9, 0.0)]
    engine.look = lambda: View(  # type: ignore[method-assign]
        replace(whole().state, num_steps=next(numbers), sequences=sequences), (("a", "of a"),)
    )

    def ask_for(tenant: str) -> tuple[int, bool]:
        told = json.loads(feed.newest(tenant))
        return told["num_steps"], "request_id" in told["sequences"][0]

    assert [ask_for(tenant) for tenant in "abca"] == [(1, True), (1, False), (1, False), (1, True)]
    for cost_s, lasts_s in ((0.0, 0.1), (0.004, 0.4), (30.0, 1.0)):
        assert feed._newest is not None
        feed._newest.cost_s = cost_s
        number, _ = ask_for("a")
        now_s += lasts_s - 0.01
        feed._newest.cost_s = cost_s
        assert ask_for("a")[0] == number
        now_s += 0.02
        assert ask_for("b")[0] == number + 1
    engine.drain()
    assert json.loads(feed.newest("a"))["state"] == "draining", "which nobody is told late"


# -- who may -----------------------------------------------------------------------------------------------------------


async def test_so_many_may_watch_and_the_next_is_told() -> None:
    feed = Feed(make_engine())
    viewers = [feed.join("") for _ in range(MOST_VIEWERS)]
    with pytest.raises(QueueFull, match=f"{MOST_VIEWERS} are watching already.*/ui/state") as refusal:
        feed.join("")
    assert refusal.value.status == 503 and refusal.value.retry_after_s
    feed.leave(viewers.pop())
    viewers.append(feed.join(""))
    for viewer in viewers:
        feed.leave(viewer)


async def test_where_there_are_keys_a_tenant_leaves_places_for_the_others() -> None:
    app = create_app(LLMEngine(ServeConfig(api_key="key")))
    feed, tenant = app.state.feed, DEFAULT_TENANT
    viewers = [feed.join(tenant) for _ in range(MOST_OF_A_TENANT)]
    key = ("authorization", "Bearer key")
    answer = await ask(app, "GET", "/ui/events", key)
    message = json.loads(answer.body)["error"]["message"]
    assert answer.status == 503 and f"{MOST_OF_A_TENANT} of your tenant are watching already" in message
    assert int(answer.headers["retry-after"]) > 0
    assert (await ask(app, "GET", "/ui/state", key)).status == 200
    viewers.append(feed.join("another", MOST_OF_A_TENANT))
    for viewer in viewers:
        feed.leave(viewer)


async def test_a_drain_is_told_and_ends_the_streams_and_lets_nobody_in() -> None:
    engine = make_engine()
    feed = Feed(engine)
    viewer = feed.join("")
    assert await viewer.next()
    engine.drain()
    async with asyncio.timeout(LIMIT_S):
        last = await viewer.next()
        assert last is not None and parse(last)[1]["state"] == "draining"
        assert await viewer.next() is None
    feed.leave(viewer)
    assert not feed_tasks()
    with pytest.raises(WorkerNotReady, match="shutting down"):
        feed.join("")


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_a_stream_begins_with_how_to_come_back_and_ends_with_its_client() -> None:
    app = create_app(make_engine(is_busy=True))
    scope, sent = make_scope("GET", "/ui/events"), asyncio.Queue[Message](maxsize=100)

    async def receive() -> Message:
        raise AssertionError("the protocol tells of a departure; nobody need ask")

    stream = asyncio.create_task(app(scope, receive, sent.put))
    async with asyncio.timeout(LIMIT_S):
        start = await sent.get()
        headers = dict(start["headers"])
        assert start["status"] == 200 and headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-store"
        assert (await sent.get())["body"] == b"retry: 1000\n\n"
        assert parse((await sent.get())["body"])[1]["state"] == "loading"
        departure_of(scope).happen()
        await stream
    await until(lambda: not feed_tasks())


async def test_a_client_that_takes_nothing_holds_one_frame_and_no_more() -> None:
    app = create_app(make_engine(is_busy=True))
    may_go_on, sent = asyncio.Event(), []
    scope = make_scope("GET", "/ui/events")

    async def send(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3:  # in the midst of its first frame
            await may_go_on.wait()

    stream = asyncio.create_task(app(scope, send, send))
    await until(lambda: len(sent) == 3)
    quick = app.state.feed.join("")
    async with asyncio.timeout(LIMIT_S):
        for _ in range(5):
            newest = await quick.next()
    assert len(sent) == 3
    may_go_on.set()
    await until(lambda: len(sent) > 3)
    assert parse(sent[3]["body"])[0] >= parse(newest)[0]
    app.state.feed.leave(quick)
    departure_of(scope).happen()
    await stream
    await until(lambda: not feed_tasks())


async def test_head_is_answered_and_nobody_watches() -> None:
    app = create_app(make_engine())
    for path, kind in (("/ui/events", "text/event-stream"), ("/ui/state", "application/json")):
        answer = await ask(app, "HEAD", path)
        assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
        assert answer.headers["cache-control"] == "no-store"
    assert not feed_tasks()


async def test_a_server_that_loads_says_how_far_it_has_come() -> None:
    answer = await ask(create_app(make_engine()), "GET", "/ui/state")
    told = json.loads(answer.body)
    assert told.keys() == {"now_s", "state", "stage", "model_name", "version", "workers"}
    assert told["state"] == "loading" and told["workers"] == [{"state": told["stage"]}]
