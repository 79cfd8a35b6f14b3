"""Find the part of a run in which the load held still."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np

from loadtest.analysis.measurements import Measurements
from loadtest.analysis.statistics import Booleans, Floats, trend

NUM_BINS = 100  # the run is cut into so many
MIN_STEADY_BINS = 10


def steady_window(measured: Measurements, is_open: bool, share: float = 0.9) -> tuple[float, float] | None:
    """Return the longest span in which the number in flight stayed at or above `share` of its plateau, or None.

    The run is cut into 100 equal bins, so that the moment between one request's end and the next one's start does not
    count as a gap. The plateau is the median of those bins' means that are at least half of the highest one.

    In an open loop, three standard deviations below the share are allowed: with Poisson arrivals and enough slots the
    number in flight is Poisson distributed, so its variance equals its mean (M/G/inf; Takacs, "Introduction to the
    Theory of Queues", 1962). Without that allowance the longest span would be the luckiest one.

    If the number drifts within the span by more than the share allows, a twentieth is cut off at both ends until half
    is left. There is no steady state if that half drifts as well, as with a server that falls behind, or if it is
    shorter than a tenth of the run.
    """
    from_s, to_s = measured.span_s()
    if to_s <= from_s:
        return None
    edges_s = np.linspace(from_s, to_s, NUM_BINS + 1)
    means = measured.in_flight().means(edges_s)
    plateau = float(np.median(means[means >= 0.5 * means.max()]))
    deviation = sqrt(plateau) if is_open else 0.0
    first, last = longest_stretch(means >= share * plateau - 3.0 * deviation)
    min_length = max(MIN_STEADY_BINS, (last - first) // 2)
    while last - first >= min_length:
        if not _drifts(means[first:last], max((1.0 - share) * plateau, 2.0 * deviation)):
            return float(edges_s[first]), float(edges_s[last])
        # The number in flight may still be rising to the plateau, or falling from it.
        margin = ceil((last - first) / 20)
        first, last = first + margin, last - margin
    return None


def _drifts(means: Floats, limit: float) -> bool:
    """Also checks the halves: a queue that grows until the last request and then drains has no drift overall."""
    for part in (means, means[: len(means) // 2], means[len(means) // 2 :]):
        drift = trend(np.arange(len(part), dtype=np.float64), part)
        if drift.is_significant and abs(drift.slope) * (len(part) - 1) > limit:
            return True
    return False


def longest_stretch(is_in: Booleans) -> tuple[int, int]:
    """Return the longest run of True as [first, last); (0, 0) if there is none."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], is_in, [False]]).astype(np.int8)))
    if not changes.size:
        return 0, 0
    firsts, lasts = changes[::2], changes[1::2]
    longest = int(np.argmax(lasts - firsts))
    return int(firsts[longest]), int(lasts[longest])
