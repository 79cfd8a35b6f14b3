"""Claims about what devices and tokens cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.observability.cost import MARK_INTERVAL_S, WINDOW_S, CostMeter


def test_devices_cost_their_price_for_the_time_in_which_they_are_used() -> None:
    meter = CostMeter(2.0)
    assert meter.read(100.0, 4, 0).total == 0.0, "it begins with the first reading"
    assert meter.read(100.0 + 1800, 4, 0).total == pytest.approx(4.0)
    cost = meter.read(100.0 + 3600, 1, 0)  # three devices were lost
    assert (cost.total, cost.per_hour) == (pytest.approx(5.0), 2.0)


def test_a_million_tokens_cost_what_the_devices_cost_divided_by_the_tokens() -> None:
    meter = CostMeter(3.6)
    assert meter.read(0.0, 2, 500).per_million_tokens is None, "there were no tokens since the first reading"
    # 2 devices for 10 s cost 0.02; 4,000 tokens.
    assert meter.read(10.0, 2, 4500).per_million_tokens == pytest.approx(0.02 / 4000 * 1e6)


def test_the_price_of_tokens_is_that_of_the_last_hour() -> None:
    meter = CostMeter(1.0)
    tokens = 0
    for minute in range(180):
        tokens += 1000 if minute < 60 else 10  # a busy hour, and two quiet ones
        cost = meter.read(minute * 60.0, 1, tokens)
    assert cost.per_million_tokens == pytest.approx(1.0 / 600 * 1e6, rel=0.02)
    assert cost.total == pytest.approx(179 / 60)


@given(st.lists(st.tuples(st.floats(0, 10_000), st.integers(0, 64), st.integers(0, 10**9)), min_size=1, max_size=200))
def test_the_cost_never_falls_and_memory_is_bounded(readings: list[tuple[float, int, int]]) -> None:
    meter, now_s, tokens, before = CostMeter(2.5), 0.0, 0, 0.0
    for wait_s, num_devices, more in readings:
        now_s, tokens = now_s + wait_s, tokens + more
        cost = meter.read(now_s, num_devices, tokens)
        assert cost.total >= before and (cost.per_million_tokens or 0.0) >= 0.0
        before = cost.total
        assert len(meter._marks) <= WINDOW_S / MARK_INTERVAL_S + 2
