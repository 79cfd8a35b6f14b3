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

In an overload, a hundred requests wait at the same time for the same answers to end, so their errors are nearly the
same: together they show about as much as one. So an outcome counts only for that part of its wait which came after the
outcome before it. If each one counted fully, the band would show how neighbours differ, and not how far all of them
are off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import exp, inf, log

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
    SMALLEST = 0.25  # what a score that is remembered counts at least, so that those of an overload do not fill all

    def __init__(self) -> None:
        # The logarithm of seconds, the score, and what it counts.
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=self.NUM_REMEMBERED)
        self._not_remembered = 0.0  # what those outcomes count of which no score was remembered since the newest one
        self._last_done_s = -inf
        self._below = self._above = TAIL_SHARE  # share of earlier scores that the next bands leave out on each side

    def band(self, seconds: float, spread: float) -> Band:
        """Return the band of a prediction. `spread` is the standard deviation of its logarithm. Takes some 80 µs."""
        seconds = max(seconds, self.MIN_S)
        low, middle, high = self._percentiles(log(seconds))
        return Band(seconds * exp(low * spread), seconds * exp(middle * spread), seconds * exp(high * spread))

    def observe(self, seconds: float, spread: float, band: Band, measured_s: float, done_s: float) -> None:
        """Learn from a prediction of `seconds`, the band that was made of it, and what was measured, until `done_s`."""
        seconds, measured_s = max(seconds, self.MIN_S), max(measured_s, self.MIN_S)
        counts = min(1.0, max(0.0, done_s - self._last_done_s) / measured_s)
        self._last_done_s = max(self._last_done_s, done_s)
        if len(self._recent) >= self.MIN_SCORES:
            self._below = _adapted(self._below, self.STEP * counts, measured_s < band.low_s)
            self._above = _adapted(self._above, self.STEP * counts, measured_s > band.high_s)
        self._not_remembered += counts
        if self._not_remembered >= self.SMALLEST:
            self._recent.append((log(seconds), log(measured_s / seconds) / spread, self._not_remembered))
            self._not_remembered = 0.0

    def _percentiles(self, log_seconds: float) -> tuple[float, float, float]:
        """Return the scores at the lower end, in the middle and at the upper end of a band."""
        if len(self._recent) < self.MIN_SCORES:
            return -NORMAL_SCORE, 0.0, NORMAL_SCORE
        recency, scores = 1.0, []
        for other_log, score, counts in reversed(self._recent):
            distance = (other_log - log_seconds) / self.LIKENESS
            scores.append((score, counts * recency * exp(-0.5 * distance * distance)))
            recency *= self.FADING**counts
        scores.sort()
        known = sum([weight for _, weight in scores])
        total = known + self._recent[-1][2]  # the next outcome, which counts like the newest one, may be beyond all
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
