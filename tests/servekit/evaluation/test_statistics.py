"""Claims about the statistics: they give published values, and values that follow from a definition by hand."""

from __future__ import annotations

import random
from math import sqrt
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.evaluation.statistics import (
    MIN_BLOCKS,
    _student_quantile,
    holm_p_values,
    mcnemar_p_value,
    mean_interval,
    share_difference,
    share_interval,
)


@pytest.mark.parametrize(
    ("num_right", "num", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_that_of_newcombes_table(num_right: int, num: int, low: float, high: float) -> None:
    """Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I."""
    interval = share_interval(num_right, num)
    assert interval.estimate == num_right / num
    assert (interval.low, interval.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize(
    ("only_first", "only_second", "p_value"),
    # Two-sided binomial tests, summed by hand: 2 * (1 + 12 + 66) / 2**12, and so on.
    [(10, 2, 158 / 4096), (2, 10, 158 / 4096), (5, 0, 2 / 32), (6, 0, 2 / 64), (0, 0, 1.0), (3, 3, 1.0)],
)
def test_mcnemars_test_is_the_exact_binomial(only_first: int, only_second: int, p_value: float) -> None:
    assert mcnemar_p_value(only_first, only_second) == pytest.approx(p_value)


def test_mcnemars_test_also_takes_thousands_of_questions() -> None:
    # Far from the edges the binomial is normal: z = (|b - c| - 1) / sqrt(b + c).
    z = (10_200 - 9_800 - 1) / sqrt(20_000)
    assert mcnemar_p_value(10_200, 9_800) == pytest.approx(2 * (1 - NormalDist().cdf(z)), rel=1e-3)


def test_the_interval_of_a_paired_difference_is_agrestis_and_mins() -> None:
    """Their example, the approval of a prime minister: 150 and 86 of 1,600 changed their mind."""
    interval = share_difference(150, 86, 1600)
    assert interval.estimate == 64 / 1600
    half_width = 1.959964 * sqrt(237 - 64**2 / 1602) / 1602
    assert interval.low == pytest.approx(64 / 1602 - half_width, abs=1e-7)
    assert interval.high == pytest.approx(64 / 1602 + half_width, abs=1e-7)


def test_the_interval_of_a_paired_difference_contains_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    num_contained = 0
    for _ in range(2_000):
        draws = rng.choices((1, -1, 0), weights=(0.06, 0.10, 0.84), k=150)
        interval = share_difference(draws.count(1), draws.count(-1), 150)
        num_contained += interval.low <= -0.04 <= interval.high
    assert 0.93 <= num_contained / 2_000 <= 0.98


@given(st.integers(1, 500), st.data())
def test_swapping_the_servers_changes_the_sign_only(num: int, data: st.DataObject) -> None:
    one = data.draw(st.integers(0, num))
    other = data.draw(st.integers(0, num - one))
    forward, backward = share_difference(one, other, num), share_difference(other, one, num)
    assert (forward.low, forward.high) == (pytest.approx(-backward.high), pytest.approx(-backward.low))
    assert mcnemar_p_value(one, other) == mcnemar_p_value(other, one)


def test_holms_p_values_are_those_of_the_definition() -> None:
    assert holm_p_values([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_p_values([0.5, 0.9]) == [1.0, 1.0]
    assert holm_p_values([]) == []


@pytest.mark.parametrize(("freedom", "quantile"), [(15, 2.1314), (30, 2.0423), (100, 1.9840)])
def test_students_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert _student_quantile(freedom) == pytest.approx(quantile, rel=1e-3)


def test_the_interval_of_a_mean_is_students_if_each_block_has_one_value() -> None:
    values = [float(number) for number in range(MIN_BLOCKS)]  # 0 to 15: mean 7.5, variance 16 * 17 / 12
    interval = mean_interval(values)
    half_width = 2.1314 * sqrt(16 * 17 / 12) / sqrt(16)
    assert interval.estimate == 7.5
    assert interval.high - 7.5 == pytest.approx(half_width, rel=1e-3) == 7.5 - interval.low


def test_the_interval_of_correlated_values_contains_the_truth_about_as_often_as_it_says() -> None:
    rng = random.Random(0)
    num_contained = 0
    for _ in range(300):
        value, values = 0.0, []
        for _ in range(2_000):
            value = 0.7 * value + rng.gauss(0.0, 1.0)  # an interval that took them as independent would hold in 59 %
            values.append(value)
        interval = mean_interval(values)
        num_contained += interval.low <= 0.0 <= interval.high
    assert num_contained / 300 >= 0.89
