"""The bound on the memory of all request bodies: however a request ends, its share is released once."""

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
from starlette.types import Message, Receive, Scope, Send

from servekit.api.app import create_app
from servekit.api.body_budget import UNCOUNTED_BODY_BYTES, BodyBudget
from servekit.api.request_body import read_body
from servekit.api.responses.http import refuse
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.engine.llm_engine import LLMEngine
from servekit.errors import QueueFull, RequestTooLarge, ServekitError
from tests.support.asgi import make_scope
from tests.support.pauses import pause

MAX_BYTES = 10**6
BODY = b" " * (4 * 10**5 + UNCOUNTED_BODY_BYTES)  # two fit at the same time, three do not
PIECES = [BODY[at : at + 10**5] for at in range(0, len(BODY), 10**5)]


class Conversation:
    """One request to a handler that reads its body and then waits until the test ends it."""

    def __init__(self, budget: BodyBudget, *headers: tuple[str, str]) -> None:
        self.ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_read = asyncio.Event()
        self.sent: list[Message] = []
        self._to_receive: asyncio.Queue[Message] = asyncio.Queue()
        scope = {**make_scope("POST", "/", *headers), "state": {"conversation": self}}
        self.task = asyncio.create_task(budget(scope, self._to_receive.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def send_body(self, pieces: list[bytes], is_whole: bool = True) -> None:
        for piece in pieces:
            self._to_receive.put_nowait({"type": "http.request", "body": piece, "more_body": True})
        if is_whole:
            self._to_receive.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        for _ in range(100):  # each piece wakes the task once
            await asyncio.sleep(0)

    async def wait_until_read(self) -> None:
        await asyncio.wait_for(self.has_read.wait(), 60)

    async def wait_until_ended(self) -> None:
        """Wait for the task, however it ends. Its exception is retrieved: asyncio logs others at some later time."""
        async with asyncio.timeout(60):
            await asyncio.gather(self.task, return_exceptions=True)

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
    app.state.models = SimpleNamespace(config=ServeConfig(**settings))
    return BodyBudget(app, MAX_BYTES)


async def test_body_over_the_budget_is_refused_with_retry_after() -> None:
    budget = make_budget()
    first, second, third = (Conversation(budget) for _ in range(3))
    for conversation in (first, second):
        await conversation.send_body(PIECES)
        await conversation.wait_until_read()
    assert budget.budget.total == 800_000
    await third.send_body(PIECES)
    await third.task
    headers = dict(third.sent[0]["headers"])
    assert third.status == 503 and int(headers[b"retry-after"]) > 0
    error = json.loads(third.sent[1]["body"])["error"]
    assert error["code"] == "overloaded" and "max_total_body_bytes" in error["message"]
    assert budget.budget.total == 800_000, "the refused body was released"
    first.ends.set_result(None)
    await first.task
    assert first.status == 200 and budget.budget.total == 400_000
    fourth = Conversation(budget)
    await fourth.send_body(PIECES)
    await fourth.wait_until_read()
    for conversation in (second, fourth):
        conversation.ends.set_result(None)
        await conversation.task
    assert budget.budget.total == 0


async def test_small_bodies_pass_when_the_budget_is_used_up() -> None:
    budget = make_budget()
    budget.budget.take("", MAX_BYTES)
    request = Request({**make_scope("POST", "/"), "state": {"body_budget": budget, "num_body_bytes": 0}})
    budget.reserve(request, UNCOUNTED_BODY_BYTES)
    with pytest.raises(ServekitError):
        budget.reserve(request, UNCOUNTED_BODY_BYTES + 1)
    assert budget.budget.total == MAX_BYTES and request.state.num_body_bytes == 0


async def _leave(conversation: Conversation) -> None:
    conversation.leave()


async def _cancel(conversation: Conversation) -> None:
    conversation.task.cancel()


async def _fail(conversation: Conversation) -> None:
    conversation.ends.set_exception(RuntimeError("a bug"))


async def _take_too_long(_: Conversation) -> None:
    pass


async def _send_too_much(conversation: Conversation) -> None:
    await conversation.send_body([b" " * 10**5])


@pytest.mark.parametrize("end", [_leave, _cancel, _take_too_long, _send_too_much])
async def test_incomplete_body_is_released_when_its_request_ends(
    end: Callable[[Conversation], Awaitable[None]],
) -> None:
    budget = make_budget(body_timeout=1.0 if end is _take_too_long else 600.0, max_body_bytes=len(BODY))
    conversation = Conversation(budget)
    await conversation.send_body(PIECES, is_whole=False)
    assert budget.budget.total == 400_000
    await end(conversation)
    await conversation.wait_until_ended()
    assert budget.budget.total == 0


async def test_a_pause_of_the_server_is_not_the_clients_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(make_budget(body_timeout=30.0))
    await conversation.send_body(PIECES, is_whole=False)
    pause(monkeypatch, 3600.0)
    await asyncio.sleep(0.05)
    await conversation.send_body([], is_whole=True)
    await conversation.wait_until_read()
    conversation.ends.set_result(None)
    await conversation.task
    assert conversation.status == 200


@pytest.mark.parametrize("end", [_cancel, _fail])
async def test_complete_body_is_released_when_its_request_ends(end: Callable[[Conversation], Awaitable[None]]) -> None:
    budget = make_budget()
    conversation = Conversation(budget)
    await conversation.send_body(PIECES)
    await conversation.wait_until_read()
    assert budget.budget.total == 400_000
    await end(conversation)
    await conversation.wait_until_ended()
    assert budget.budget.total == 0


async def test_application_has_a_body_budget() -> None:
    app = create_app(LLMEngine(ServeConfig(max_total_body_bytes=10**5)))
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(make_scope("POST", "/tokenize"), receive, send)
    assert sent[0]["status"] == 413 and b"max_total_body_bytes = 100000" in sent[1]["body"]


def make_request(budget: BodyBudget, tenant: str) -> Request:
    state = {"body_budget": budget, "num_body_bytes": 0, "caller": Caller(tenant)}
    return Request({**make_scope("POST", "/"), "state": state})


async def test_flooding_tenant_leaves_room_for_the_bodies_of_others() -> None:
    budget = make_budget()
    length = MAX_BYTES // 10 + UNCOUNTED_BODY_BYTES
    for _ in range(5):
        budget.reserve(make_request(budget, "flooding"), length)
    with pytest.raises(ServekitError) as refused:
        budget.reserve(make_request(budget, "flooding"), length)
    assert refused.value.status == 503 and refused.value.retry_after_s and "API key" in refused.value.message
    budget.reserve(make_request(budget, "modest"), length)
    budget.reserve(make_request(budget, "modest"), length)
    assert budget.budget.total == 7 * MAX_BYTES // 10


async def test_body_without_room_is_refused_before_it_is_sent() -> None:
    budget = make_budget()
    budget.budget.take("", MAX_BYTES)
    conversation = Conversation(budget, ("content-length", str(len(BODY))))
    await asyncio.wait_for(conversation.task, 60)
    assert conversation.status == 503


async def test_declared_length_alone_takes_no_room() -> None:
    budget = make_budget()
    silent = Conversation(budget, ("content-length", str(len(BODY))))
    await asyncio.sleep(0.01)
    assert budget.budget.total == 0
    silent.task.cancel()
    await asyncio.gather(silent.task, return_exceptions=True)


async def test_result_is_released_when_the_answer_has_ended() -> None:
    released: list[bool] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["request_state"] = SimpleNamespace(release_result=lambda: released.append(True))
        assert not released
        raise ValueError

    with pytest.raises(ValueError):
        await BodyBudget(app, MAX_BYTES)(make_scope("POST", "/"), asyncio.Queue().get, asyncio.Queue().put)
    assert released == [True]


@pytest.mark.parametrize(("tenant", "most"), [("", MAX_BYTES), ("a", MAX_BYTES // 2)])
async def test_a_body_that_can_never_be_admitted_is_too_large(tenant: str, most: int) -> None:
    """It would be refused later, too, so the status is not 503."""
    budget = make_budget()
    budget.budget.take("other", MAX_BYTES // 4)
    with pytest.raises(RequestTooLarge, match=f"may have {most + UNCOUNTED_BODY_BYTES} bytes .*max_total_body_bytes"):
        budget.check(make_request(budget, tenant), most + UNCOUNTED_BODY_BYTES + 1)
    with pytest.raises(QueueFull):
        budget.check(make_request(budget, tenant), most + UNCOUNTED_BODY_BYTES)
