"""What tenants may hold of an amount that they share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.shared_budget import SharedBudget


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


def test_a_tenant_with_nothing_gets_the_last_unit() -> None:
    budget = SharedBudget(4)
    assert [fill(budget, tenant) for tenant in ("a", "b", "c", "d")] == [2, 1, 1, 0]


@given(
    limit=st.integers(1, 40),
    events=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-9, 9)), max_size=60),
)
def test_it_is_never_overdrawn_and_a_single_unit_is_never_withheld(limit: int, events: list[tuple[str, int]]) -> None:
    budget = SharedBudget(limit)
    for tenant, amount in events:
        if amount < 0:
            budget.release(tenant, min(-amount, budget.held(tenant)))
        elif budget.has_room(tenant, amount):
            budget.take(tenant, amount)
        else:
            assert (budget.held(tenant), amount) != (0, 1) or budget.total == limit
        assert sum(map(budget.held, "abc")) == budget.total <= limit


def test_usage_is_that_of_the_tenant_that_is_nearest_to_its_share() -> None:
    budget = SharedBudget(120)
    assert budget.usage({}, 0) == 0
    budget.take("a", 30)
    assert budget.usage({}, 0) == 0.5, "half of the 60 that it may hold"
    assert budget.usage({"a": 30}, 30) == 1 and not budget.has_room("a", 31)
    budget.take("b", 40)
    assert budget.usage({}, 0) == pytest.approx(40 / 45), "b may hold half of the 90 that a leaves"
    assert budget.usage({}, 100) == 1, "what belongs to no tenant fills it, too"
    assert SharedBudget(120, is_shared=False).usage({"a": 30}, 30) == 0.25


def test_what_is_counted_elsewhere_is_added() -> None:
    budget = SharedBudget(120)
    budget.take("a", 30)
    assert budget.num_missing("a", 10, held_elsewhere=20, total_elsewhere=20) == 0
    assert budget.num_missing("a", 11, held_elsewhere=20, total_elsewhere=20) == 2
    assert budget.num_missing("a", 1, total_elsewhere=90) == 1


def test_a_budget_that_is_not_shared_is_first_come_first_served() -> None:
    budget = SharedBudget(120, is_shared=False)
    assert (budget.max_share("a"), fill(budget, "a"), fill(budget, "b")) == (120, 120, 0)


def test_requests_without_a_tenant_share_all_of_it() -> None:
    budget = SharedBudget(120)
    assert fill(budget, "") == 120
    assert not budget.has_room("a", 1)
    budget.release("", 120)
    assert budget.total == 0 and fill(budget, "a") == 60


def test_an_error_gives_what_a_tenant_holds_if_others_have_a_share() -> None:
    budget = SharedBudget(120)
    budget.take("a", 30)
    assert budget.describe_share("a") == ", 30 of them for your API key, which may hold as many as it leaves free"
    assert budget.describe_share("") == SharedBudget(120, is_shared=False).describe_share("a") == ""
