"""Find the highest request rate at which enough requests meet their limits.

The search is pure. It says which probe to run next and learns from what the probe observed; it runs nothing itself.

There are two kinds of probes:

- A short probe lasts a few seconds. It proves nothing; it only finds the right order of magnitude, so that a search
  from 1 request/s to some hundreds takes seconds for each doubling.
- A deciding probe lasts many times as long as a request does. Only the requests in its middle count: before that the
  server is still filling up, and after it the server is already draining, so requests there have it too easy. A burst
  that ends before the first answer does would fit into the server's batch at any rate.

Short probes double the rate until one misses. Deciding probes then confirm the highest rate that passed, and halve the
bracket on a logarithmic scale, because the error of a rate matters in per cent. The result rests on deciding probes
alone: a bound that only a short probe saw is confirmed before the search ends.

Each deciding probe is judged by a Wilson interval of the share of requests that met all limits. An undecided rate is
probed again with as many requests as it had so far, up to a cap. A Wilson interval is for independent requests, but
those in one queue miss their limits together. Their number is therefore divided by the correlation length of good and
bad ones in a row. On a simulated M/M/1 queue, whose share of good requests falls slowly with the rate, this lowers the
standard deviation of the result from 8 % to 5 %; for a batching server, where it falls at once, it is 1 % either way.
"""

from __future__ import annotations

from enum import StrEnum
from math import ceil, exp, log2, sqrt
from statistics import NormalDist

import numpy as np
from msgspec import Struct

from loadtest.analysis.measurements import Measurements
from loadtest.analysis.slo import Objectives, good_requests
from loadtest.analysis.statistics import (
    NUM_TREND_BATCHES,
    Booleans,
    Floats,
    batch_medians,
    correlation_length,
    trend,
    wilson_interval,
)
from loadtest.errors import LoadTestError

BRACKET_FACTOR = 2.0
BRACKET_SHARE = 1.0 / 3.0  # of the tolerance: the widest final bracket; the rest is for rates that stay undecided
MIN_GROWTH = 0.1  # of the mean, over the observed part: slower growth is not saturation

# Short probes.
MIN_SHORT_S = 2.0
SHORT_LATENCIES = 5.0  # the shortest length, in end-to-end latencies
MIN_SHORT_REQUESTS = 10
MIN_SHORT_BAD = 2  # one bad request may be a cold start

# Deciding probes. Lengths in end-to-end latencies.
MIN_LATENCIES = 20.0
WARM_UP_LATENCIES = 3.0
COOL_DOWN_LATENCIES = 1.0
WARM_UP_SHARE = 0.2  # of the counted part: near its limit, a server settles more slowly than a request takes
TOO_SHORT_LATENCIES = 10.0  # a rate cannot be met by a probe shorter than this, in latencies that it saw itself
MIN_LAST_LOOK = 0.1  # of the cap: a shorter look would not change the decision
MIN_LOOKS_IN_CAP = 4  # at high rates, the first look alone may reach `max_requests`


class Decision(StrEnum):
    """What a probe, or all probes of a rate, came to."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"
    SATURATED = "saturated"  # requests arrive faster than they are served: missed, however many were good until then
    CLIENT = "client"  # the client was late, so the probe says nothing about the server
    PASSED = "passed"  # a short probe found nothing against the rate


class Probe(Struct, frozen=True):
    """A run of Poisson arrivals. Requests count if they start after the warm-up and before the cool-down."""

    rate: float  # requests/s
    duration_s: float  # warm-up and cool-down included
    warm_up_s: float
    cool_down_s: float
    is_deciding: bool
    look: int = 0  # how often this rate has been probed before


class Observation(Struct, frozen=True):
    """What a probe observed of the requests that count; see `observe`."""

    num_good: int  # met all limits
    num_requests: int
    correlation_length: float = 1.0  # requests in a row that count as one independent request
    span_s: float = float("inf")  # the time in which they started
    latency_s: float = 0.0  # median end-to-end latency; 0 if nothing was answered
    num_in_flight: float | None = None  # mean
    is_saturated: bool = False
    is_client_limited: bool = False
    is_unanswered: bool = False  # no request was answered, and none timed out


class Probed(Struct, frozen=True):
    """All that is known of one rate."""

    rate: float
    num_attained: int
    num_total: int
    low: float  # of the share that meets all limits
    high: float
    decision: Decision
    is_deciding: bool = True


class Result(Struct, frozen=True):
    """The result of a search.

    `rate` was shown to meet the limits; None means that no rate was. `missed_rate` is the lowest rate that was not
    shown to meet them; None means that all rates up to `max_rate` do.
    """

    rate: float | None
    missed_rate: float | None
    stopped_by: str  # why the search ended, for people
    probed: list[Probed]
    is_limited_by_client: bool = False  # the client could not produce `missed_rate`, so the server may do more


class _Looks(Struct):
    """The probes of the current rate so far."""

    rate: float
    is_deciding: bool
    cap: int  # of requests: what is undecided then counts as not met
    num_good: int = 0
    num_total: int = 0
    num_independent: float = 0.0
    look: int = 0
    was_client_limited: bool = False


class Search:
    """A search: run each probe that `next_probe` returns and `record` what it observed; at the end read `result`.

    `next_probe` returns None at the end. A rate that is still undecided after `max_requests` counts as not met: the
    reported rate has been shown to meet the limits, and errs on the low side.

    A probe during which the client was late is repeated once. If the client is late again, the rate counts as missed
    and the result says why. While no rate has met the limits, the search ends early if no lower rate can be better (see
    `_stop_if_hopeless`).
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
        min_duration_s: float = 20.0,
        confidence: float = 0.95,
    ) -> None:
        """A rate's first deciding probe counts at least `num_requests`, over at least `min_duration_s`.

        Raises LoadTestError for values with which nothing could be decided.
        """
        _check(attainment, start_rate, min_rate, max_rate, tolerance, num_requests, max_requests, min_duration_s)
        self.attainment = attainment
        self.min_rate = min_rate
        self.max_rate = max_rate
        self.tolerance = tolerance
        self.num_requests = num_requests
        self.max_requests = max_requests
        self.min_duration_s = min_duration_s
        # Several looks at a rate are several chances to be misled: each gets its part of the error (Bonferroni).
        num_looks = 1 + ceil(log2(max(max_requests / num_requests, MIN_LOOKS_IN_CAP)))
        self.confidence = 1.0 - (1.0 - confidence) / num_looks
        if (needed := num_needed(attainment, self.confidence)) > max_requests:
            raise LoadTestError(
                f"an attainment of {attainment:g} cannot be shown with {max_requests} requests at a rate, even if all "
                f"of them are good; set --max-probe-requests to {needed} or more, or lower --attainment"
            )
        self._latency_s = 0.0  # of a request, as the last good probe had it
        self._passed: list[float] = []  # rates that passed a short probe
        self._suspect: float | None = None  # the lowest rate that missed in a short probe
        self._met: float | None = None  # the highest rate that met the limits in deciding probes
        self._missed: float | None = None  # the lowest rate that did not
        self._probed: list[Probed] = []
        self._stopped_by = ""
        self._current: _Looks | None = None
        self._begin(start_rate, is_deciding=False)

    def next_probe(self) -> Probe | None:
        """Return the probe to run, the same one until it is recorded, or None if there is a result."""
        now = self._current
        if now is None:
            return None
        latency_s, warm_up_s, cool_down_s = self._latency_s, self._latency_s, 0.0
        if not now.is_deciding:
            shortest_s = min(MIN_SHORT_S, self.min_duration_s)
            counted_s = max(shortest_s, SHORT_LATENCIES * latency_s, MIN_SHORT_REQUESTS / now.rate)
        else:
            if now.num_total:  # as many requests as so far, up to the cap
                counted_s = min(now.num_total, now.cap - now.num_total) / now.rate
            else:
                # Arrivals are random: with two standard deviations more, there are enough of them 39 times in 40.
                wanted = self.num_requests + 2.0 * sqrt(self.num_requests)
                counted_s = max(wanted / now.rate, self.min_duration_s, MIN_LATENCIES * latency_s)
            warm_up_s = max(WARM_UP_LATENCIES * latency_s, WARM_UP_SHARE * counted_s)
            cool_down_s = COOL_DOWN_LATENCIES * latency_s
        duration_s = warm_up_s + counted_s + cool_down_s
        return Probe(now.rate, duration_s, warm_up_s, cool_down_s, now.is_deciding, now.look)

    def record(self, probe: Probe, observed: Observation) -> Decision:
        """Take in what `probe` observed. Raises LoadTestError if no request counts."""
        now = self._current
        assert now is not None and probe == self.next_probe(), "this is not the probe that was asked for"
        if observed.num_requests == 0:
            raise LoadTestError(
                f"no request of the probe at {probe.rate:g} requests/s started after its warm-up; "
                "raise --probe-requests"
            )
        if observed.is_client_limited and not now.was_client_limited:
            now.was_client_limited = True
            now.look += 1
            return Decision.CLIENT
        if now.num_total == 0:
            now.cap = max(self.max_requests, MIN_LOOKS_IN_CAP * observed.num_requests)
        now.num_good += observed.num_good
        now.num_total += observed.num_requests
        now.num_independent += observed.num_requests / observed.correlation_length
        share = now.num_good / now.num_total
        low, high = wilson_interval(share * now.num_independent, now.num_independent, self.confidence)
        decision = self._decide(now, observed, low, high)
        # Requests took longer than expected, so too few of them followed each other: probe again, for longer.
        if decision is Decision.MET and observed.span_s < TOO_SHORT_LATENCIES * observed.latency_s:
            decision = Decision.UNDECIDED
            self._latency_s = observed.latency_s
        if decision is Decision.UNDECIDED and now.num_total < (1.0 - MIN_LAST_LOOK) * now.cap:
            now.look += 1
            return decision
        self._probed.append(Probed(now.rate, now.num_good, now.num_total, low, high, decision, now.is_deciding))
        self._learn(now, decision, observed)
        if not self._stop_if_hopeless(observed):
            self._choose_next()
        return decision

    @property
    def result(self) -> Result:
        """The result; only once `next_probe` has returned None."""
        assert self._current is None, "there is a probe left to run"
        missed = self._ceiling
        is_limited_by_client = missed is not None and self._last(missed).decision is Decision.CLIENT
        return Result(self._met, missed, self._stopped_by, self._probed, is_limited_by_client)

    # -- what to probe next --------------------------------------------------------------------------------------------

    def _begin(self, rate: float, *, is_deciding: bool) -> None:
        self._current = _Looks(rate=rate, is_deciding=is_deciding, cap=self.max_requests)

    def _stop(self, reason: str) -> None:
        self._current = None
        self._stopped_by = reason

    @property
    def _ceiling(self) -> float | None:
        """The lowest rate that missed, in whichever kind of probe."""
        return min((each for each in (self._suspect, self._missed) if each is not None), default=None)

    @property
    def _floor(self) -> float | None:
        """The highest rate below the ceiling that was met, or that passed a short probe."""
        ceiling = self._ceiling
        candidates = [each for each in self._passed if ceiling is None or each < ceiling]
        if self._met is not None:
            candidates.append(self._met)
        return max(candidates, default=None)

    def _choose_next(self) -> None:
        floor, ceiling = self._floor, self._ceiling
        if floor is None:
            assert ceiling is not None
            if ceiling > self.min_rate:
                self._begin(max(ceiling / BRACKET_FACTOR, self.min_rate), is_deciding=False)
            else:
                self._stop(f"the lowest rate allowed, {self.min_rate:g}/s, which was not shown to meet the limits")
        elif ceiling is None and floor < self.max_rate:
            self._begin(min(floor * BRACKET_FACTOR, self.max_rate), is_deciding=False)
        elif floor != self._met:
            self._begin(floor, is_deciding=True)
        elif ceiling is None:
            self._stop(f"the highest rate allowed, {self.max_rate:g}/s, meets the limits")
        elif ceiling / floor > (1.0 + self.tolerance) ** BRACKET_SHARE:
            self._begin(sqrt(floor * ceiling), is_deciding=True)
        elif ceiling != self._missed:
            self._begin(ceiling, is_deciding=True)
        else:
            self._stop(f"{ceiling:.4g}/s, {(ceiling / floor - 1.0) * 100.0:.2g} % more: {self._why(ceiling)}")

    # -- what a probe says ---------------------------------------------------------------------------------------------

    def _decide(self, now: _Looks, observed: Observation, low: float, high: float) -> Decision:
        if observed.is_client_limited:
            return Decision.CLIENT
        if observed.is_saturated:
            return Decision.SATURATED
        is_missed = high < self.attainment
        if not now.is_deciding:
            num_bad = now.num_total - now.num_good
            return Decision.MISSED if is_missed and num_bad >= MIN_SHORT_BAD else Decision.PASSED
        if low >= self.attainment:
            return Decision.MET
        return Decision.MISSED if is_missed else Decision.UNDECIDED

    def _learn(self, now: _Looks, decision: Decision, observed: Observation) -> None:
        if decision is Decision.PASSED:
            self._passed.append(now.rate)
        elif decision is Decision.MET:
            self._met = now.rate
            if self._suspect is not None and self._suspect <= now.rate:
                self._suspect = None
        elif now.is_deciding:
            self._missed = now.rate
        else:
            self._suspect = now.rate
        if decision in (Decision.PASSED, Decision.MET):
            self._latency_s = observed.latency_s

    def _stop_if_hopeless(self, observed: Observation) -> bool:
        """Stop the search if no rate has met the limits and no lower rate can; return whether that is so.

        A lower rate leaves more requests alone with the server, and changes nothing for those that were alone already.
        Of Poisson arrivals with L in flight on average, a share of e^-L finds no other request there, and of these at
        least e^-L stay alone until they end (exact for equal service times and no queue; a queue leaves more alone).
        If more requests than the others missed their limits, even a request with the server to itself misses them.
        """
        last = self._probed[-1]
        if self._met is not None or self._passed or last.decision is not Decision.MISSED:
            return False
        if observed.is_unanswered:
            self._stop(f"{last.rate:.4g}/s, at which nothing was answered; a lower rate would not help")
            return True
        if observed.num_in_flight is None or last.high >= self.attainment * exp(-2.0 * observed.num_in_flight):
            return False
        self._stop(
            f"{last.rate:.4g}/s: {last.num_attained} of {last.num_total} requests met the limits with "
            f"{observed.num_in_flight:.2g} in flight on average, so even requests that had the server to themselves "
            "missed them; a lower rate would not help"
        )
        return True

    def _why(self, rate: float) -> str:
        last = self._last(rate)
        if last.decision is Decision.CLIENT:
            return "the client was the bottleneck, so the server's maximum may be higher"
        if last.decision is Decision.SATURATED:
            return "requests in flight and latency grew until the end, so the server cannot keep up"
        share = f"{last.num_attained} of {last.num_total} requests met the limits"
        return f"{share}, which leaves it undecided" if last.decision is Decision.UNDECIDED else share

    def _last(self, rate: float) -> Probed:
        return next(each for each in reversed(self._probed) if each.rate == rate)


def num_needed(attainment: float, confidence: float) -> int:
    """Return how many requests can show an attainment if all are good.

    The lower end of the Wilson interval is then n / (n + z^2).
    """
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
    min_duration_s: float,
) -> None:
    if not 0.0 < attainment < 1.0:
        raise LoadTestError(f"--attainment {attainment:g} is not between 0 and 1; for nearly all requests, use 0.999")
    if not 0.0 < min_rate <= start_rate <= max_rate:
        raise LoadTestError(
            f"--start-rate {start_rate:g} is not within {min_rate:g} to {max_rate:g} requests/s (--max-rate)"
        )
    if not 0.001 <= tolerance <= 1.0:
        raise LoadTestError(f"--tolerance {tolerance:g} is not within 0.001 to 1; 0.05 is 5 %")
    if not 1 <= num_requests <= max_requests:
        raise LoadTestError(f"--probe-requests {num_requests} is not within 1 to {max_requests} (--max-probe-requests)")
    if not 0.0 <= min_duration_s <= 86_400.0:
        raise LoadTestError(f"--probe-duration {min_duration_s:g} is not within 0 to 86,400 s")


# -- reading a probe ---------------------------------------------------------------------------------------------------


def observe(
    probe: Probe, measured: Measurements, objectives: Objectives, is_to_be_served: Booleans, *, has_timeouts: bool
) -> Observation:
    """Reduce a probe's measurements to what the search needs. `is_to_be_served` has one element for each request."""
    from_s, to_s = probe.warm_up_s, probe.duration_s - probe.cool_down_s
    counts = is_to_be_served & (measured.intended_s >= from_s) & (measured.intended_s < to_s)
    latencies_s = measured.e2e_s[counts & measured.is_answered]
    is_good = good_requests(objectives, measured.limited_s(), measured.is_answered)[counts]
    order = np.argsort(measured.intended_s[counts], kind="stable")
    return Observation(
        num_good=int(is_good.sum()),
        correlation_length=correlation_length(is_good[order].astype(np.float64)),
        num_requests=int(counts.sum()),
        span_s=to_s - from_s,
        latency_s=float(np.median(latencies_s)) if len(latencies_s) else 0.0,
        num_in_flight=num_in_flight(measured),
        is_saturated=is_saturated(measured, from_s),
        is_unanswered=not measured.is_answered.any() and not has_timeouts,
    )


def is_saturated(measured: Measurements, from_s: float = 0.0) -> bool:
    """Return whether requests arrived faster than they were served.

    Then both the number in flight and the time to the first token grow until the end. Either alone says little: the
    number in flight also grows while answers get longer, and TTFT while prompts do. Both are observed from `from_s`
    until the last request's start, after which the queue drains. A slope counts if it is significant although
    neighbouring moments of a queue resemble each other, and if it adds up to a tenth of the mean.
    """
    starts_s = measured.intended_s[measured.is_begun]
    starts_s = starts_s[starts_s >= from_s]
    if len(starts_s) < 4 * NUM_TREND_BATCHES or np.ptp(starts_s) == 0.0:
        return False
    edges_s = np.linspace(float(starts_s.min()), float(starts_s.max()), NUM_TREND_BATCHES + 1)
    in_flight = measured.in_flight().means(edges_s)
    belongs = measured.is_answered & (measured.intended_s >= edges_s[0])
    # Whole answers have no first token: their latency is that of the end.
    latency_s = np.where(np.isnan(measured.ttft_s), measured.e2e_s, measured.ttft_s)
    latencies = batch_medians(measured.intended_s[belongs], latency_s[belongs])
    return _grows((edges_s[:-1] + edges_s[1:]) / 2.0, in_flight) and _grows(*latencies)


def num_in_flight(measured: Measurements) -> float:
    """Return the mean number of requests in flight, from the first intended start to the last one."""
    starts_s = measured.intended_s[measured.is_begun]
    if len(starts_s) == 0 or starts_s.max() <= starts_s.min():
        return 0.0
    return measured.in_flight().mean(float(starts_s.min()), float(starts_s.max()))


def _grows(x: Floats, y: Floats) -> bool:
    line = trend(x, y)
    return line.is_rising and line.slope * float(np.ptp(x)) > MIN_GROWTH * float(y.mean())
