"""Claims about what grammars may cost."""

from __future__ import annotations

from workers.grammar.budgets import BURST_S, HALF_LIFE_S, TOKEN_S, GroupBudget, TenantUsage


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
