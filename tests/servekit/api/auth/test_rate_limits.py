"""Rate limits: what is refused, for how long, and that nothing is counted twice."""

from __future__ import annotations

import random

import pytest

from servekit.api.auth.rate_limits import Allowance, Limits
from servekit.errors import RateLimited


def retry_after_s(allowance: Allowance, now: float) -> int:
    with pytest.raises(RateLimited) as refused:
        allowance.enter(now)
    assert refused.value.retry_after_s is not None
    return refused.value.retry_after_s


def test_without_limits_every_request_is_admitted() -> None:
    allowance = Allowance(Limits(), now=0.0)
    for _ in range(1000):
        allowance.enter(0.0)
    assert allowance.num_running == 1000
    allowance.leave(10**9, 0.0)
    allowance.enter(0.0)


def test_one_minutes_requests_may_come_at_once_and_then_evenly() -> None:
    allowance = Allowance(Limits(requests_per_minute=6), now=100.0)
    for _ in range(6):
        allowance.enter(100.0)
    assert retry_after_s(allowance, 100.0) == 10
    assert retry_after_s(allowance, 102.5) == 8, "7.5 in whole seconds"
    assert retry_after_s(allowance, 109.9) == 1
    allowance.enter(110.0)
    assert retry_after_s(allowance, 110.0) == 10


def test_balance_never_exceeds_one_minutes_worth() -> None:
    allowance = Allowance(Limits(requests_per_minute=2), now=0.0)
    allowance.enter(1e6)
    allowance.enter(1e6)
    assert retry_after_s(allowance, 1e6) == 30


def test_tokens_are_charged_at_the_end_and_a_negative_balance_blocks_requests() -> None:
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


def test_refused_request_costs_nothing_and_gets_the_longest_wait() -> None:
    limits = Limits(max_concurrent_requests=1, requests_per_minute=2, tokens_per_minute=60)
    allowance = Allowance(limits, now=0.0)
    allowance.enter(0.0)
    for _ in range(50):
        assert retry_after_s(allowance, 0.0) == 1
    allowance.leave(60 + 40, 0.0)
    assert retry_after_s(allowance, 0.0) == 40, "of tokens; for the requests there is room"
    allowance.enter(40.0)


def test_request_after_retry_after_is_admitted() -> None:
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


def test_rate_limit_never_exceeds_burst_plus_refill() -> None:
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
