"""Medians over the rounds of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from loadtest.analysis.statistics import Distribution
from loadtest.analysis.summary import Figures, Summary


def median_of(rounds: Sequence[Summary], of: Callable[[Figures], float | None]) -> float | None:
    """Return the median of a figure over the rounds that have it; None if none has it."""
    known = [value for value in (of(each.full) for each in rounds) if value is not None]
    return statistics.median(known) if known else None


def p50(of: Callable[[Figures], Distribution | None]) -> Callable[[Figures], float | None]:
    """Return the function that gives a distribution's median, given the one that gives the distribution."""

    def value(figures: Figures) -> float | None:
        distribution = of(figures)
        return None if distribution is None else distribution.p50

    return value
