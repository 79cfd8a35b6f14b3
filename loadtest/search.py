"""The highest rate of requests at which enough of them meet their limits: what to ask next, and when to stop.

Rates are bracketed by doubling or halving, then the bracket is halved on a logarithmic scale, for what matters of a
rate is how many per cent it is off. Each probe is decided by a Wilson interval of the share that met all limits; one
that is undecided is asked again for as many requests as there were so far, up to a cap. Nothing here runs a probe.

The interval takes requests for independent of each other. Those of one probe share queues and batches, the more the
nearer the server is to its limit, so probes should last many times as long as a request does.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil, exp, log2, sqrt
from statistics import NormalDist

import numpy as np
from msgspec import Struct

from loadtest.errors import LoadTestError
from loadtest.statistics import NUM_TREND_BATCHES, Floats, batch_medians, trend, wilson_interval
from loadtest.timeline import Measurements

BRACKET_FACTOR = 2.0
BRACKET_SHARE = 1.0 / 3.0  # of the tolerance: what the bracket may be wide; the rest is for rates that stay undecided
RAMP_SHARE = 0.25  # of a probe: while an empty server fills, everything grows
MIN_GROWTH = 0.1  # over the rest of the probe, of the mean: less is no server running full


class Decision(StrEnum):
    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"
    SATURATED = "saturated"  # more come than are served: missed, whatever the share was until then
    CLIENT = "client"  # this client cannot ask so much: what the server would do is unknown


class Probe(Struct, frozen=True):
    """Ask for so many requests at this rate, in an open loop."""

    rate: float  # requests/s
    num_requests: int
    look: int = 0  # how often this rate has been probed before; a seed of its own, for new requests


class Probed(Struct, frozen=True):
    """All that is known of a rate."""

    rate: float
    num_attained: int
    num_total: int
    low: float  # of the share that meets all limits
    high: float
    decision: Decision


class Result(Struct, frozen=True):
    """What was found. `rate` was shown to meet the limits; None is that no rate was."""

    rate: float | None
    missed_rate: float | None  # the lowest that was not shown to meet them; None is that there is none up to max_rate
    stopped_by: str  # in words
    probed: list[Probed]
    is_limited_by_client: bool = False  # the missed rate is one that the client could not ask for, so it tells nothing


class Search:
    """Call `next_probe`, run it, `record` it, until there is none; then there is a `result`.

    A rate that is still undecided after `max_requests` counts as not met: what is reported has been shown, and is a
    little too low rather than too high.

    A probe that the client spoiled says nothing: its rate is asked once more, and counts as missed if it is spoiled
    again. And where nothing has met the limits yet, no lower rate is tried that cannot be better (see `_is_hopeless`).
    """

    def __init__(
        self,
        attainment: float = 0.99,
        start_rate: float = 1.0,
        *,
        min_rate: float = 0.01,
        max_rate: float = 100_000.0,
        tolerance: float = 0.05,
        num_requests: int = 700,
        max_requests: int = 11_200,
        confidence: float = 0.95,
    ) -> None:
        """`num_requests` are what a rate's first probe asks for. Raises LoadTestError for what can decide nothing."""
        _check(attainment, start_rate, min_rate, max_rate, tolerance, num_requests, max_requests)
        self.attainment = attainment
        self.min_rate = min_rate
        self.max_rate = max_rate
        self.tolerance = tolerance
        self.num_requests = num_requests
        self.max_requests = max_requests
        # Who looks several times has as many chances to be misled: each look gets its part of the error (Bonferroni).
        num_looks = 1 + ceil(log2(max_requests / num_requests))
        self.confidence = 1.0 - (1.0 - confidence) / num_looks
        if (needed := num_needed(attainment, self.confidence)) > max_requests:
            raise LoadTestError(
                f"an attainment of {attainment:g} cannot be shown with {max_requests} requests a probe, even if all of "
                f"them are good; allow at least {needed}, or ask for less"
            )
        self._rate: float | None = start_rate
        self._num_attained = 0
        self._num_total = 0
        self._look = 0
        self._was_spoiled = False  # by the client, at this rate
        self._met: float | None = None
        self._missed: float | None = None
        self._probed: list[Probed] = []
        self._stopped_by = ""

    def next_probe(self) -> Probe | None:
        """None when there is a result. The same one until it is recorded."""
        if self._rate is None:
            return None
        wanted = self._num_total or self.num_requests
        return Probe(self._rate, min(wanted, self.max_requests - self._num_total), self._look)

    def record(
        self,
        probe: Probe,
        num_attained: int,
        num_total: int,
        *,
        is_saturated: bool = False,
        is_client_limited: bool = False,
        num_in_flight: float | None = None,
        is_unanswered: bool = False,
    ) -> Decision:
        """What became of it: how many of how many requests met all limits, how many were in flight on average, and
        whether nothing was answered though there was time. Raises LoadTestError if there were no requests."""
        assert probe == self.next_probe(), "this is not what was asked for"
        if num_total == 0:
            raise LoadTestError(f"the probe at {probe.rate:g} requests/s had no requests; let it last longer")
        if is_client_limited and not self._was_spoiled:
            self._was_spoiled = True
            self._look += 1
            return Decision.CLIENT
        self._num_attained += num_attained
        self._num_total += num_total
        low, high = wilson_interval(self._num_attained, self._num_total, self.confidence)
        decision = self._decide(low, high, is_saturated, is_client_limited)
        if decision is Decision.UNDECIDED and self._num_total < self.max_requests:
            self._look += 1
            return decision
        self._probed.append(Probed(probe.rate, self._num_attained, self._num_total, low, high, decision))
        if decision is Decision.MET:
            self._met = probe.rate
        else:
            self._missed = probe.rate
        self._num_attained = self._num_total = self._look = 0
        self._was_spoiled = False
        self._rate = None if self._is_hopeless(num_in_flight, is_unanswered) else self._next_rate()
        return decision

    @property
    def result(self) -> Result:
        assert self._rate is None, "there is a probe to run yet"
        is_limited_by_client = self._missed is not None and self._last(self._missed).decision is Decision.CLIENT
        return Result(self._met, self._missed, self._stopped_by, self._probed, is_limited_by_client)

    def _is_hopeless(self, num_in_flight: float | None, is_unanswered: bool) -> bool:
        """Whether nothing has met the limits, and nothing at a lower rate can.

        A lower rate leaves more requests alone with the server, and does nothing for those that were. Of requests that
        come at random (Poisson) with L in flight on average, a share of e^-L finds nobody there, and of these at least
        e^-L are joined by nobody (exact for equal times and no queue; a queue leaves more alone). If more of them than
        that could not have been good, those alone are not good enough.
        """
        last = self._probed[-1]
        if self._met is not None or last.decision is not Decision.MISSED:
            return False
        if is_unanswered:
            self._stopped_by = f"{last.rate:.4g}/s, at which nothing was answered: a lower rate is no remedy"
            return True
        if num_in_flight is None or last.high >= self.attainment * exp(-2.0 * num_in_flight):
            return False
        share = f"{last.num_attained} of {last.num_total} requests met the limits"
        self._stopped_by = (
            f"{last.rate:.4g}/s: {share} with {num_in_flight:.2g} in flight on average, so that those that had the "
            "server to themselves miss them too, and a lower rate is no remedy"
        )
        return True

    def _decide(self, low: float, high: float, is_saturated: bool, is_client_limited: bool) -> Decision:
        if is_client_limited:
            return Decision.CLIENT
        if is_saturated:
            return Decision.SATURATED
        if low >= self.attainment:
            return Decision.MET
        return Decision.MISSED if high < self.attainment else Decision.UNDECIDED

    def _next_rate(self) -> float | None:
        met, missed = self._met, self._missed
        if missed is None:
            assert met is not None
            if met < self.max_rate:
                return min(met * BRACKET_FACTOR, self.max_rate)
            self._stopped_by = f"the highest rate allowed, {self.max_rate:g}/s, meets the limits"
        elif met is None:
            if missed > self.min_rate:
                return max(missed / BRACKET_FACTOR, self.min_rate)
            self._stopped_by = f"the lowest rate allowed, {self.min_rate:g}/s, which was not shown to meet the limits"
        elif missed / met > (1.0 + self.tolerance) ** BRACKET_SHARE:
            return sqrt(met * missed)
        else:
            self._stopped_by = f"{missed:.4g}/s, {(missed / met - 1.0) * 100.0:.2g} % more: {self._why(missed)}"
        return None

    def _why(self, rate: float) -> str:
        last = self._last(rate)
        if last.decision is Decision.CLIENT:
            return "the client was the bottleneck, so the server's maximum may be higher"
        if last.decision is Decision.SATURATED:
            return "requests and latency grew until the end, so it is more than the server can do"
        share = f"{last.num_attained} of {last.num_total} requests met the limits"
        return f"{share}, which leaves it undecided" if last.decision is Decision.UNDECIDED else share

    def _last(self, rate: float) -> Probed:
        return next(each for each in reversed(self._probed) if each.rate == rate)


def num_needed(attainment: float, confidence: float) -> int:
    """Requests that can show an attainment if all are good: n / (n + z^2) is the interval's lower end then."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    return ceil(z * z * attainment / (1.0 - attainment))


def _check(
    attainment: float,
    start_rate: float,
    min_rate: float,
    max_rate: float,
    tolerance: float,
    num_requests: int,
    max_requests: int,
) -> None:
    if not 0.0 < attainment < 1.0:
        raise LoadTestError(f"--attainment {attainment:g} is not between 0 and 1; to ask for all of them, try 0.999")
    if not 0.0 < min_rate <= start_rate <= max_rate:
        raise LoadTestError(
            f"the search starts at {start_rate:g} requests/s, which is not within {min_rate:g} to {max_rate:g}"
        )
    if not 0.001 <= tolerance <= 1.0:
        raise LoadTestError(f"a tolerance of {tolerance:g} is not within 0.001 to 1; 0.05 is 5 %")
    if not 1 <= num_requests <= max_requests:
        raise LoadTestError(f"{num_requests} requests a probe are not within 1 to {max_requests}")


# -- saturation -------------------------------------------------------------------------------------------------------


def is_saturated(measured: Measurements) -> bool:
    """Whether more came than was served: both the number in flight and the time to the first token grew to the end.

    Either alone says little: the number in flight also grows while answers get longer, and TTFT while prompts do. Both
    are looked at from a quarter of the probe on, until the last request was to begin, for then the queue drains. A
    slope counts if it is significant in spite of what a queue's neighbouring moments have in common, and if it adds
    up to a tenth of the mean.
    """
    starts_s = measured.intended_s[measured.is_begun]
    if len(starts_s) < 4 * NUM_TREND_BATCHES:
        return False
    from_s = float(starts_s.min()) + RAMP_SHARE * float(np.ptp(starts_s))
    edges_s = np.linspace(from_s, float(starts_s.max()), NUM_TREND_BATCHES + 1)
    if edges_s[-1] <= edges_s[0]:
        return False
    in_flight = measured.in_flight().means(edges_s)
    belongs = measured.is_answered & (measured.intended_s >= from_s)
    # Of whole answers there is no first token; there it is the answer that comes later and later.
    latency_s = np.where(np.isnan(measured.ttft_s), measured.e2e_s, measured.ttft_s)
    latencies = batch_medians(measured.intended_s[belongs], latency_s[belongs])
    return _grows((edges_s[:-1] + edges_s[1:]) / 2.0, in_flight) and _grows(*latencies)


def num_in_flight(measured: Measurements) -> float:
    """On average, from the first request's intended start to the last one's."""
    starts_s = measured.intended_s[measured.is_begun]
    if len(starts_s) == 0 or starts_s.max() <= starts_s.min():
        return 0.0
    return measured.in_flight().mean(float(starts_s.min()), float(starts_s.max()))


def _grows(x: Floats, y: Floats) -> bool:
    line = trend(x, y)
    return line.is_rising and line.slope * float(np.ptp(x)) > MIN_GROWTH * float(y.mean())
