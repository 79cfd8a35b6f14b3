"""Compute intervals and tests for an evaluation, in closed form: no random numbers, the same result each time.

Two servers answer the same questions and read the same text, so everything that compares them is paired: it looks at
the questions on which they differ. That finds differences that are far smaller than either server's own interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, fmean, stdev

from msgspec import Struct

CONFIDENCE = 0.95
SIGNIFICANCE = 1.0 - CONFIDENCE
MIN_BLOCKS = 16
MAX_BLOCK = 64  # tokens; far longer than the distance over which their losses are correlated


class Interval(Struct, frozen=True):
    """An estimate, and the bounds of its 95 % confidence interval."""

    estimate: float
    low: float
    high: float


def share_interval(num_right: int, num: int) -> Interval:
    """Return the share of right answers (Wilson, "Probable inference", 1927). It also holds near 0 and 1.

    `num` must be positive.
    """
    assert 0 <= num_right <= num and num > 0
    z = _normal_quantile()
    share = num_right / num
    centre = share + z * z / (2 * num)
    half_width = z * sqrt(share * (1.0 - share) / num + z * z / (4 * num * num))
    scale = 1.0 + z * z / num
    low = 0.0 if num_right == 0 else (centre - half_width) / scale
    high = 1.0 if num_right == num else (centre + half_width) / scale
    return Interval(share, low, high)


def share_difference(num_only_first: int, num_only_second: int, num: int) -> Interval:
    """Return the first share minus the second, of the same questions.

    `num_only_first` questions are answered right by the first server only. The interval is Wald's with 1/2 added to
    each of the four counts (Agresti and Min, "Simple improved confidence intervals for comparing matched proportions",
    2005). So it has a width also if no question is answered differently: another set of questions might find some.
    """
    assert num_only_first >= 0 and num_only_second >= 0 and 0 < num >= num_only_first + num_only_second
    first, second, total = num_only_first + 0.5, num_only_second + 0.5, num + 2.0
    centre = (first - second) / total
    half_width = _normal_quantile() * sqrt(first + second - (first - second) ** 2 / total) / total
    low, high = max(-1.0, centre - half_width), min(1.0, centre + half_width)
    return Interval((num_only_first - num_only_second) / num, low, high)


def mcnemar_p_value(num_only_first: int, num_only_second: int) -> float:
    """Return the two-sided p-value of "both are equally often right" (McNemar, 1947), exactly, by the binomial.

    Only the questions count that one of the two answers right. The same is the sign test of wins and losses.
    """
    num = num_only_first + num_only_second
    ways = tail = 1  # of choosing 0 of them, then 1, and so on; exact, because floats end at 10^308
    for chosen in range(min(num_only_first, num_only_second)):
        ways = ways * (num - chosen) // (chosen + 1)
        tail += ways
    p_value: float = 2 * tail / 2**num
    return min(1.0, p_value)


def holm_p_values(p_values: Sequence[float]) -> list[float]:
    """Return p-values of several tests, adjusted so that the chance of any false alarm is that of one test.

    Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [0.0] * len(p_values)
    greatest = 0.0
    for rank, index in enumerate(order):
        greatest = max(greatest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = greatest
    return adjusted


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean of a series whose neighbours may be correlated, such as the losses of a text's tokens.

    The interval is Student's, of the means of blocks of neighbours (Carlstein, "The use of subseries values", 1986).
    There are at least MIN_BLOCKS of them, so the series must have as many values.
    """
    assert len(values) >= MIN_BLOCKS
    num_blocks = max(MIN_BLOCKS, len(values) // MAX_BLOCK)
    bounds = [len(values) * number // num_blocks for number in range(num_blocks + 1)]
    means = [fmean(values[begin:end]) for begin, end in pairwise(bounds)]
    mean = fmean(values)
    half_width = _student_quantile(num_blocks - 1) * stdev(means) / sqrt(num_blocks)
    return Interval(mean, mean - half_width, mean + half_width)


def _normal_quantile() -> float:
    return NormalDist().inv_cdf((1.0 + CONFIDENCE) / 2.0)


def _student_quantile(freedom: int) -> float:
    """Return Student's quantile by its expansion (Abramowitz and Stegun, 26.7.5), exact to 0.1 % from ten on."""
    z = _normal_quantile()
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
