"""Claims about a stream's bytes and its one task, and about the two small things that it stands on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from servekit.api import create_app
from servekit.api.event_stream import EventStream
from servekit.bell import Bell
from servekit.client_queue import ClientQueue, TokenDelta
from servekit.config import ServeConfig
from servekit.departure import Departure, departure_of
from servekit.engine import LLMEngine
from servekit.sequence import FinishReason
from servekit.submission import Submission
from tests.unit.test_access import make_scope


class Stream:
    """One that is being read, of a request with so many sequences."""

    def __init__(self, num_sequences: int = 1, interval: int = 1, **settings: Any) -> None:
        self.sent: list[bytes] = []
        self.num_aborted = 0
        self.queue = ClientQueue(interval)
        self.scope: Scope = {**make_scope("POST", "/"), "app": create_app(LLMEngine(ServeConfig(**settings)))}
        submission = Submission(
            None,
            None,
            [None] * num_sequences,
            self.queue,
            interval,
            self._finish,  # type: ignore[arg-type,list-item]
        )
        response = EventStream(
            Request(self.scope), submission, lambda deltas: b"%d" % len(deltas), lambda: b"!", b"end"
        )
        self.task = asyncio.create_task(response(self.scope, _never, self._send))

    def put(self, index: int, *, is_last: bool = False) -> None:
        self.queue.put(TokenDelta(index, 1, "a", False, FinishReason.STOP if is_last else None))

    async def _send(self, message: Message) -> None:
        self.sent.append(message.get("body", b"head"))

    def _finish(self, *_: Any) -> None:
        self.num_aborted += 1


async def _never() -> Message:
    raise AssertionError("a stream asks nobody whether its client is there")


async def moments(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_each_token_is_an_event_and_all_that_waits_is_one_write() -> None:
    stream = Stream(num_sequences=2)
    stream.put(0)
    await moments()
    stream.put(0)
    stream.put(1)
    stream.put(0, is_last=True)
    await moments()
    assert stream.sent == [b"head", b"1", b"111"]
    stream.put(1, is_last=True)
    await stream.task
    assert stream.sent[3:] == [b"1", b"!", b"end"]


async def test_an_interval_collects_tokens_but_never_the_first_and_never_the_end() -> None:
    stream = Stream(num_sequences=2, interval=3)
    stream.put(0)
    await moments()
    for _ in range(2):
        stream.put(0)
        stream.put(1)
    await moments()
    assert stream.sent == [b"head", b"1"], "neither has three yet"
    stream.put(0)
    await moments()
    assert stream.sent[2:] == [b"32"]
    stream.put(1, is_last=True)
    stream.put(0, is_last=True)
    await stream.task
    assert stream.sent[3:] == [b"11", b"!", b"end"]


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_client_that_leaves_ends_the_work_at_once(has_begun: bool) -> None:
    stream = Stream()
    if has_begun:
        stream.put(0)
    await moments()
    departure_of(stream.scope).happen()
    assert stream.num_aborted == 1, "even before its task has run"
    await stream.task
    assert stream.sent == ([b"head", b"1"] if has_begun else [b"head"])


async def test_a_silent_stream_says_something_now_and_then() -> None:
    stream = Stream(sse_keep_alive_interval=0.04)
    await asyncio.sleep(0.13)
    num_comments = stream.sent.count(b": keep-alive\n\n")
    assert 2 <= num_comments <= 3
    for _ in range(10):
        stream.put(0)
        await asyncio.sleep(0.01)
    assert stream.sent.count(b": keep-alive\n\n") == num_comments, "one that speaks needs no comments"
    stream.put(0, is_last=True)
    await stream.task


async def test_streams_that_have_ended_leave_no_timer() -> None:
    stream = Stream(sse_keep_alive_interval=0.02)
    stream.put(0, is_last=True)
    await stream.task
    await asyncio.sleep(0.03)
    keep_alive = stream.scope["app"].state.keep_alive
    assert keep_alive._timer is None and not keep_alive._silent_since_s


@pytest.mark.parametrize("make", [Bell, asyncio.Event])
async def test_a_bell_is_an_event(make: Callable[[], Bell | asyncio.Event]) -> None:
    bell, heard = make(), list[int]()

    async def listen() -> None:
        await bell.wait()
        heard.append(1)

    first = asyncio.create_task(listen())
    await moments()
    assert not heard and not bell.is_set()
    bell.set()
    bell.set()
    bell.clear()
    await first
    second = asyncio.create_task(listen())
    await moments()
    assert len(heard) == 1, "what was cleared before it waited is over"
    second.cancel()
    await asyncio.wait([second])
    bell.set()
    await listen()
    await listen()
    assert len(heard) == 3 and bell.is_set()


def test_who_watches_late_is_told_at_once_and_who_stops_is_not() -> None:
    told, departure = list[str](), Departure()
    departure.watch(lambda: told.append("first"))
    departure.watch(None)
    departure.happen()
    departure.watch(lambda: told.append("late"))
    assert told == ["late"] and departure.has_happened
