"""One tenant's failures stop its own requests only, and the state of the server is still shown."""

from __future__ import annotations

import pytest

from servekit.remote.circuit_breaker import Outcome, State
from servekit.remote.tenant_breakers import TenantBreakers


@pytest.fixture
def breakers() -> TenantBreakers:
    return TenantBreakers(failures_to_open=2, cooldown_s=5.0, retry_ratio=0.2)


def ended(breakers: TenantBreakers, tenant: str, outcome: Outcome, now_s: float = 0.0) -> bool:
    permit = breakers.of(tenant).begin(now_s)
    assert permit is not None
    return breakers.end(tenant, permit, outcome, now_s)


def test_failures_at_the_requests_of_one_tenant_stop_only_these(breakers: TenantBreakers) -> None:
    assert [ended(breakers, "a", Outcome.FAILED) for _ in range(2)] == [False, True]
    assert breakers.of("a").begin(1.0) is None and breakers.of("b").begin(1.0) is not None


def test_an_open_breaker_is_shown_until_any_tenant_gets_an_answer(breakers: TenantBreakers) -> None:
    assert breakers.shown.state is State.CLOSED
    for _ in range(2):
        ended(breakers, "a", Outcome.FAILED)
    assert breakers.shown.state is State.OPEN
    ended(breakers, "b", Outcome.FAILED, 1.0)
    assert breakers.shown.state is State.OPEN, "b has no answer yet, so the server may be down"
    ended(breakers, "b", Outcome.ANSWERED, 1.0)
    assert breakers.shown.state is State.CLOSED and breakers.of("a").state is State.OPEN


def test_an_open_breaker_stays_shown_when_an_old_request_of_its_tenant_is_answered(breakers: TenantBreakers) -> None:
    old = breakers.of("a").begin(0.0)
    assert old is not None
    for _ in range(2):
        ended(breakers, "a", Outcome.FAILED)
    assert not breakers.end("a", old, Outcome.ANSWERED, 1.0)
    assert breakers.shown.state is State.OPEN


def test_one_tenant_does_not_use_up_the_retries_of_another(breakers: TenantBreakers) -> None:
    while breakers.retries("a").take():
        pass
    assert breakers.retries("b").take() and not breakers.retries("a").take()
