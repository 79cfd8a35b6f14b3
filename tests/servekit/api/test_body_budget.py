"""The memory of answers to predictions is counted with that of bodies, until the request ends."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from servekit.api.body_budget import UNCOUNTED_BODY_BYTES, BodyBudget
from servekit.engine.caller import Caller
from servekit.errors import InvalidRequest, QueueFull
from tests.support.asgi import make_scope

MAX_BYTES = 10**6


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError


def request_of(budget: BodyBudget, tenant: str) -> Request:
    state = {"body_budget": budget, "num_body_bytes": 0, "caller": Caller(tenant)}
    return Request({**make_scope("POST", "/"), "state": state})


def test_answers_are_refused_when_bodies_and_answers_together_are_over_the_limit() -> None:
    budget = BodyBudget(nothing, MAX_BYTES)
    budget.reserve(request_of(budget, ""), MAX_BYTES // 2 + UNCOUNTED_BODY_BYTES)
    budget.hold_answer(request_of(budget, ""), MAX_BYTES // 2 + UNCOUNTED_BODY_BYTES)
    assert budget.budget.total == MAX_BYTES
    with pytest.raises(QueueFull, match="max_total_body_bytes") as refused:
        budget.hold_answer(request_of(budget, ""), UNCOUNTED_BODY_BYTES + 1)
    assert refused.value.retry_after_s
    with pytest.raises(QueueFull):
        budget.reserve(request_of(budget, ""), UNCOUNTED_BODY_BYTES + 1)
    budget.hold_answer(request_of(budget, ""), UNCOUNTED_BODY_BYTES)
    assert budget.budget.total == MAX_BYTES, "a small answer is not counted"


def test_a_tenant_leaves_room_for_the_answers_of_others() -> None:
    budget = BodyBudget(nothing, MAX_BYTES)
    length = MAX_BYTES // 10 + UNCOUNTED_BODY_BYTES
    for _ in range(5):
        budget.hold_answer(request_of(budget, "greedy"), length)
    with pytest.raises(QueueFull, match="API key"):
        budget.hold_answer(request_of(budget, "greedy"), length)
    budget.hold_answer(request_of(budget, "modest"), length)


@pytest.mark.parametrize(("tenant", "most"), [("", MAX_BYTES), ("a", MAX_BYTES // 2)])
def test_an_answer_that_can_never_be_admitted_is_the_clients_mistake(tenant: str, most: int) -> None:
    budget = BodyBudget(nothing, MAX_BYTES)
    request = request_of(budget, tenant)
    budget.reserve(request, 1000 + UNCOUNTED_BODY_BYTES)
    with pytest.raises(InvalidRequest, match=f"may take {most} .*max_total_body_bytes"):
        budget.hold_answer(request, most - 999 + UNCOUNTED_BODY_BYTES)
    budget.hold_answer(request, most - 1000 + UNCOUNTED_BODY_BYTES)
    assert budget.budget.total == request.state.num_body_bytes == most


async def test_the_answer_is_released_when_the_request_ends_however_it_does() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        budget.hold_answer(Request(scope), 10**5)
        assert budget.budget.total == 10**5 - UNCOUNTED_BODY_BYTES
        raise ValueError

    budget = BodyBudget(app, MAX_BYTES)
    with pytest.raises(ValueError):
        await budget(make_scope("POST", "/"), None, None)  # type: ignore[arg-type]
    assert budget.budget.total == 0
