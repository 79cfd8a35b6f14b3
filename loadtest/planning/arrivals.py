"""Intended start times of requests.

    closed:N              N clients; each sends its next request when it has an answer; there are no intended starts
    constant:R            evenly, R a second, the first at 0
    poisson:R             independent of each other, R a second
    gamma:R,SHAPE         gaps of mean 1/R and coefficient of variation 1/sqrt(SHAPE): bursts below 1, more even above 1
    ramp:R1-R2            Poisson, at a rate that changes linearly from R1 to R2 over the duration
    steps:R1,R2,…         Poisson, at each of these rates for an equal part of the duration
    steps:R1@S1,R2@S2,…   Poisson, at each rate for so many seconds
    burst                 all at 0
    trace, trace:SPEEDUP  as in the trace, or so many times as fast

Gaps are used as they are drawn. Stretching them to fill the duration would make the number of requests certain and the
tails too short. Starts are in [0, duration).

Every random form is a process of rate 1 (Poisson, or gamma renewals) whose times are mapped through the inverse of the
expected number of arrivals, Λ(t) = ∫ rate: the time rescaling of Çinlar, "Introduction to Stochastic Processes", 1975,
chapter 4, section 7. Thinning (Lewis & Shedler, 1979) gives the same process where Λ has no inverse in closed form.
These have one. The same seed then gives the same draws at every rate, so two rates are compared with the same luck, and
a longer plan begins with the same requests.
"""

from __future__ import annotations

from math import ceil, inf

import numpy as np
from msgspec import Struct
from numpy.random import Generator
from numpy.typing import NDArray

from loadtest.errors import LoadTestError
from loadtest.planning.lengths import parse_number, parse_pair, parse_whole_number

FORMS = "closed:N, constant:R, poisson:R, gamma:R,SHAPE, ramp:R1-R2, steps:R1,R2,…, steps:R1@S1,…, burst, trace:SPEEDUP"
MIN_RATE, MAX_RATE = 1e-6, 1e6  # requests/s
MAX_CLIENTS = 1_000_000
MAX_DURATION_S = 30 * 24 * 3600.0
BLOCK = 8192  # gaps drawn at once; another size would round sums differently, and so move starts by the last bit

Times = NDArray[np.float64]


class Closed(Struct, frozen=True):
    """No intended starts: the speed of the answers decides when requests are sent."""

    num_clients: int


class Traced(Struct, frozen=True):
    """The starts of a trace, divided by `speedup`."""

    speedup: float


class Open(Struct, frozen=True):
    """Starts that do not depend on what happens during the run."""

    def end_s(self, duration_s: float | None) -> float | None:
        """Return when the last start is over at the latest, for a run of `duration_s`; None is never."""
        return duration_s

    def starts_s(self, generator: Generator, max_count: int, end_s: float | None) -> Times:
        """Return the first starts before `end_s`, in order; shape (at most `max_count`,)."""
        raise NotImplementedError


class Burst(Open, frozen=True):
    """All at once."""

    def starts_s(self, generator: Generator, max_count: int, end_s: float | None) -> Times:
        return np.zeros(max_count)


class Constant(Open, frozen=True):
    """Evenly spaced; not random."""

    rate: float

    def starts_s(self, generator: Generator, max_count: int, end_s: float | None) -> Times:
        count = max_count if end_s is None else min(max_count, ceil(self.rate * end_s) + 1)
        return _before(np.arange(count) / self.rate, end_s)


class Renewal(Open, frozen=True):
    """Independent gamma-distributed gaps. With shape 1 they are exponential: a Poisson process."""

    rate: float
    shape: float

    def starts_s(self, generator: Generator, max_count: int, end_s: float | None) -> Times:
        until = inf if end_s is None else self.rate * end_s
        return _before(_rate_one(generator, self.shape, max_count, until) / self.rate, end_s)


class Ramp(Open, frozen=True):
    """Poisson with a rate that is linear in time."""

    first_rate: float
    last_rate: float

    def end_s(self, duration_s: float | None) -> float | None:
        if duration_s is None:
            raise LoadTestError("--arrivals ramp needs --duration: the rate changes over the whole duration")
        return duration_s

    def starts_s(self, generator: Generator, max_count: int, end_s: float | None) -> Times:
        assert end_s is not None, "see end_s"
        expected = _rate_one(generator, 1.0, max_count, (self.first_rate + self.last_rate) / 2 * end_s)
        slope = (self.last_rate - self.first_rate) / end_s
        # Solves first_rate * t + slope * t**2 / 2 = expected, in the form that also holds for a slope of 0.
        root = np.sqrt(np.maximum(self.first_rate**2 + 2 * slope * expected, 0.0))
        return _before(2 * expected / (self.first_rate + root), end_s)


class Steps(Open, frozen=True):
    """Poisson with a piecewise constant rate; pieces have the given seconds, or equal lengths."""

    rates: tuple[float, ...]
    seconds: tuple[float, ...] | None

    def end_s(self, duration_s: float | None) -> float | None:
        if self.seconds is not None:
            return min(sum(self.seconds), inf if duration_s is None else duration_s)
        if duration_s is None:
            raise LoadTestError("--arrivals steps needs --duration, or seconds with each rate: steps:5@30,10@30")
        return duration_s

    def starts_s(self, generator: Generator, max_count: int, end_s: float | None) -> Times:
        assert end_s is not None, "see end_s"
        seconds = self.seconds or (end_s / len(self.rates),) * len(self.rates)
        boundaries_s = np.cumsum([0.0, *seconds])
        num_expected = np.cumsum([0.0, *np.multiply(self.rates, seconds)])
        expected = _rate_one(generator, 1.0, max_count, float(num_expected[-1]))
        return _before(np.interp(expected, num_expected, boundaries_s), end_s)


Arrivals = Closed | Traced | Open


def parse_arrivals(text: str) -> Arrivals:
    """Raises LoadTestError for unknown forms."""
    name, has_parameters, parameters = text.partition(":")
    match name:
        case "closed":
            return Closed(parse_whole_number(parameters, f"--arrivals {text}: the number of clients", 1, MAX_CLIENTS))
        case "constant":
            return Constant(_rate(parameters, text))
        case "poisson":
            return Renewal(_rate(parameters, text), 1.0)
        case "gamma":
            rate, shape = parse_pair(parameters, ",", f"--arrivals {text}")
            return Renewal(_rate(rate, text), parse_number(shape, f"--arrivals {text}: the shape", 0.01, 1e4))
        case "ramp":
            first, last = parse_pair(parameters, "-", f"--arrivals {text}")
            rates = _rates([first, last], text)
            return Ramp(rates[0], rates[1])
        case "steps":
            return _steps(parameters, text)
        case "burst" if not has_parameters:
            return Burst()
        case "trace":
            speedup = parameters if has_parameters else "1"
            return Traced(parse_number(speedup, f"--arrivals {text}: the speed-up", 1e-6, 1e6))
    raise LoadTestError(f"--arrivals {text}: unknown form; use {FORMS}")


def _rate(text: str, whole: str) -> float:
    return parse_number(text, f"--arrivals {whole}: the rate, in requests/s,", MIN_RATE, MAX_RATE)


def _rates(texts: list[str], whole: str) -> tuple[float, ...]:
    """Some rates may be 0: a pause."""
    rates = tuple(0.0 if text in ("0", "0.0") else _rate(text, whole) for text in texts)
    if not any(rates):
        raise LoadTestError(f"--arrivals {whole}: every rate is 0, so no request would start")
    return rates


def _steps(parameters: str, whole: str) -> Steps:
    steps = [step.partition("@") for step in parameters.split(",")]
    rates = _rates([rate for rate, _, _ in steps], whole)
    if not any(timed for _, timed, _ in steps):
        return Steps(rates, None)
    if not all(timed for _, timed, _ in steps):
        raise LoadTestError(f"--arrivals {whole}: give seconds (RATE@SECONDS) with every rate or with none")
    what = f"--arrivals {whole}: a step's seconds"
    return Steps(rates, tuple(parse_number(seconds, what, 1e-3, MAX_DURATION_S) for _, _, seconds in steps))


def _rate_one(generator: Generator, shape: float, max_count: int, until: float) -> Times:
    """Return times of a renewal process with gamma gaps of mean 1: the first `max_count` that are before `until`."""
    blocks, num_drawn, time = [np.zeros(0)], 0, 0.0
    while num_drawn < max_count and time < until:
        blocks.append(time + np.cumsum(generator.standard_gamma(shape, BLOCK)) / shape)
        num_drawn, time = num_drawn + BLOCK, float(blocks[-1][-1])
    times = np.concatenate(blocks)[:max_count]
    return times[times < until]


def _before(times: Times, end_s: float | None) -> Times:
    return times if end_s is None else times[times < end_s]
