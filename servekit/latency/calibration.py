"""Learn the error of predictions from earlier predictions and their outcomes.

A prediction comes with a spread. Its error, as a multiple of the spread, is a score. The band of a prediction reaches
from the tenth to the ninetieth percentile of recent scores, so about 80 % of outcomes are in it, whatever the errors
come from: split conformal prediction, Vovk et al., "Algorithmic Learning in a Random World", 2005, over recent ones.
"""

from __future__ import annotations

from collections import deque
from math import ceil, exp, log

from msgspec import Struct

BAND_SHARE = 0.8  # share of outcomes that should be in the band
NORMAL_SCORE = 1.2816  # the ninetieth percentile of a standard normal distribution


class Band(Struct, frozen=True, gc=False):
    """A predicted duration, in seconds: with 80 % of outcomes expected between `low_s` and `high_s`."""

    low_s: float
    median_s: float
    high_s: float


class Calibration:
    """Scores of recent predictions."""

    NUM_REMEMBERED = 256
    MIN_SCORES = 20  # with fewer, errors are assumed to be normally distributed
    MIN_S = 1e-4  # shorter durations count as this

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.NUM_REMEMBERED)
        self._low, self._middle, self._high = -NORMAL_SCORE, 0.0, NORMAL_SCORE
        self._is_current = True

    def band(self, seconds: float, spread: float) -> Band:
        """Return the band of a prediction. `spread` is the standard deviation of its logarithm."""
        if not self._is_current:
            self._update()
        seconds = max(seconds, self.MIN_S)
        return Band(
            seconds * exp(self._low * spread),
            seconds * exp(self._middle * spread),
            seconds * exp(self._high * spread),
        )

    def observe(self, seconds: float, spread: float, measured_s: float) -> None:
        """Learn from a prediction of `seconds` and what was measured."""
        self._recent.append(log(max(measured_s, self.MIN_S) / max(seconds, self.MIN_S)) / spread)
        self._is_current = len(self._recent) < self.MIN_SCORES

    def _update(self) -> None:
        scores = sorted(self._recent)
        # The next outcome is equally likely to be between any two of these, below all, or above all.
        rank = ceil((len(scores) + 1) * (1.0 + BAND_SHARE) / 2.0)
        index = min(rank, len(scores)) - 1
        self._low, self._middle, self._high = scores[-1 - index], scores[len(scores) // 2], scores[index]
        self._is_current = True
