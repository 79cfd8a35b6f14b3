"""How many tokens: distributions that prompts and answers draw their lengths from.

    N                         always N
    uniform:A-B               every whole number from A to B alike, both included
    normal:MEAN,SD
    lognormal:MEDIAN,SIGMA    SIGMA of the logarithm; the mean is MEDIAN * exp(SIGMA**2 / 2)
    empirical:N1,N2,…         one of these, each as often as it stands there
    …|A-B                     any of them, with what falls outside of A to B put on the bound

Clipping heaps what it catches on the bounds, and says so by where it stands; drawing again until the number fits would
move the mean without a trace. No form contains an `=`, so that a length can be one value among `name=value,…`.
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
        self._least, self._most = _bounds(bounds, text) if has_bounds else (1, MAX_TOKENS)
        self._draw = _distribution(form, text)

    def __repr__(self) -> str:
        return f"Lengths({self.text!r})"

    def draw(self, generator: Generator, count: int) -> NDArray[np.int64]:
        """`count` independent lengths, shape (count,)."""
        drawn = np.rint(self._draw(generator, count))
        return np.clip(drawn, self._least, self._most).astype(np.int64)

    def endless(self, generator: Generator) -> Iterator[int]:
        """Lengths without end. How many are taken does not change which ones come first."""
        while True:
            yield from self.draw(generator, BLOCK).tolist()


def parse_number(text: str, what: str, least: float, most: float) -> float:
    """A finite number within bounds; raises LoadTestError that begins with `what`."""
    try:
        number = float(text)
    except ValueError:
        raise LoadTestError(f"{what}: `{text}` is not a number") from None
    if not isfinite(number) or not least <= number <= most:
        raise LoadTestError(f"{what} is {text}; it must be from {least:,.12g} to {most:,.12g}")
    return number


def parse_whole_number(text: str, what: str, least: int, most: int) -> int:
    """The same without a fraction; 1e5 is one."""
    number = parse_number(text, what, least, most)
    if number != int(number):
        raise LoadTestError(f"{what} is {text}; it must be a whole number")
    return int(number)


def parse_pair(text: str, separator: str, what: str) -> tuple[str, str]:
    """The two sides of one separator; a `-` that belongs to an exponent (1e-3) is none."""
    parts = re.split(rf"(?<=[0-9.]){re.escape(separator)}", text)
    if len(parts) != 2:
        raise LoadTestError(f"{what}: expected two numbers with a `{separator}` between them, got `{text}`")
    return parts[0], parts[1]


def _bounds(text: str, whole: str) -> tuple[int, int]:
    first, last = parse_pair(text, "-", f"length {whole}")
    least = parse_whole_number(first, f"length {whole}: the lower bound", 1, MAX_TOKENS)
    most = parse_whole_number(last, f"length {whole}: the upper bound", 1, MAX_TOKENS)
    if least > most:
        raise LoadTestError(f"length {whole}: the lower bound {least} is above the upper bound {most}; swap them")
    return least, most


def _distribution(form: str, whole: str) -> Draw:
    name, _, parameters = form.partition(":")
    what = f"length {whole}"
    match name:
        case "uniform":
            least, most = _bounds(parameters, whole)
            return lambda generator, count: generator.integers(least, most, count, endpoint=True)
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
        raise LoadTestError(f"{what}: `{name}` is no known distribution; known are {FORMS}")
    fixed = parse_whole_number(form, f"{what}: the number", 1, MAX_TOKENS)
    return lambda _, count: np.full(count, fixed)
