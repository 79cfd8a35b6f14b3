"""Retries stay a part of the requests."""

from __future__ import annotations

import random

import pytest

from servekit.remote.retry_budget import MAX_SAVED, RetryBudget


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.2, 1.0])
def test_retries_are_at_most_a_part_of_the_requests_and_what_was_saved(ratio: float) -> None:
    budget, random_ = RetryBudget(ratio), random.Random(1)
    num_requests = num_retries = 0
    for _ in range(5000):
        if random_.random() < 0.3:
            budget.request_began()
            num_requests += 1
        num_retries += budget.take()
        assert num_retries <= ratio * num_requests + MAX_SAVED + 1e-6
    assert num_retries >= ratio * num_requests - 1


def test_there_are_no_retries_without_a_ratio() -> None:
    budget = RetryBudget(0.0)
    budget.request_began()
    assert not budget.take()
