"""Tests of the time limits of steps and of the delays between starts."""

from __future__ import annotations

import pytest

from servekit.executor.step_timeout import MIN_S, StepTimeout, backoff_s, vacated_backoff_s


def test_limit_is_a_multiple_of_the_slowest_step_of_that_size() -> None:
    timeout = StepTimeout(max_s=300.0)
    assert timeout.limit_s(1) == 300.0, "nothing is known yet"
    for _ in range(4):
        timeout.observe(num_tokens=1, seconds=0.02)
    assert timeout.limit_s(1) == MIN_S
    assert timeout.limit_s(200) == pytest.approx(20 * 0.02 * 2**7), "scaled as if each token took as long"
    for _ in range(4):
        timeout.observe(num_tokens=200, seconds=0.9)
    assert timeout.limit_s(200) == pytest.approx(20 * 0.9), "now its own size is known"
    assert timeout.limit_s(100) == pytest.approx(20 * 0.02 * 2**6)
    assert timeout.limit_s(10**6) == 300.0


def test_a_slow_step_is_forgotten_after_many_fast_ones() -> None:
    timeout = StepTimeout(max_s=300.0)
    for _ in range(4):
        timeout.observe(num_tokens=8, seconds=5.0)
    assert timeout.limit_s(8) == pytest.approx(100.0)
    assert timeout.limit_s(1) == pytest.approx(100.0), "a smaller step takes no longer"
    for _ in range(300):
        timeout.observe(num_tokens=8, seconds=0.01)
    assert timeout.limit_s(8) == MIN_S


def test_failed_starts_are_retried_with_growing_delays() -> None:
    assert [backoff_s(losses) for losses in (1, 2, 3, 4, 7, 2000)] == [0.0, 1.0, 2.0, 4.0, 30.0, 30.0]
    assert [vacated_backoff_s(3.0, failures) for failures in (0, 1, 2, 3, 4, 2000)] == [3, 6, 12, 24, 30, 30]
