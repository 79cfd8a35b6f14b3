"""Claims about limits: what is refused, until when, and that nothing is counted twice."""

from __future__ import annotations

import random

import pytest

from servekit.errors import RateLimited
from servekit.rate_limits import Allowance, Limits


def retry_after_s(allowance: Allowance, now: float) -> int:
    with pytest.raises(RateLimited) as refused:
        allowance.enter(now)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def test_without_limits_everything_is_let_in() -> None:
    allowance = Allowance(Limits(), now=0.0)
    for _ in range(1000):
        allowance.enter(0.0)
    assert allowance.num_running == 1000
    allowance.leave(10**9, 0.0)
    allowance.enter(0.0)


def test_a_minutes_requests_may_come_at_once_and_then_they_come_evenly() -> None:
    allowance = Allowance(Limits(requests_per_minute=6), now=100.0)
    for _ in range(6):
        allowance.enter(100.0)
    assert retry_after_s(allowance, 100.0) == 10
    assert retry_after_s(allowance, 102.5) == 8, "7.5 in whole seconds"
    assert retry_after_s(allowance, 109.9) == 1
    allowance.enter(110.0)
    assert retry_after_s(allowance, 110.0) == 10


def test_the_account_never_holds_more_than_a_minutes_worth() -> None:
    allowance = Allowance(Limits(requests_per_minute=2), now=0.0)
    allowance.enter(1e6)
    allowance.enter(1e6)
    assert retry_after_s(allowance, 1e6) == 30


def test_tokens_are_paid_when_a_request_ends_and_a_debt_must_be_worked_off() -> None:
    allowance = Allowance(Limits(tokens_per_minute=60), now=0.0)
    allowance.enter(0.0)
    allowance.enter(0.0)
    allowance.leave(60, 0.0)
    allowance.enter(0.0)
    allowance.leave(90, 0.0)
    assert retry_after_s(allowance, 0.0) == 90
    assert retry_after_s(allowance, 89.0) == 1
    allowance.enter(90.0)


def test_concurrent_requests_are_counted_until_they_end() -> None:
    allowance = Allowance(Limits(max_concurrent_requests=2), now=0.0)
    allowance.enter(0.0)
    allowance.enter(0.0)
    assert retry_after_s(allowance, 0.0) == 1
    allowance.leave(0, 0.0)
    allowance.enter(0.0)
    allowance.leave(0, 0.0)
    allowance.leave(0, 0.0)
    with pytest.raises(AssertionError):
        allowance.leave(0, 0.0)


def test_who_is_refused_pays_nothing_and_is_told_of_the_longest_wait() -> None:
    limits = Limits(max_concurrent_requests=1, requests_per_minute=2, tokens_per_minute=60)
    allowance = Allowance(limits, now=0.0)
    allowance.enter(0.0)
    for _ in range(50):
        assert retry_after_s(allowance, 0.0) == 1
    allowance.leave(60 + 40, 0.0)
    assert retry_after_s(allowance, 0.0) == 40, "of tokens; for the requests there is room"
    allowance.enter(40.0)


def test_whoever_waits_as_long_as_told_is_let_in() -> None:
    rng = random.Random(5)
    for _ in range(300):
        limits = Limits(requests_per_minute=rng.randint(1, 700), tokens_per_minute=rng.randint(1, 10**6))
        now = rng.uniform(0, 1e6)
        allowance = Allowance(limits, now)
        for _ in range(20):
            try:
                allowance.enter(now)
            except RateLimited as refused:
                now += refused.retry_after_s or 0
                allowance.enter(now)
            allowance.leave(rng.randint(0, 10**6), now)
            now += rng.expovariate(10)


def test_in_any_span_no_more_is_let_in_than_a_minutes_worth_and_what_flows_in_meanwhile() -> None:
    rng = random.Random(6)
    allowance, now, entered = Allowance(Limits(requests_per_minute=30), now=0.0), 0.0, []
    for _ in range(5000):
        now += rng.expovariate(5)
        try:
            allowance.enter(now)
        except RateLimited:
            continue
        entered.append(now)
        allowance.leave(0, now)
    for first in range(0, len(entered), 7):
        for last in range(first, len(entered)):
            assert last - first + 1 <= 30 + 0.5 * (entered[last] - entered[first]) + 1e-3
