"""Percentiles, confidence intervals, trends, and the number of open intervals over time.

Percentiles are always taken of raw values. The mean of two runs' percentiles is not a percentile of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, sqrt
from statistics import NormalDist

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

SIGNIFICANT_T = 3.0
NUM_TREND_BATCHES = 20
MAX_CANDIDATES = 20_000  # for a resampled percentile: their ranks differ by 0.005 %


class Distribution(Struct, frozen=True):
    """Statistics of many values, in the unit of the values, except for `num`."""

    num: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


def distribution(values: Floats) -> Distribution | None:
    """Return the statistics of the values that are not NaN; None if there are none.

    Percentiles are interpolated linearly between two values (numpy's default, type 7 of Hyndman and Fan, "Sample
    quantiles in statistical packages", 1996), as in most load tools, so that figures can be compared.
    """
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    percentiles = np.percentile(known, [50.0, 90.0, 95.0, 99.0, 99.9])
    p50, p90, p95, p99, p999 = (float(each) for each in percentiles)
    return Distribution(
        num=known.size,
        mean=float(known.mean()),
        min=float(known.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p999=p999,
        max=float(known.max()),
    )


def percentile_with_losses(values: Floats, num_lost: int, percent: float) -> float:
    """Return the percentile (0 to 100) of the values together with `num_lost` infinite ones.

    Interpolated as in `distribution`. NaN if there are no values at all. numpy's own function cannot be used: between
    two infinities it interpolates to NaN.
    """
    num = len(values) + num_lost
    if num == 0:
        return float("nan")
    rank = percent / 100.0 * (num - 1)
    if ceil(rank) > len(values) - 1:
        return inf
    if len(values) == 1:
        return float(values[0])
    # A rank that is computed as 98.00000000000001 of 0..98 must not exceed the last one.
    return float(np.percentile(values, min(100.0, 100.0 * rank / (len(values) - 1))))


def wilson_interval(num_successes: float, num: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the probability of a success (Wilson, "Probable inference", 1927).

    It also holds near 0 and 1, and for few trials. Numbers need not be whole: dependent trials count as fewer.
    """
    assert 0 <= num_successes <= num
    if num == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    share = num_successes / num
    centre = share + z * z / (2 * num)
    half_width = z * sqrt(share * (1.0 - share) / num + z * z / (4 * num * num))
    scale = 1.0 + z * z / num
    low = 0.0 if num_successes == 0 else (centre - half_width) / scale
    high = 1.0 if num_successes == num else (centre + half_width) / scale
    return low, high


# -- the bootstrap ----------------------------------------------------------------------------------------------------


def correlation_length(values: Floats) -> float:
    """Return how many neighbours are worth one independent value: 1 if all are independent, more in a queue.

    1 plus twice the sum of the autocorrelations up to the first lag that is five times the result (Sokal, "Monte Carlo
    methods in statistical mechanics", 1997, section 3). The result is an underestimate if the series is shorter than
    fifty times its correlation length.
    """
    num = len(values)
    if num < 4 or np.ptp(values) == 0.0:
        return 1.0
    size = 1 << (2 * num - 1).bit_length()  # padded, or the end would be correlated with the beginning
    spectrum = np.abs(np.fft.rfft(values - values.mean(), size)) ** 2
    covariances = np.fft.irfft(spectrum, size)[:num]
    lengths = 2.0 * np.cumsum(covariances / covariances[0]) - 1.0
    is_enough = np.arange(num) >= 5.0 * lengths
    return max(1.0, float(lengths[np.argmax(is_enough)])) if is_enough.any() else float(num)


def bootstrap_percentiles(
    runs: Sequence[Sequence[Floats]], percent: float, num_resamples: int, generator: np.random.Generator
) -> Floats:
    """Return percentiles of resampled values (Efron, "Bootstrap methods: another look at the jackknife", 1979).

    Each run is one repetition of the experiment, cut into blocks of neighbours. Blocks are drawn whole, because what is
    measured of a queue resembles what was measured just before (Carlstein, "The use of subseries values", 1986).
    Repetitions are drawn first, so that the interval includes the differences between runs (Davison and Hinkley,
    "Bootstrap Methods", 1997, section 3.8). One fewer is drawn than there are, of either: otherwise the variance of few
    would be too small (McCarthy and Snowden, "The bootstrap and finite population sampling", 1985).

    Resamples without any value, from repetitions without any, are left out.
    """
    drawn = _draw(len(runs), max(1, len(runs) - 1), num_resamples, generator)
    weights = np.concatenate(
        [
            _draw(len(run), max(1, len(run) - 1) * drawn[:, place], num_resamples, generator)
            for place, run in enumerate(runs)
            if run
        ],
        axis=1,
    )
    blocks = [np.sort(block) for run in runs for block in run]
    pooled = np.sort(np.concatenate(blocks))
    candidates = pooled[:: -ceil(len(pooled) / MAX_CANDIDATES)][::-1]  # the greatest one included
    counts = np.stack([np.searchsorted(block, candidates, side="right") for block in blocks], axis=1)
    sizes = weights @ np.array([len(block) for block in blocks])
    weights, sizes = weights[sizes > 0], sizes[sizes > 0]
    wanted = np.maximum(1, np.ceil(percent / 100.0 * sizes))
    # Find the smallest candidate that at least `wanted` values do not exceed, by bisection in all resamples at once.
    low, high = np.zeros(len(sizes), np.int64), np.full(len(sizes), len(candidates) - 1)
    while (low < high).any():
        middle = (low + high) // 2
        is_reached = np.einsum("ij,ij->i", counts[middle], weights) >= wanted
        low, high = np.where(is_reached, low, middle + 1), np.where(is_reached, middle, high)
    resampled: Floats = candidates[high]
    return resampled


def bootstrap_rates(
    amounts: Sequence[Floats], block_s: Sequence[float], num_resamples: int, generator: np.random.Generator
) -> Floats:
    """Return rates per second, each of resampled blocks of time; one array of amounts for each repetition.

    A rate is not a mean over requests, so blocks of time are drawn. They are long because neighbouring seconds are
    alike (Carlstein, "The use of subseries values", 1986). Repetitions are drawn first, as above.
    """
    drawn = _draw(len(amounts), len(amounts), num_resamples, generator)
    totals, seconds = np.zeros(num_resamples), np.zeros(num_resamples)
    for group, (blocks, length_s) in enumerate(zip(amounts, block_s, strict=True)):
        places = generator.integers(0, len(blocks), (num_resamples, len(blocks)))
        totals += drawn[:, group] * blocks[places].sum(axis=1)
        seconds += drawn[:, group] * length_s * len(blocks)
    return totals / seconds


def _draw(num: int, num_drawn: int | Integers, num_resamples: int, generator: np.random.Generator) -> Integers:
    """Return how often each of `num` is drawn, in each resample: shape (num_resamples, num)."""
    return generator.multinomial(num_drawn, np.full(num, 1.0 / num), num_resamples)


def widening(num_pieces: int, confidence: float = 0.95) -> float:
    """Return the factor by which few independent pieces lengthen an interval: Student's quantile over the normal one.

    Computed by its expansion (Abramowitz and Stegun, 26.7.5), exact to 2 % from five pieces on.
    """
    z, freedom = NormalDist().inv_cdf((1.0 + confidence) / 2.0), max(1, num_pieces - 1)
    return 1.0 + (z**2 + 1.0) / (4 * freedom) + (5 * z**4 + 16 * z**2 + 3.0) / (96 * freedom**2)


def central_interval(values: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Return the bounds of the middle of the values; of bootstrap values, this is the percentile interval."""
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(values, [tail, 100.0 - tail], method="nearest")
    return float(low), float(high)


# -- trends -----------------------------------------------------------------------------------------------------------


class Trend(Struct, frozen=True):
    """The slope of a line, in y per x, and how many standard errors that is."""

    slope: float
    t: float

    @property
    def is_rising(self) -> bool:
        return self.t > SIGNIFICANT_T

    @property
    def is_significant(self) -> bool:
        return abs(self.t) > SIGNIFICANT_T


def trend(x: Floats, y: Floats) -> Trend:
    """Fit a line by least squares. No trend (0, 0) for fewer than four points, or if all x or all y are equal.

    What is measured of a queue resembles what was measured just before, which makes the usual t far too large. It is
    lowered as if there were fewer points, by the correlation of neighbouring residuals (Bayley and Hammersley, "The
    effective number of independent observations in an autocorrelated time series", 1946; first order).
    """
    if len(x) < 4 or np.ptp(y) == 0.0 or np.ptp(x) == 0.0:
        return Trend(0.0, 0.0)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ (y - y.mean())) / spread
    residuals = y - y.mean() - slope * centred
    squares = float(residuals @ residuals)
    if squares <= 1e-18 * float(y @ y):
        return Trend(slope, inf if slope > 0.0 else -inf)
    correlation = min(max(0.0, float(residuals[1:] @ residuals[:-1]) / squares), 0.99)
    standard_error = sqrt(squares / (len(x) - 2) / spread)
    return Trend(slope, slope / standard_error * sqrt((1.0 - correlation) / (1.0 + correlation)))


def batch_medians(x: Floats, y: Floats, num_batches: int = NUM_TREND_BATCHES) -> tuple[Floats, Floats]:
    """Return the medians of equally large batches, ordered by x; fewer batches if there are not two points for each."""
    order = np.argsort(x, kind="stable")
    batches = np.array_split(order, max(1, min(num_batches, len(x) // 2)))
    batches = [batch for batch in batches if len(batch)]
    return (
        np.array([np.median(x[batch]) for batch in batches], np.float64),
        np.array([np.median(y[batch]) for batch in batches], np.float64),
    )


# -- how many are open ------------------------------------------------------------------------------------------------


class OpenCount(Struct, frozen=True):
    """How many of a set of intervals [begin, end) contain a moment: a step function, 0 before the first step."""

    times_s: Floats  # of its steps, ascending
    counts: Integers  # from each step to the next
    areas: Floats  # under it, up to each step

    def at(self, moments_s: Floats) -> Integers:
        places = np.searchsorted(self.times_s, moments_s, side="right")
        return np.concatenate([[0], self.counts])[places]

    def before(self, moments_s: Floats) -> Integers:
        """Return the count just before each moment: what begins at it does not count, what ends at it does."""
        places = np.searchsorted(self.times_s, moments_s, side="left")
        return np.concatenate([[0], self.counts])[places]

    def means(self, edges_s: Floats) -> Floats:
        """Return the time-weighted mean between each edge and the next."""
        if not self.times_s.size:
            return np.zeros(len(edges_s) - 1)
        # The area grows linearly between steps, so interpolation is exact; after the last step nothing is open.
        return np.diff(np.interp(edges_s, self.times_s, self.areas)) / np.diff(edges_s)

    def mean(self, from_s: float, to_s: float) -> float:
        return float(self.means(np.array([from_s, to_s]))[0]) if to_s > from_s else 0.0

    def highest(self, from_s: float, to_s: float) -> int:
        """Return the maximum in [from_s, to_s]."""
        inside = self.counts[(self.times_s >= from_s) & (self.times_s <= to_s)]
        return int(max(self.at(np.array([from_s]))[0], inside.max(initial=0)))


def open_count(begins_s: Floats, ends_s: Floats) -> OpenCount:
    """Count open intervals over time. No interval may end before it begins."""
    moments = np.concatenate([begins_s, ends_s])
    changes = np.concatenate([np.ones(len(begins_s)), -np.ones(len(ends_s))])
    # Changes at the same moment are one step: a handover never counts as two open at once.
    times_s, places = np.unique(moments, return_inverse=True)
    counts = np.cumsum(np.bincount(places, changes, len(times_s))).astype(np.int64)
    areas = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times_s))]) if len(times_s) else np.zeros(0)
    return OpenCount(times_s, counts, areas)
