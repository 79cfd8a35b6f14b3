"""What tenants may hold of an amount that they share."""

from __future__ import annotations

from servekit.engine.shared_budget import SharedBudget


def fill(budget: SharedBudget, tenant: str) -> int:
    taken = 0
    while budget.has_room(tenant, 1):
        budget.take(tenant, 1)
        taken += 1
    return taken


def test_each_tenant_may_hold_as_much_as_it_leaves_free() -> None:
    budget = SharedBudget(120)
    assert fill(budget, "a") == 60
    assert fill(budget, "b") == 30
    assert fill(budget, "c") == 15
    budget.release("a", 60)
    assert fill(budget, "b") == 22, "b holds 52, c 15, and 53 are free"


def test_requests_without_a_tenant_share_all_of_it() -> None:
    budget = SharedBudget(120)
    assert fill(budget, "") == 120
    assert not budget.has_room("a", 1)
    budget.release("", 120)
    assert budget.total == 0 and fill(budget, "a") == 60
