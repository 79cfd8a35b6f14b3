"""The bytes of a token stream, who writes them, and its one task; SingleWaiterEvent and Disconnect, which it uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Scope

from servekit.aio.single_waiter_event import SingleWaiterEvent
from servekit.api.app import create_app
from servekit.api.body_writer import offer_body_writer
from servekit.api.disconnect import Disconnect, disconnect_of
from servekit.api.responses.sse import SERVER_SENT_EVENTS, EventStream
from servekit.config import ServeConfig
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.request_state import RequestState
from servekit.requests.generation import GenerationRequest, Sampling
from servekit.scheduler.sequence import FinishReason
from tests.support.asgi import make_scope
from tests.support.timing import until


class CountingFormat:
    """Write each event as its number of deltas."""

    framing = SERVER_SENT_EVENTS
    end_of_stream = b"end"

    def events(self, deltas: list[TokenDelta]) -> bytes:
        return b"%d" % len(deltas)

    def last_events(self) -> bytes:
        return b"!"


class Stream:
    """A stream that is being read, of a request with `num_sequences` sequences."""

    def __init__(self, num_sequences: int = 1, interval: int = 1, **settings: Any) -> None:
        self.sent: list[bytes] = []
        self.num_aborted = 0
        self.queue = ClientQueue(interval)
        self.scope: Scope = {**make_scope("POST", "/"), "app": create_app(LLMEngine(ServeConfig(**settings)))}
        state = RequestState(
            GenerationRequest(prompts=[], sampling=Sampling()),
            None,  # type: ignore[arg-type]
            [None] * num_sequences,  # type: ignore[list-item]
            self.queue,
            interval,
            self._finish,
        )
        response = EventStream(Request(self.scope), state, CountingFormat())
        self.task = asyncio.create_task(response(self.scope, _never, self._send))

    def put(self, index: int, *, is_last: bool = False) -> None:
        self.queue.put(TokenDelta(index, 1, "a", False, FinishReason.STOP if is_last else None))

    async def _send(self, message: Message) -> None:
        self.sent.append(message.get("body", b"head"))

    def _finish(self, *_: Any) -> None:
        self.num_aborted += 1


async def _never() -> Message:
    raise AssertionError("the stream must not poll for a disconnect")


async def moments(num: int = 5) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


async def test_each_token_is_an_event_and_pending_events_are_one_write() -> None:
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
    assert stream.sent[3:] == [b"1!end"], "what ends the stream is one write"


async def test_interval_batches_tokens_but_not_the_first_and_not_the_last() -> None:
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
    assert stream.sent[3:] == [b"11!end"]


@pytest.mark.parametrize("has_begun", [True, False])
async def test_disconnect_aborts_the_sequences_at_once(has_begun: bool) -> None:
    stream = Stream()
    if has_begun:
        stream.put(0)
    await moments()
    disconnect_of(stream.scope).happen()
    assert stream.num_aborted == 1, "even before its task has run"
    await stream.task
    assert stream.sent == ([b"head", b"1"] if has_begun else [b"head"])


class Writer:
    """A BodyWriter that notes what it writes in the list that `send` notes it in, with a star."""

    def __init__(self, sent: list[bytes]) -> None:
        self.is_ready = True
        self._sent = sent

    def write(self, part: bytes) -> None:
        self._sent.append(part + b"*")


async def test_tokens_are_written_past_the_layers_while_the_client_reads_but_not_the_end() -> None:
    stream = Stream(num_sequences=2)
    writer = Writer(stream.sent)
    offer_body_writer(stream.scope, writer)
    await moments()
    for index in (0, 1):
        stream.put(index)
        stream.put(index)
        await moments()
    assert stream.sent == [b"head", b"11*", b"11*"]
    writer.is_ready = False
    stream.put(0)
    await moments()
    assert stream.sent[3:] == [b"1"], "`send` waits until the client reads"
    writer.is_ready = True
    stream.put(1)
    await moments()
    stream.put(0, is_last=True)
    await moments()
    stream.put(1)
    await moments()
    stream.put(1, is_last=True)
    await stream.task
    assert stream.sent[4:] == [b"1*", b"1", b"1*", b"1!end"]


async def test_stream_whose_format_fails_in_the_event_loops_callback_ends_with_that_error() -> None:
    stream = Stream()
    offer_body_writer(stream.scope, Writer(stream.sent))
    await moments()
    stream.put(0)
    await moments()
    stream.queue.put(None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        await stream.task
    assert stream.sent == [b"head", b"1*"] and stream.num_aborted == 1


async def test_silent_stream_sends_keep_alive_comments() -> None:
    stream = Stream(sse_keep_alive_interval=0.04)
    started_s = asyncio.get_running_loop().time()

    def num_comments() -> int:
        return stream.sent.count(b": keep-alive\n\n")

    await until(lambda: num_comments() >= 2)
    assert asyncio.get_running_loop().time() - started_s >= 0.06
    known, longest_s = num_comments(), 0.0
    for _ in range(10):
        stream.put(0)
        put_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        longest_s = max(longest_s, asyncio.get_running_loop().time() - put_s)
    # Other programs may have kept this one from sending tokens.
    assert num_comments() == known or longest_s > 0.03, "a stream that sends tokens needs no comments"
    stream.put(0, is_last=True)
    await stream.task


async def test_ended_streams_leave_no_timer() -> None:
    stream = Stream(sse_keep_alive_interval=0.02)
    stream.put(0, is_last=True)
    await stream.task
    keep_alive = stream.scope["app"].state.keep_alive
    await until(lambda: keep_alive._timer is None)
    assert not keep_alive._silent_since_s


@pytest.mark.parametrize("make", [SingleWaiterEvent, asyncio.Event])
async def test_single_waiter_event_behaves_as_asyncio_event(
    make: Callable[[], SingleWaiterEvent | asyncio.Event],
) -> None:
    event, woken = make(), list[int]()

    async def listen() -> None:
        await event.wait()
        woken.append(1)

    first = asyncio.create_task(listen())
    await moments()
    assert not woken and not event.is_set()
    event.set()
    event.set()
    event.clear()
    await first
    second = asyncio.create_task(listen())
    await moments()
    assert len(woken) == 1, "what was cleared before it waited is over"
    second.cancel()
    await asyncio.wait([second])
    event.set()
    await listen()
    await listen()
    assert len(woken) == 3 and event.is_set()


def test_disconnect_callback_runs_at_once_if_set_late_and_not_if_removed() -> None:
    called, disconnect = list[str](), Disconnect()
    disconnect.set_callback(lambda: called.append("first"))
    disconnect.set_callback(None)
    disconnect.happen()
    disconnect.set_callback(lambda: called.append("late"))
    assert called == ["late"] and disconnect.has_happened
