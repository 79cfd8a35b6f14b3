"""Claims about what metrics say of predictions."""

from __future__ import annotations

import pytest

from servekit.latency.calibration import Band
from servekit.latency.prediction_quality import PredictionQuality

BAND = Band(0.8, 1.0, 1.25)


def test_outcomes_in_the_band_are_counted_and_recent_errors_have_a_median() -> None:
    quality = PredictionQuality()
    assert quality.first_token_error == quality.end_error == 0.0
    for measured_s in (0.5, 0.8, 1.0, 1.25, 2.0):
        quality.first_token(BAND, measured_s)
    assert (quality.num_first_tokens, quality.num_in_band) == (5, 3)
    assert quality.first_token_error == pytest.approx(0.25)
    quality.end(3.0, 2.0)
    assert quality.end_error == pytest.approx(0.5)


def test_errors_of_long_ago_are_forgotten() -> None:
    quality = PredictionQuality()
    for _ in range(300):
        quality.first_token(BAND, 100.0)
    for _ in range(PredictionQuality.NUM_REMEMBERED):
        quality.first_token(BAND, 1.0)
    assert quality.first_token_error == 0.0 and quality.num_first_tokens == 300 + PredictionQuality.NUM_REMEMBERED


def test_a_token_that_comes_at_once_has_a_finite_error() -> None:
    quality = PredictionQuality()
    quality.first_token(BAND, 0.0)
    assert 0.0 < quality.first_token_error < 1e5
