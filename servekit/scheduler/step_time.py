"""Learn from steps how long a prefill token, a decode, and the rest of a step take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import sqrt

MIN_SLOPE_S = 1e-8  # no hardware prefills a token faster; a lower estimate is noise
MIN_SPREAD = 16.0  # variance of the sizes; with less, a regression is not reliable


class Regression:
    """The slope of a line through points (size, seconds), whose weights decay."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.sums = [0.0] * 5  # of the weights, sizes, seconds, squared sizes, and sizes times seconds

    def add(self, size: float, seconds: float) -> float | None:
        """Add a point, and return the slope; None while the sizes differ too little to show it."""
        decay, sums = self._decay, self.sums
        sums[0] = weight = decay * sums[0] + 1.0
        sums[1] = sizes = decay * sums[1] + size
        sums[2] = decay * sums[2] + seconds
        sums[3] = decay * sums[3] + size * size
        sums[4] = decay * sums[4] + size * seconds
        mean = sizes / weight
        spread = sums[3] - mean * sizes
        return (sums[4] - mean * sums[2]) / spread if spread > MIN_SPREAD else None


class StepTimes:
    """Estimate the three parts of a step's time, in seconds.

    - `prefill_s` is what a prefill token costs: a linear regression over steps with prefill. It is 0 until there was
      such a step.
    - `base_s` is what a step takes without prefill (decodes, attention, overhead): learned from every step, with a fast
      decay, because it drifts with the decodes. It is 0 until there was a step.
    - `decode_s` is what one more decode adds to `base_s`: a linear regression over all steps. It is 0 until steps had
      different numbers of decodes.
    """

    PREFILL_DECAY = 0.97  # the weight of a step with prefill, once another one has followed
    BASE_DECAY = 0.8  # the same for what a step takes without prefill
    DECODE_DECAY = 0.99  # and for what a decode costs

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self.base_s = 0.0
        self.decode_s = 0.0
        self.num_decodes = 0.0  # mean number of decodes in the steps of `base_s`
        self.prefills = Regression(self.PREFILL_DECAY)
        self.decodes = Regression(self.DECODE_DECAY)

    @property
    def overhead_s(self) -> float:
        """What a step with neither prefill nor decodes would take, in seconds."""
        return max(0.0, self.base_s - self.decode_s * self.num_decodes)

    def observe(self, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        if num_prefill_tokens:
            slope_s = self.prefills.add(float(num_prefill_tokens), seconds)
            if slope_s is None:
                slope_s = (seconds - self.base_s) / num_prefill_tokens  # at first: all of its time
            self.prefill_s = max(slope_s, MIN_SLOPE_S)
        without_s = max(0.0, seconds - self.prefill_s * num_prefill_tokens)
        self.base_s += (1.0 - self.BASE_DECAY) * (without_s - self.base_s)
        self.num_decodes += (1.0 - self.BASE_DECAY) * (num_decodes - self.num_decodes)
        slope_s = self.decodes.add(float(num_decodes), without_s)
        if slope_s is not None:
            self.decode_s = max(slope_s, 0.0)


# Numbers of positions below this have a class of their own. Kernels compute rows in tiles of 16 or 32, so a step of 33
# positions may take a seventh longer than one of 32. In one class with it, the first drafts beside 32 sequences would
# look free.
NUM_EXACT = 64


def size_class(num_positions: int) -> int:
    """A number of positions as one of a few classes: exact below 64, then with an error of at most a 32nd."""
    shift = max(0, num_positions.bit_length() - NUM_EXACT.bit_length() + 1)
    return (NUM_EXACT // 2) * shift + (num_positions >> shift)


def bounds_of(size: int) -> tuple[int, int]:
    """The smallest and the largest number of positions in a size class."""
    shift = max(0, size // (NUM_EXACT // 2) - 1)
    first = (size - (NUM_EXACT // 2) * shift) << shift
    return first, first + (1 << shift) - 1


def non_decreasing(values: list[float], weights: list[float]) -> list[float]:
    """Return the non-decreasing values with the least weighted squared distance to these (isotonic regression).

    It pools neighbours that are in the wrong order: Barlow et al., "Statistical Inference under Order Restrictions",
    1972, section 1.2.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, number of values)
    for mean, weight in zip(values, weights, strict=True):
        number = 1
        while pools and pools[-1][0] > mean:
            before, before_weight, before_number = pools.pop()
            mean = (before_weight * before + weight * mean) / (before_weight + weight)
            weight, number = before_weight + weight, before_number + number
        pools.append((mean, weight, number))
    return [mean for mean, _, number in pools for _ in range(number)]


class PositionTimes:
    """Learn how long a step takes by the number of positions that it computes, for steps without prefill.

    A line would not do: on most devices the time is flat up to some number, then rises in steps. So there is a mean for
    each size class. It is a mean and not, for example, the shortest time: the shortest of many steps is less than the
    shortest of few, so whatever is chosen often would look fast. More positions never take less time. So the means are
    put in order (`non_decreasing`), which corrects those of classes that were seen seldom or long ago. Between two
    known classes, the time is interpolated.
    """

    MAX_WEIGHT = 16.0  # of a class, in steps: the newest step is at least a 17th of its mean
    DECAY = 0.98  # of the weights of all classes, with each step
    SPREAD_DECAY = 31 / 32  # of the weight of earlier steps in `spread`, with each step
    MIN_WEIGHT = 1e-6  # of a class that was not seen for long: with 0, its mean could not be compared
    # A step that was held up for long counts as one of twice the mean, or of a millisecond more.
    MAX_RATIO = 2.0
    MAX_ABOVE_S = 1e-3

    def __init__(self, unknown_s: float = 1.0, min_s: float = 1e-6) -> None:
        """`unknown_s` is the time until a step was seen. No time is less than `min_s`; clocks may show less."""
        self._unknown_s = unknown_s
        self._min_s = min_s
        self.classes: list[int] = []  # size classes that occurred, ascending
        self.means_s: list[float] = []  # mean time of each class
        self.weights: list[float] = []  # weight of each mean
        # The variance of a step's time around the mean of its class, relative to the square of that mean.
        self.spread = 0.0
        self._fitted_s: list[float] | None = None  # the means in order, since the newest step

    def observe(self, num_positions: int, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        found, seconds = size_class(num_positions), max(seconds, self._min_s)
        self._fitted_s = None
        self.weights = [max(self.MIN_WEIGHT, self.DECAY * weight) for weight in self.weights]
        index = bisect_left(self.classes, found)
        if index == len(self.classes) or self.classes[index] != found:
            self.classes.insert(index, found)
            self.means_s.insert(index, seconds)
            self.weights.insert(index, 1.0)
            return
        mean_s, weight = self.means_s[index], self.weights[index]
        if weight < 1.0:  # it was seen once, or long ago: as something was compiled, for example
            mean_s = min(mean_s, self.MAX_RATIO * seconds)
        seconds = min(seconds, max(self.MAX_RATIO * mean_s, mean_s + self.MAX_ABOVE_S))
        if mean_s > 0.0:
            self.spread += (1.0 - self.SPREAD_DECAY) * ((seconds / mean_s - 1.0) ** 2 - self.spread)
        self.means_s[index] = (weight * mean_s + seconds) / (weight + 1.0)
        self.weights[index] = min(weight + 1.0, self.MAX_WEIGHT)

    def restore(self, classes: list[int], means_s: list[float], weights: list[float], spread: float) -> None:
        """Continue with what another instance has learned."""
        self.classes, self.means_s, self.weights = classes.copy(), means_s.copy(), weights.copy()
        self.spread = spread
        self._fitted_s = None

    def error_of(self, num_positions: int) -> float:
        """The relative standard error of `seconds_of`: that of the mean of the class, or of the nearest smaller one.

        A class that was not seen for long has little weight because times may have changed, and not because its mean
        would vary more than a single step.
        """
        if not self.classes:
            return 0.0
        index = bisect_right(self.classes, size_class(num_positions))
        return min(1.0, sqrt(self.spread / max(1.0, self.weights[max(0, index - 1)])))

    def seconds_of(self, num_positions: int, position_s: float = 0.0) -> float:
        """The time of a step with this number of positions; the same for all numbers until a step was seen.

        Above the largest step that was seen, each position adds `position_s`, and below the smallest one it takes that
        away, down to its share. If that is too little, the step is tried, and its time is known.
        """
        classes = self.classes
        if not classes:
            return self._unknown_s
        if self._fitted_s is None:
            self._fitted_s = non_decreasing(self.means_s, self.weights)
        means_s = self._fitted_s
        wanted = size_class(num_positions)
        index = bisect_left(classes, wanted)
        if index == len(classes):
            return means_s[-1] + position_s * (num_positions - bounds_of(classes[-1])[1])
        if classes[index] == wanted:
            return means_s[index]
        if index == 0:
            smallest, _ = bounds_of(classes[0])
            return max(
                means_s[0] - position_s * (smallest - num_positions),
                means_s[0] * (num_positions / smallest if position_s else 1.0),
            )
        part = (wanted - classes[index - 1]) / (classes[index] - classes[index - 1])
        return means_s[index - 1] + part * (means_s[index] - means_s[index - 1])
