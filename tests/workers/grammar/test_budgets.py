"""Claims about what grammars may cost."""

from __future__ import annotations

from workers.grammar.budgets import (
    BURST_S,
    HALF_LIFE_S,
    SLOW_FOR_S,
    TOKEN_S,
    GroupBudget,
    Lateness,
    SlowTenants,
    TenantUsage,
)


def test_a_request_may_use_a_burst_and_a_little_for_each_token() -> None:
    budget = GroupBudget()
    budget.used_s = BURST_S
    assert not budget.refusal
    budget.used_s += 10 * TOKEN_S
    assert budget.refusal
    budget.num_tokens = 10
    assert not budget.refusal


def test_a_refusal_gives_value_limit_and_remedy() -> None:
    refusal = GroupBudget(used_s=3.21, num_tokens=7).refusal
    assert "3.21 s" in refusal and "7 tokens" in refusal and f"the limit is {BURST_S:g} s" in refusal
    assert "less ambiguous" in refusal


def test_usage_is_halved_each_half_life_and_then_forgotten() -> None:
    usage = TenantUsage()
    usage.charge("a", 0.4, 1.0)
    usage.charge("b", 0.1, 1.0)
    usage.charge("b", 0.0, 1.0 + HALF_LIFE_S)
    assert (usage.used_s("a"), usage.used_s("b"), usage.used_s("c")) == (0.2, 0.05, 0.0)
    for second in range(2, 100):
        usage.charge("c", 0.0, second * HALF_LIFE_S)
    assert len(usage._used_s) <= 1, "tenants that stopped are forgotten"


def test_a_slow_tenant_is_slow_for_a_time_and_then_forgotten() -> None:
    slow = SlowTenants()
    slow.add("a", 5.0)
    assert slow.is_slow("a", 5.0) and slow.is_slow("a", 4.9 + SLOW_FOR_S) and not slow.is_slow("b", 5.0)
    assert not slow.is_slow("a", 5.0 + SLOW_FOR_S)
    slow.add("b", 5.0 + SLOW_FOR_S)
    assert set(slow._slow_until_s) == {"b"}


def test_steps_wait_less_and_less_often_for_a_tenant_whose_masks_are_always_late() -> None:
    lateness = Lateness()
    waits = []
    for step in range(1000):
        if lateness.is_awaited("late"):
            waits.append(step)
            lateness.record("late", is_late=True)
        assert lateness.is_awaited("other")
        lateness.record("other", is_late=False)
    assert waits[:4] == [0, 2, 5, 10] and len(waits) < 40
    lateness.record("late", is_late=False)
    assert all(lateness.is_awaited("late") for _ in range(3)) and not lateness._skipping
