"""Claims about the bands of predictions."""

from __future__ import annotations

import random

import pytest

from servekit.latency.calibration import BAND_SHARE, Calibration


def coverage(calibration: Calibration, rng: random.Random, bias: float, deviation: float) -> float:
    """The share of outcomes in their bands, of durations with such errors, each of which is learned from."""
    num_inside = 0
    for _ in range(600):
        seconds = rng.uniform(0.01, 10.0)
        measured_s = seconds * rng.lognormvariate(bias, deviation)
        band = calibration.band(seconds, 0.1)
        num_inside += band.low_s <= measured_s <= band.high_s
        calibration.observe(seconds, 0.1, measured_s)
    return num_inside / 600


@pytest.mark.parametrize(("bias", "deviation"), [(0.0, 0.1), (0.0, 0.5), (0.3, 0.05), (-0.2, 0.2)])
def test_eighty_percent_of_outcomes_are_in_the_band_whatever_the_errors(bias: float, deviation: float) -> None:
    assert coverage(Calibration(), random.Random(0), bias, deviation) == pytest.approx(BAND_SHARE, abs=0.06)


def test_a_bias_is_corrected() -> None:
    calibration = Calibration()
    coverage(calibration, random.Random(1), bias=0.5, deviation=0.05)
    assert calibration.band(1.0, 0.1).median_s == pytest.approx(1.65, rel=0.03)


def test_errors_are_taken_to_be_normal_until_some_are_known() -> None:
    calibration = Calibration()
    for _ in range(Calibration.MIN_SCORES - 1):
        calibration.observe(1.0, 0.1, 5.0)
    band = calibration.band(1.0, 0.1)
    assert (band.low_s, band.median_s, band.high_s) == pytest.approx((0.88, 1.0, 1.137), rel=0.01)


def test_no_duration_is_too_short() -> None:
    calibration = Calibration()
    for _ in range(Calibration.MIN_SCORES):
        calibration.observe(0.0, 0.1, 0.0)
    assert calibration.band(0.0, 0.1).median_s == pytest.approx(Calibration.MIN_S)
