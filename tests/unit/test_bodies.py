"""Claims about the memory that all bodies take together: however a request ends, its share comes back, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message

from servekit.api import create_app
from servekit.api.http import UNCOUNTED_BODY_BYTES, BodyBudget, read_body, refuse
from servekit.config import ServeConfig, doubts
from servekit.engine import LLMEngine
from servekit.errors import ServekitError
from tests.unit.test_access import make_scope

MOST = 10**6
BODY = b" " * (4 * 10**5 + UNCOUNTED_BODY_BYTES)  # two of them pass at the same time, and not three
PIECES = [BODY[at : at + 10**5] for at in range(0, len(BODY), 10**5)]


class Conversation:
    """One request to a handler that reads its body, and then waits to be told how to end."""

    def __init__(self, budget: BodyBudget) -> None:
        self.ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_read = asyncio.Event()
        self.sent: list[Message] = []
        self._to_receive: asyncio.Queue[Message] = asyncio.Queue()
        scope = {**make_scope("POST", "/"), "state": {"conversation": self}}
        self.task = asyncio.create_task(budget(scope, self._to_receive.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def send_body(self, pieces: list[bytes], is_whole: bool = True) -> None:
        for piece in pieces:
            self._to_receive.put_nowait({"type": "http.request", "body": piece, "more_body": True})
        if is_whole:
            self._to_receive.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        await asyncio.sleep(0.01)

    async def wait_until_read(self) -> None:
        await asyncio.wait_for(self.has_read.wait(), 5)

    def leave(self) -> None:
        self._to_receive.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])


async def _handle(request: Request) -> Response:
    conversation: Conversation = request.state.conversation
    assert await read_body(request) == BODY
    conversation.has_read.set()
    await conversation.ends
    return Response()


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServekitError)
    return refuse(request, error)


def make_budget(**settings: Any) -> BodyBudget:
    app = Starlette(routes=[Route("/", _handle, methods=["POST"])], exception_handlers={ServekitError: _on_error})
    app.state.engine = SimpleNamespace(config=ServeConfig(**settings))
    return BodyBudget(app, MOST)


async def test_one_too_many_is_refused_and_told_when_to_come_back() -> None:
    budget = make_budget()
    first, second, third = (Conversation(budget) for _ in range(3))
    for conversation in (first, second):
        await conversation.send_body(PIECES)
        await conversation.wait_until_read()
    assert budget.num_bytes == 800_000
    await third.send_body(PIECES)
    await third.task
    headers = dict(third.sent[0]["headers"])
    assert third.status == 503 and int(headers[b"retry-after"]) > 0
    error = json.loads(third.sent[1]["body"])["error"]
    assert error["code"] == "overloaded" and "max_total_body_bytes" in error["message"]
    assert budget.num_bytes == 800_000, "what had come of it was given back"
    first.ends.set_result(None)
    await first.task
    assert first.status == 200 and budget.num_bytes == 400_000
    fourth = Conversation(budget)
    await fourth.send_body(PIECES)
    await fourth.wait_until_read()
    for conversation in (second, fourth):
        conversation.ends.set_result(None)
        await conversation.task
    assert budget.num_bytes == 0


async def test_small_bodies_are_not_counted_and_pass_when_all_is_taken() -> None:
    budget = make_budget()
    budget.num_bytes = MOST
    request = Request({**make_scope("POST", "/"), "state": {"body_budget": budget, "num_body_bytes": 0}})
    budget.hold(request, UNCOUNTED_BODY_BYTES)
    with pytest.raises(ServekitError):
        budget.hold(request, UNCOUNTED_BODY_BYTES + 1)
    assert budget.num_bytes == MOST and request.state.num_body_bytes == 0


async def _leave(conversation: Conversation) -> None:
    conversation.leave()


async def _cancel(conversation: Conversation) -> None:
    conversation.task.cancel()


async def _fail(conversation: Conversation) -> None:
    conversation.ends.set_exception(RuntimeError("a bug"))


async def _take_too_long(_: Conversation) -> None:
    await asyncio.sleep(0.25)


async def _send_too_much(conversation: Conversation) -> None:
    await conversation.send_body([b" " * 10**5])


@pytest.mark.parametrize("end", [_leave, _cancel, _take_too_long, _send_too_much])
async def test_who_is_not_done_sending_gives_back_what_it_sent(end: Callable[[Conversation], Awaitable[None]]) -> None:
    budget = make_budget(body_timeout=0.2, max_body_bytes=len(BODY))
    conversation = Conversation(budget)
    await conversation.send_body(PIECES, is_whole=False)
    assert budget.num_bytes == 400_000
    await end(conversation)
    await asyncio.wait([conversation.task], timeout=5)
    assert conversation.task.done() and budget.num_bytes == 0


@pytest.mark.parametrize("end", [_cancel, _fail])
async def test_and_so_does_who_waits_for_its_answer(end: Callable[[Conversation], Awaitable[None]]) -> None:
    budget = make_budget()
    conversation = Conversation(budget)
    await conversation.send_body(PIECES)
    await conversation.wait_until_read()
    assert budget.num_bytes == 400_000
    await end(conversation)
    await asyncio.wait([conversation.task], timeout=5)
    assert conversation.task.done() and budget.num_bytes == 0


async def test_the_whole_application_has_one() -> None:
    app = create_app(LLMEngine(ServeConfig(max_total_body_bytes=10**5)))
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(make_scope("POST", "/tokenize"), receive, send)
    assert sent[0]["status"] == 503 and b"overloaded" in sent[1]["body"]


def test_a_bound_that_a_single_body_can_be_over_is_doubted() -> None:
    assert "max_total_body_bytes = 5 is less" in doubts(ServeConfig(max_total_body_bytes=5))[0]
    assert not doubts(ServeConfig())
