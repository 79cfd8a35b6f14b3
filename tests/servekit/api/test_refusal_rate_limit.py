"""Refusals have a rate limit for each tenant, so that a client that never waits cannot occupy the event loop."""

from __future__ import annotations

from servekit.api.refusal_rate_limit import BURST, MAX_DELAY_S, REFUSALS_PER_S, RefusalRateLimit


def test_the_first_refusals_of_a_tenant_are_immediate() -> None:
    rate_limit = RefusalRateLimit()
    assert [rate_limit.delay_s("a", 1000.0) for _ in range(BURST)] == [0.0] * BURST
    assert rate_limit.delay_s("a", 1000.0) == 0.0 and rate_limit.delay_s("a", 1000.0) > 0.0


def test_a_flooding_tenant_is_refused_at_the_pace_and_another_one_at_once() -> None:
    rate_limit, now_s, num_refused = RefusalRateLimit(), 1000.0, 0
    due_s = [now_s + rate_limit.delay_s("flooding", now_s) for _ in range(200)]  # clients that send again when refused
    while now_s < 1010.0:
        now_s = min(due_s)
        due_s.remove(now_s)
        due_s.append(now_s + rate_limit.delay_s("flooding", now_s))
        num_refused += 1
    assert num_refused <= 10 * REFUSALS_PER_S + 200 + BURST
    assert rate_limit.delay_s("modest", now_s) == 0.0


def test_no_refusal_waits_longer_than_the_limit() -> None:
    rate_limit = RefusalRateLimit()
    assert max(rate_limit.delay_s("a", 1000.0) for _ in range(10_000)) <= MAX_DELAY_S
