"""Test statistics against definitions written out, published figures, and resampling by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from loadtest.analysis.statistics import (
    Floats,
    batch_medians,
    bootstrap_percentiles,
    bootstrap_rates,
    central_interval,
    correlation_length,
    distribution,
    open_count,
    percentile_with_losses,
    trend,
    widening,
    wilson_interval,
)


def type_7(values: list[float], percent: float) -> float:
    """Hyndman and Fan's definition, as it is written there."""
    ordered = sorted(values)
    rank = percent / 100.0 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    if ordered[low] == ordered[high]:
        return ordered[low]
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low]) if rank > low else ordered[low]


def test_a_distribution_is_of_raw_values_by_the_written_definition() -> None:
    values = [random.Random(1).lognormvariate(0, 1) for _ in range(997)]
    found = distribution(np.array([*values, math.nan, math.nan]))
    assert found is not None
    assert (found.num, found.min, found.max) == (997, min(values), max(values))
    assert found.mean == pytest.approx(sum(values) / 997)
    reported = (found.p50, found.p90, found.p95, found.p99, found.p999)
    assert reported == pytest.approx([type_7(values, percent) for percent in (50, 90, 95, 99, 99.9)])
    assert distribution(np.array([math.nan])) is None


@pytest.mark.parametrize("num_lost", [0, 1, 2, 10, 50])
def test_lost_requests_count_as_infinite(num_lost: int) -> None:
    values = [float(each) for each in range(1, 100)]
    for percent in (0.0, 50.0, 90.0, 97.0, 98.0, 99.0, 99.9, 100.0):
        truth = type_7([*values, *([math.inf] * num_lost)], percent)
        assert percentile_with_losses(np.array(values), num_lost, percent) == pytest.approx(truth)


def test_percentiles_of_nothing_and_of_losses_only() -> None:
    assert math.isnan(percentile_with_losses(np.zeros(0), 0, 50.0))
    assert percentile_with_losses(np.zeros(0), 3, 50.0) == math.inf
    assert percentile_with_losses(np.array([7.0]), 0, 99.0) == 7.0


@pytest.mark.parametrize(
    ("num_successes", "num", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_wilson_interval_matches_published_values(num_successes: int, num: int, low: float, high: float) -> None:
    assert wilson_interval(num_successes, num) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson_interval(num - num_successes, num)
    assert mirrored == pytest.approx((1.0 - high, 1.0 - low), abs=5e-5)


def test_the_wilson_interval_without_trials_is_0_to_1() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


# -- the bootstrap ----------------------------------------------------------------------------------------------------


def singly(values: Floats) -> list[Floats]:
    """Blocks of one."""
    return np.array_split(values, len(values))


@pytest.mark.parametrize("percent", [50.0, 99.0])
def test_a_resampled_percentile_is_that_of_blocks_drawn_by_hand(percent: float) -> None:
    generator = np.random.default_rng(2)
    blocks = [generator.lognormal(shift, size=30) for shift in np.linspace(0.0, 1.0, 12)]
    size = 11 * 30
    drawn = generator.integers(0, 12, (5000, 11))
    by_hand = np.sort(np.stack(blocks)[drawn].reshape(5000, size), axis=1)[:, math.ceil(percent / 100.0 * size) - 1]
    resampled = bootstrap_percentiles([blocks], percent, 5000, generator)
    for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
        # Where the resampled percentile is, as a share of the sample: values themselves come in jumps.
        at = float(np.quantile(by_hand, quantile, method="nearest"))
        assert float((resampled <= at).mean()) == pytest.approx(float((by_hand <= at).mean()), abs=0.03)


def test_the_interval_of_a_median_holds_it_as_often_as_promised() -> None:
    generator = np.random.default_rng(3)
    num_held = 0
    for _ in range(200):
        values = generator.exponential(size=100)
        low, high = central_interval(bootstrap_percentiles([singly(values)], 50.0, 300, generator))
        num_held += low <= math.log(2.0) <= high
    assert wilson_interval(num_held, 200, 0.999)[0] <= 0.95 <= wilson_interval(num_held, 200, 0.999)[1]


def test_the_interval_includes_differences_between_runs() -> None:
    generator = np.random.default_rng(4)
    runs = [np.array_split(centre + 0.01 * generator.standard_normal(1000), 50) for centre in (1.0, 2.0, 3.0)]
    low, high = central_interval(bootstrap_percentiles(runs, 50.0, 2000, generator))
    assert low == pytest.approx(1.0, abs=0.1) and high == pytest.approx(3.0, abs=0.1)
    mixed = np.array_split(generator.permutation(np.concatenate([block for run in runs for block in run])), 50)
    low, high = central_interval(bootstrap_percentiles([mixed], 50.0, 2000, generator))
    assert low == pytest.approx(2.0, abs=0.1) and high == pytest.approx(2.0, abs=0.1)


def test_runs_without_values_are_left_out() -> None:
    resampled = bootstrap_percentiles([[], singly(np.ones(10))], 50.0, 200, np.random.default_rng(5))
    assert 0 < len(resampled) < 200 and (resampled == 1.0).all()


def test_of_many_values_the_percentile_is_right_to_a_few_ranks() -> None:
    values = np.random.default_rng(6).permutation(100_000).astype(np.float64)
    resampled = bootstrap_percentiles([np.array_split(values, 50)], 99.0, 200, np.random.default_rng(7))
    assert np.median(resampled) == pytest.approx(99_000, abs=50)
    assert resampled.std() == pytest.approx(math.sqrt(100_000 * 0.99 * 0.01), rel=0.3)
    assert (
        bootstrap_percentiles([np.array_split(values, 1)], 100.0, 5, np.random.default_rng(8)).tolist() == [99_999] * 5
    )


def test_correlation_lengths_are_those_of_the_textbook() -> None:
    generator = np.random.default_rng(9)
    # Of a first-order autoregression, (1 + c) / (1 - c).
    for correlation in (0.0, 0.5, 0.9):
        found = [correlation_length(autoregressive(generator, correlation, 10_000)) for _ in range(3)]
        assert np.mean(found) == pytest.approx((1.0 + correlation) / (1.0 - correlation), rel=0.2)
    assert correlation_length(np.arange(100.0)) > 10.0, "a trend is a few pieces, however many points it has"
    assert correlation_length(np.ones(100)) == correlation_length(np.zeros(0)) == 1.0


def test_few_pieces_widen_an_interval_as_student_has_it() -> None:
    # Student's 97.5 % quantiles for 4, 9, 19 and 1000 degrees of freedom, as printed in tables.
    for num, quantile in ((5, 2.776), (10, 2.262), (20, 2.093), (1001, 1.962)):
        assert widening(num) * 1.95996 == pytest.approx(quantile, rel=0.02)


def test_a_resampled_rate_varies_as_the_mean_of_its_blocks() -> None:
    generator = np.random.default_rng(6)
    blocks = generator.poisson(100.0, 20).astype(np.float64)
    rates = bootstrap_rates([blocks], [2.0], 20_000, generator)
    assert rates.mean() == pytest.approx(blocks.mean() / 2.0, rel=0.005)
    assert rates.std() == pytest.approx(blocks.std() / math.sqrt(20) / 2.0, rel=0.05)
    # Of two runs with the same amount, the one that took twice as long counts for twice the time.
    both = bootstrap_rates([np.full(20, 10.0), np.full(20, 10.0)], [1.0, 2.0], 2000, generator)
    assert set(np.round(both, 6)) == {10.0, 5.0, round(20.0 / 3.0, 6)}


# -- trends -----------------------------------------------------------------------------------------------------------


def test_a_line_has_its_slope() -> None:
    x = np.arange(50.0)
    assert trend(x, 3.0 * x + 1.0).slope == pytest.approx(3.0) and trend(x, 3.0 * x + 1.0).is_rising
    falling = trend(x, -x + np.random.default_rng(7).normal(size=50))
    assert falling.is_significant and not falling.is_rising
    assert trend(x, np.full(50, 0.1)).t == 0.0
    assert trend(x[:3], x[:3]).t == 0.0, "three points are no trend"


def test_t_is_the_textbooks_where_there_is_no_correlation() -> None:
    # Residuals alternate, so their correlation is negative and nothing is corrected: slope / (s / sqrt(Sxx)).
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    y = np.array([2.1, 3.9, 6.2, 7.8, 10.1, 11.9])
    slope = 34.6 / 17.5  # sum of (x - 3.5)(y - 7), over that of (x - 3.5)^2
    residuals = y - 7.0 - slope * (x - 3.5)
    error = math.sqrt(float((residuals**2).sum()) / 4 / 17.5)
    assert trend(x, y).slope == pytest.approx(slope)
    assert trend(x, y).t == pytest.approx(slope / error)


def autoregressive(generator: np.random.Generator, correlation: float, num: int) -> Floats:
    values = [0.0]
    for shock in generator.normal(size=num - 1):
        values.append(correlation * values[-1] + shock)
    return np.array(values)


def test_autocorrelation_is_not_taken_for_a_trend() -> None:
    generator = np.random.default_rng(8)
    x = np.arange(60.0)
    series = [autoregressive(generator, 0.8, 60) for _ in range(200)]
    assert sum(trend(x, y).is_significant for y in series) <= 20
    slopes = [np.polyfit(x, y, 1) for y in series]
    errors = [
        math.sqrt(float(((y - np.polyval(line, x)) ** 2).sum()) / 58 / float(((x - x.mean()) ** 2).sum()))
        for line, y in zip(slopes, series, strict=True)
    ]
    naive = sum(abs(line[0]) / error > 3.0 for line, error in zip(slopes, errors, strict=True))
    assert naive > 50, "the usual t takes it for one"


def test_medians_of_batches_are_in_order_and_of_all_points() -> None:
    x, y = batch_medians(np.array([3.0, 1.0, 2.0, 4.0]), np.array([30.0, 10.0, 20.0, 40.0]), 2)
    assert x.tolist() == [1.5, 3.5] and y.tolist() == [15.0, 35.0]
    assert len(batch_medians(np.arange(1000.0), np.arange(1000.0))[0]) == 20
    assert len(batch_medians(np.zeros(0), np.zeros(0))[0]) == 0


# -- how many are open ------------------------------------------------------------------------------------------------


def test_open_intervals_are_counted_as_by_hand() -> None:
    chooser = random.Random(9)
    begins = [chooser.randrange(100) / 4 for _ in range(60)]
    ends = [begin + chooser.randrange(40) / 4 for begin in begins]
    count = open_count(np.array(begins), np.array(ends))

    def by_hand(moment: float) -> int:
        return sum(begin <= moment < end for begin, end in zip(begins, ends, strict=True))

    moments = [step / 8 for step in range(-8, 300)]
    assert count.at(np.array(moments)).tolist() == [by_hand(moment) for moment in moments]
    assert count.before(np.array(moments)).tolist() == [by_hand(moment - 1e-9) for moment in moments]
    assert count.highest(-1.0, 100.0) == max(by_hand(moment) for moment in moments)
    # Everything happens at quarters of a second, so a mean of the middles of eighths is exact.
    middles = [10.0 + (step + 0.5) / 8 for step in range(40)]
    assert count.mean(10.0, 15.0) == pytest.approx(sum(by_hand(moment) for moment in middles) / 40)


def test_a_handover_never_counts_as_two_open() -> None:
    starts = np.arange(100.0)
    count = open_count(starts, starts + 1.0)
    assert count.highest(0.0, 100.0) == 1
    assert count.mean(0.0, 100.0) == 1.0


def test_of_no_intervals_none_is_open() -> None:
    count = open_count(np.zeros(0), np.zeros(0))
    assert count.mean(0.0, 1.0) == 0.0 and count.highest(0.0, 1.0) == 0
    assert count.mean(1.0, 1.0) == 0.0
