"""Distributions of token counts, for prompts and answers.

    N                         always N
    uniform:A-B               each whole number from A to B is equally likely, both included
    normal:MEAN,SD
    lognormal:MEDIAN,SIGMA    SIGMA of the logarithm; the mean is MEDIAN * exp(SIGMA**2 / 2)
    empirical:N1,N2,…         one of these, as often as it is listed
    …|A-B                     any of them; values outside of A to B are set to the bound

Clipping piles values up on the bounds, which shows in the data. Drawing again until a value fits would change the mean
without a trace. No form contains `=`, so that a length can be one value in `name=value,…`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import isfinite

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from loadtest.errors import LoadTestError

MAX_TOKENS = 10_000_000
FORMS = "N, uniform:A-B, normal:MEAN,SD, lognormal:MEDIAN,SIGMA, empirical:N1,N2,… and any of them with |A-B behind it"
BLOCK = 4096  # numbers drawn at once

Draw = Callable[[Generator, int], NDArray[np.floating] | NDArray[np.integer]]


class Lengths:
    """A distribution of token counts from 1 to MAX_TOKENS, parsed from one of the forms above."""

    def __init__(self, text: str) -> None:
        self.text = text
        form, has_bounds, bounds = text.partition("|")
        self._minimum, self._maximum = _bounds(bounds, text) if has_bounds else (1, MAX_TOKENS)
        self._draw = _distribution(form, text)

    def __repr__(self) -> str:
        return f"Lengths({self.text!r})"

    def draw(self, generator: Generator, count: int) -> NDArray[np.int64]:
        """Return `count` independent lengths, shape (count,)."""
        drawn = np.rint(self._draw(generator, count))
        return np.clip(drawn, self._minimum, self._maximum).astype(np.int64)

    def endless(self, generator: Generator) -> Iterator[int]:
        """Yield lengths without end. How many are taken does not change which come first."""
        while True:
            yield from self.draw(generator, BLOCK).tolist()


def parse_number(text: str, what: str, minimum: float, maximum: float) -> float:
    """Return a finite number within bounds. Raises LoadTestError with a message that begins with `what`."""
    try:
        number = float(text)
    except ValueError:
        raise LoadTestError(f"{what}: `{text}` is not a number") from None
    if not isfinite(number) or not minimum <= number <= maximum:
        raise LoadTestError(f"{what} is {text}; it must be from {minimum:,.12g} to {maximum:,.12g}")
    return number


def parse_whole_number(text: str, what: str, minimum: int, maximum: int) -> int:
    """Return a whole number within bounds; 1e5 is accepted."""
    number = parse_number(text, what, minimum, maximum)
    if number != int(number):
        raise LoadTestError(f"{what} is {text}; it must be a whole number")
    return int(number)


def parse_pair(text: str, separator: str, what: str) -> tuple[str, str]:
    """Split at the separator, which is not the `-` of an exponent (1e-3)."""
    parts = re.split(rf"(?<=[0-9.]){re.escape(separator)}", text)
    if len(parts) != 2:
        raise LoadTestError(f"{what}: expected two numbers with a `{separator}` between them, got `{text}`")
    return parts[0], parts[1]


def _bounds(text: str, whole: str) -> tuple[int, int]:
    first, last = parse_pair(text, "-", f"length {whole}")
    minimum = parse_whole_number(first, f"length {whole}: the lower bound", 1, MAX_TOKENS)
    maximum = parse_whole_number(last, f"length {whole}: the upper bound", 1, MAX_TOKENS)
    if minimum > maximum:
        raise LoadTestError(f"length {whole}: the lower bound {minimum} is above the upper bound {maximum}; swap them")
    return minimum, maximum


def _distribution(form: str, whole: str) -> Draw:
    name, _, parameters = form.partition(":")
    what = f"length {whole}"
    match name:
        case "uniform":
            minimum, maximum = _bounds(parameters, whole)
            return lambda generator, count: generator.integers(minimum, maximum, count, endpoint=True)
        case "normal":
            first, second = parse_pair(parameters, ",", what)
            mean = parse_number(first, f"{what}: the mean", 1, MAX_TOKENS)
            deviation = parse_number(second, f"{what}: the standard deviation", 0, MAX_TOKENS)
            return lambda generator, count: generator.normal(mean, deviation, count)
        case "lognormal":
            first, second = parse_pair(parameters, ",", what)
            median = parse_number(first, f"{what}: the median", 1, MAX_TOKENS)
            sigma = parse_number(second, f"{what}: sigma", 0, 10)
            return lambda generator, count: median * np.exp(sigma * generator.standard_normal(count))
        case "empirical":
            numbers = np.array(
                [parse_whole_number(each, f"{what}: a number", 1, MAX_TOKENS) for each in parameters.split(",")]
            )
            return lambda generator, count: generator.choice(numbers, count)
    if not name[:1].isdigit():
        raise LoadTestError(f"{what}: `{name}` is not a known distribution; use {FORMS}")
    fixed = parse_whole_number(form, f"{what}: the number", 1, MAX_TOKENS)
    return lambda _, count: np.full(count, fixed)
