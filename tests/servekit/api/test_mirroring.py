"""Copies of requests for another model: which ones are sent, and which ones are dropped."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from servekit.api.mirroring import LOWEST_PRIORITY, MAX_COPIES, Copy, Mirroring
from servekit.engine.caller import Caller
from servekit.errors import ModelNotFound

COPY = Copy("new", "/v1/completions", b'{"model": "old", "prompt": "x"}')


class StandIn:
    """Stands for all models of a server, and for its application: both tell what was asked of them."""

    state = "ready"
    has_free_slots = True
    has_waiting = False
    waits_for_model = False
    engine: Any = SimpleNamespace(has_spare_connections=True)  # of the model

    def __init__(self) -> None:
        self.noted: Counter[str] = Counter()
        self.asked: list[tuple[str, Any, Caller]] = []
        self.may_answer = asyncio.Event()
        self.status = 200
        self.mirroring = Mirroring(self.answer, self, {})  # type: ignore[arg-type]  # what it asks of models

    def find(self, name: str, caller: Caller) -> StandIn:
        if caller.tenant == "stranger":
            raise ModelNotFound("")
        return self

    def note_mirrored(self, model_id: str, result: str) -> None:
        self.noted[result] += 1

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        if "mirrored" in state:
            return  # a client's request
        body = json.loads((await receive())["body"])
        self.asked.append((scope["path"], body, state["caller"]))
        assert state["may_not_wait"]
        if self.waits_for_model:
            state["waits_for_model"] = True
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"secret"})

    async def serve(self, tenant: str = "law", **state: Any) -> None:
        caller = Caller(tenant, "r1")
        scope = {"type": "http", "state": {"mirrored": COPY, "engine": 1, "caller": caller, **state}}

        async def never(*_: Any) -> Any:
            raise AssertionError("the client gets nothing of a copy")

        await self.mirroring(scope, never, never)
        await asyncio.sleep(0)


@pytest.fixture
def models() -> StandIn:
    return StandIn()


async def test_copy_names_the_other_model_and_has_the_lowest_priority(models: StandIn) -> None:
    models.may_answer.set()
    await models.serve()
    await asyncio.sleep(0.01)
    ((path, body, caller),) = models.asked
    assert path == COPY.path and body == {"model": "new", "prompt": "x"}
    assert caller == Caller("law", "r1", LOWEST_PRIORITY) and models.noted == {"answered": 1}


async def test_refused_copy_has_failed(models: StandIn) -> None:
    models.may_answer.set()
    models.status = 503
    await models.serve()
    await asyncio.sleep(0.01)
    assert models.noted == {"failed": 1}


async def test_copy_whose_model_was_closed_meanwhile_is_dropped(models: StandIn) -> None:
    models.may_answer.set()
    models.waits_for_model, models.status = True, 503
    await models.serve()
    await asyncio.sleep(0.01)
    assert models.noted == {"dropped": 1}


async def test_copy_that_cannot_be_made_has_failed(models: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    await models.serve(mirrored=Copy("new", "/v1/completions", b'["no object"]'))
    await asyncio.sleep(0.01)
    assert models.noted == {"failed": 1} and not models.asked
    assert "internal error in a mirrored request" in caplog.text


async def test_request_that_was_refused_is_not_copied(models: StandIn) -> None:
    await models.serve(error_code="rate_limited")
    scope = {"type": "http", "state": {"mirrored": COPY}}
    await models.mirroring(scope, None, None)  # type: ignore[arg-type]  # never called
    assert not models.asked and not models.noted


@pytest.mark.parametrize(
    "change",
    [
        {"has_free_slots": False},
        {"has_waiting": True},
        {"engine": None},
        {"engine": SimpleNamespace(has_spare_connections=False)},
        {"state": "draining"},
        {"state": "loading"},
    ],
)
async def test_copy_is_dropped_if_anything_waits_or_its_model_is_not_ready(
    models: StandIn, change: dict[str, Any]
) -> None:
    for name, value in change.items():
        setattr(models, name, value)
    await models.serve()
    assert not models.asked and models.noted == {"dropped": 1}


async def test_copy_is_dropped_if_the_tenant_may_not_use_its_model(models: StandIn) -> None:
    await models.serve("stranger")
    assert not models.asked and models.noted == {"dropped": 1}


async def test_copies_at_the_same_time_are_bounded_and_end_with_the_server(models: StandIn) -> None:
    for _ in range(MAX_COPIES + 3):
        await models.serve()
    assert len(models.asked) == MAX_COPIES and models.noted == {"dropped": 3}
    await models.mirroring.stop()
    assert models.noted == {"dropped": 3}
    await models.serve()
    assert len(models.asked) == MAX_COPIES + 1, "their places are free again"
    await models.mirroring.stop()
