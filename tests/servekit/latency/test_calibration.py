"""Claims about the bands of predictions."""

from __future__ import annotations

import random
from collections import deque
from math import exp

import pytest

from servekit.latency.calibration import BAND_SHARE, Band, Calibration


def coverage(
    calibration: Calibration,
    rng: random.Random,
    bias: float,
    deviation: float,
    *,
    number: int = 600,
    longest_s: float = 10.0,
    began_s: float = 0.0,
) -> float:
    """The share of outcomes in their bands, of durations with such errors, each of which is learned from.

    Each is predicted when the one before it has come.
    """
    num_inside, now_s = 0, began_s
    for _ in range(number):
        seconds = rng.uniform(0.01, longest_s)
        measured_s = seconds * rng.lognormvariate(bias, deviation)
        band = calibration.band(seconds, 0.1)
        num_inside += band.low_s <= measured_s <= band.high_s
        now_s += measured_s
        calibration.observe(seconds, 0.1, band, measured_s, now_s)
    return num_inside / number


@pytest.mark.parametrize(("bias", "deviation"), [(0.0, 0.1), (0.0, 0.5), (0.3, 0.05), (-0.2, 0.2)])
def test_eighty_percent_of_outcomes_are_in_the_band_whatever_the_errors(bias: float, deviation: float) -> None:
    assert coverage(Calibration(), random.Random(0), bias, deviation) == pytest.approx(BAND_SHARE, abs=0.04)


@pytest.mark.parametrize("errors", [(0.0, 0.4), (0.5, 0.1), (-0.5, 0.1), (0.0, 0.02)])
def test_bands_follow_errors_that_change(errors: tuple[float, float]) -> None:
    calibration, rng = Calibration(), random.Random(1)
    coverage(calibration, rng, 0.0, 0.1)
    assert coverage(calibration, rng, *errors, number=150, began_s=1e5) == pytest.approx(BAND_SHARE, abs=0.08)


def test_about_eighty_percent_are_in_the_band_even_if_errors_grow_all_the_time() -> None:
    calibration, rng = Calibration(), random.Random(2)
    shares = [
        coverage(calibration, rng, 0.0, 0.01 * 1.03**number, number=10, began_s=1e4 * number) for number in range(120)
    ]
    assert sum(shares) / len(shares) == pytest.approx(BAND_SHARE, abs=0.02)


def test_the_band_of_a_duration_is_learned_from_durations_like_it() -> None:
    calibration, rng = Calibration(), random.Random(3)
    num_inside = {0.1: 0, 5.0: 0}
    for number in range(600):
        seconds, deviation = ((0.1, 0.4), (5.0, 0.05))[number % 2]
        measured_s = seconds * rng.lognormvariate(0.0, deviation)
        band = calibration.band(seconds, 0.1)
        num_inside[seconds] += band.low_s <= measured_s <= band.high_s
        calibration.observe(seconds, 0.1, band, measured_s, 10.0 * number)
    short, long = calibration.band(0.1, 0.1), calibration.band(5.0, 0.1)
    assert short.high_s / short.low_s > 2.0 > 1.3 > long.high_s / long.low_s
    assert all(inside / 300 == pytest.approx(BAND_SHARE, abs=0.06) for inside in num_inside.values())


@pytest.mark.parametrize("num_waiting", [4, 20, 80])
def test_the_band_holds_in_an_overload_where_many_wait_for_the_same_answers_to_end(num_waiting: int) -> None:
    """Each waits for 2 s, and the errors change slowly: those that wait together have nearly the same one."""
    calibration, rng = Calibration(), random.Random(5)
    coverage(calibration, rng, 0.0, 0.1)
    kept = 0.5 ** (2.0 / num_waiting)  # part of the common error from one to the next: a quarter a whole wait later
    common, waiting, num_inside, number = 0.0, deque[tuple[float, Band, float]](), 0, 60 * num_waiting
    for at in range(number):
        at_s = 1e5 + 2.0 * at / num_waiting
        while waiting and waiting[0][0] <= at_s:
            done_s, band, measured_s = waiting.popleft()
            calibration.observe(2.0, 0.1, band, measured_s, done_s)
        common = kept * common + (1.0 - kept * kept) ** 0.5 * rng.gauss(0.0, 0.1)
        measured_s = 2.0 * exp(common + rng.gauss(0.0, 0.02))
        band = calibration.band(2.0, 0.1)
        num_inside += band.low_s <= measured_s <= band.high_s
        waiting.append((at_s + measured_s, band, measured_s))
    assert num_inside / number == pytest.approx(BAND_SHARE, abs=0.1)


def test_outcomes_of_an_overload_do_not_displace_all_others() -> None:
    """All scores of the overload count no more than the five times that it lasted as long as one wait."""
    calibration, rng = Calibration(), random.Random(6)
    coverage(calibration, rng, 0.0, 0.3)
    before = calibration.band(1.0, 0.1)
    for number in range(500):
        calibration.observe(1.0, 0.1, before, 1.0, 1e5 + number / 100)
    after = calibration.band(1.0, 0.1)
    assert after.high_s / after.low_s > 0.7 * before.high_s / before.low_s


def overload(calibration: Calibration, factors: list[float], began_s: float) -> float:
    """Tell outcomes of 1 s times these factors, of which about four are waited for together; return when the last came.

    Each one was within its band.
    """
    for factor in factors:
        began_s += 0.26 * factor
        calibration.observe(1.0, 0.1, Band(0.0, 1.0, 10.0), factor, began_s)
    return began_s


def test_outcomes_that_were_waited_for_together_make_older_ones_fade_as_one() -> None:
    calibration = Calibration()
    overload(calibration, [0.9] * 100, overload(calibration, [1.1] * 150, 0.0))
    assert calibration.band(1.0, 0.1).median_s == pytest.approx(1.1)  # faded by each of the hundred, it would be 0.9


def test_a_rare_error_in_an_overload_is_not_in_the_band() -> None:
    calibration = Calibration()
    overload(calibration, [0.9 + 0.01 * (number % 20) for number in range(24)] + [2.0], 0.0)
    assert calibration.band(1.0, 0.1).high_s < 1.2


def test_the_band_of_a_duration_unlike_all_others_is_the_widest() -> None:
    calibration = Calibration()
    coverage(calibration, random.Random(4), 0.0, 0.2, longest_s=1.0)
    known, unknown = calibration.band(0.5, 0.1), calibration.band(500.0, 0.1)
    assert unknown.high_s / unknown.low_s > 1.3 * known.high_s / known.low_s


def test_a_bias_is_corrected() -> None:
    calibration = Calibration()
    coverage(calibration, random.Random(1), bias=0.5, deviation=0.05)
    assert calibration.band(1.0, 0.1).median_s == pytest.approx(1.65, rel=0.03)


def test_errors_are_taken_to_be_normal_until_some_are_known() -> None:
    calibration = Calibration()
    for number in range(Calibration.MIN_SCORES - 1):
        calibration.observe(1.0, 0.1, calibration.band(1.0, 0.1), 5.0, 5.0 * number)
    band = calibration.band(1.0, 0.1)
    assert (band.low_s, band.median_s, band.high_s) == pytest.approx((0.88, 1.0, 1.137), rel=0.01)


def test_no_duration_is_too_short() -> None:
    calibration = Calibration()
    for number in range(Calibration.MIN_SCORES):
        calibration.observe(0.0, 0.1, Band(0.0, 0.0, 0.0), 0.0, float(number))
    assert calibration.band(0.0, 0.1).median_s == pytest.approx(Calibration.MIN_S)
