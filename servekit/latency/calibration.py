"""Learn the error of predictions from earlier predictions and their outcomes.

A prediction comes with a spread. Its error, as a multiple of the spread, is a score. The band of a prediction reaches
from the tenth to the ninetieth percentile of earlier scores, so about 80 % of outcomes are in it, whatever the errors
come from: conformal prediction, Vovk et al., "Algorithmic Learning in a Random World", 2005. That is true as long as
errors stay as they were. They do not, so three things follow them:

- Recent scores count more: Barber et al., "Conformal Prediction beyond Exchangeability", 2023.
- Scores of durations like the predicted one count more: Guan, "Localized Conformal Prediction", 2023. The error of a
  first token in the next step has other causes than that of one for which other answers must end before.
- If more than a tenth of outcomes come below their bands, a lower percentile becomes the lower end, and the same above:
  adaptive conformal inference, Gibbs and Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import exp, log

from msgspec import Struct

BAND_SHARE = 0.8  # share of outcomes that should be in the band
TAIL_SHARE = (1.0 - BAND_SHARE) / 2.0  # the same for those below it, and for those above
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
    FADING = 0.989  # weight of a score relative to the next one: half after 63
    LIKENESS = 0.5  # of the logarithm: a duration that is 1.65 times as long counts 0.6 times as much, a double one 0.4
    STEP = 0.02  # of a percentile after each outcome: larger follows faster, and makes bands less steady

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=self.NUM_REMEMBERED)  # logarithm of seconds, and score
        self._below = self._above = TAIL_SHARE  # share of earlier scores that the next bands leave out on each side

    def band(self, seconds: float, spread: float) -> Band:
        """Return the band of a prediction. `spread` is the standard deviation of its logarithm. Takes some 80 µs."""
        seconds = max(seconds, self.MIN_S)
        low, middle, high = self._percentiles(log(seconds))
        return Band(seconds * exp(low * spread), seconds * exp(middle * spread), seconds * exp(high * spread))

    def observe(self, seconds: float, spread: float, band: Band, measured_s: float) -> None:
        """Learn from a prediction of `seconds`, the band that was made of it, and what was measured."""
        seconds, measured_s = max(seconds, self.MIN_S), max(measured_s, self.MIN_S)
        if len(self._recent) >= self.MIN_SCORES:
            self._below = _adapted(self._below, self.STEP, measured_s < band.low_s)
            self._above = _adapted(self._above, self.STEP, measured_s > band.high_s)
        self._recent.append((log(seconds), log(measured_s / seconds) / spread))

    def _percentiles(self, log_seconds: float) -> tuple[float, float, float]:
        """Return the scores at the lower end, in the middle and at the upper end of a band."""
        if len(self._recent) < self.MIN_SCORES:
            return -NORMAL_SCORE, 0.0, NORMAL_SCORE
        recency, scores = 1.0, []
        for other_log, score in reversed(self._recent):
            distance = (other_log - log_seconds) / self.LIKENESS
            scores.append((score, recency * exp(-0.5 * distance * distance)))
            recency *= self.FADING
        scores.sort()
        known = sum([weight for _, weight in scores])
        total = known + 1.0  # the next outcome may be beyond all of them
        return (
            _weighted_percentile(reversed(scores), (1.0 - self._below) * total),
            _weighted_percentile(scores, 0.5 * known),
            _weighted_percentile(scores, (1.0 - self._above) * total),
        )


def _adapted(left_out: float, step: float, is_outside: bool) -> float:
    """Return the share of scores to leave out next: constant on average if TAIL_SHARE of outcomes are outside."""
    return min(max(left_out + step * (TAIL_SHARE - is_outside), 0.0), 0.5)


def _weighted_percentile(scores: Iterable[tuple[float, float]], wanted: float) -> float:
    """Return the score at which the weights, added up in the order of `scores`, reach `wanted`; else the last one."""
    total = reached = 0.0
    for score, weight in scores:
        total, reached = total + weight, score
        if total >= wanted:
            break
    return reached
