"""Compute what a replica can serve: the real scheduler in virtual time, with the step times of a device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from statistics import mean, stdev

from msgspec import Struct

from servekit.laboratory.batching import MODES
from servekit.laboratory.summary import Summary, summarise
from servekit.laboratory.timeline import RequestTimeline, Timeline
from servekit.laboratory.virtual_run import LabSettings, StepDurations, VirtualRun
from servekit.laboratory.workload import Workload
from servekit.planning.demand import SLO_SHARE, ServiceLevel

SATURATING_RATE = 1e9  # requests per second: all come at once
SEARCH_STEPS = 6  # each one halves the interval in which the highest rate lies
LOADS = (0.3, 0.6, 0.85, 1.1)  # of the rate that a replica can serve at most
MakeRequests = Callable[[float, int], Workload]  # (requests per second, seed)


class LoadPoint(Struct, frozen=True, kw_only=True):
    """One rate of arrivals, played with several seeds: means, and the standard error of the goodput."""

    rate: float  # requests per second
    goodput: float  # of these, within the service level
    goodput_error: float
    summary: Summary  # of the first seed


class Capacity(Struct, frozen=True, kw_only=True):
    """What one replica serves."""

    max_rate: float  # requests per second that it can compute, whatever the latency
    slo_rate: float  # the highest rate with 99 % of the requests within the service level; 0 if there is none
    points: tuple[LoadPoint, ...]


def measure_capacity(
    make_requests: MakeRequests,
    settings: LabSettings,
    model: StepDurations,
    service_level: ServiceLevel,
    seeds: tuple[int, ...],
) -> Capacity:
    """Play a replica at several rates, and search for the highest one that keeps the service level."""

    def play(rate: float, seed: int) -> Timeline:
        return VirtualRun(make_requests(rate, seed), MODES["chunked"], settings, model).play()

    def good_share(rate: float, seed: int) -> float:
        timeline = play(rate, seed)
        return mean(meets(request, service_level) for request in timeline.requests.values())

    max_rate = steady_rate(play(SATURATING_RATE, seeds[0]))
    # A short run may keep the service level beyond that rate, because its queue has no time to grow.
    low, high = 0.0, max_rate
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        is_kept = mean(good_share(middle, seed) for seed in seeds) >= SLO_SHARE
        low, high = (middle, high) if is_kept else (low, middle)
    points = []
    for load in LOADS:
        rate = load * max_rate
        shares = [good_share(rate, seed) for seed in seeds]
        error = stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
        points.append(
            LoadPoint(
                rate=rate,
                goodput=rate * mean(shares),
                goodput_error=rate * error,
                summary=summarise(play(rate, seeds[0]), settings.num_slots),
            )
        )
    return Capacity(max_rate=max_rate, slo_rate=low, points=tuple(points))


def steady_rate(timeline: Timeline) -> float:
    """How many requests end per second between the beginning, when slots fill, and the last admission."""
    requests = timeline.requests.values()
    ends_s = sorted(request.ended_s for request in requests)
    last_admitted_s = max(request.admitted_s or 0.0 for request in requests)
    first = len(ends_s) // 4
    last = bisect_right(ends_s, last_admitted_s) - 1
    if last <= first or ends_s[last] <= ends_s[first]:  # too few requests for the slots: nothing ever waited for long
        return len(ends_s) / ends_s[-1]
    return (last - first) / (ends_s[last] - ends_s[first])


def meets(request: RequestTimeline, service_level: ServiceLevel) -> bool:
    """Whether a request's first token and its mean time between two tokens are within the limits."""
    times_s = request.token_times_s
    if times_s[0] - request.arrival_s > service_level.ttft_s:
        return False
    return len(times_s) == 1 or (times_s[-1] - times_s[0]) / (len(times_s) - 1) <= service_level.tpot_s
