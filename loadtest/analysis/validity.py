"""Whether a run's figures can be trusted: how late the client was, what is missing, and what a reader has to know."""

from __future__ import annotations

import numpy as np

from loadtest.analysis.measurements import Measurements
from loadtest.analysis.slo import Objectives
from loadtest.analysis.statistics import Distribution, Floats, open_count
from loadtest.analysis.summary import Figures, Summary
from loadtest.planning.plan import Plan
from loadtest.target import Target

# How late the client may be. Beyond that, the run measures the client, and is not valid.
LAG_SHARE = 0.05  # of the median TTFT
MIN_LAG_LIMIT_S = 0.002  # what the self-test allows
NOTABLE_SHARE = 0.1  # of a reported p99.9 or maximum; a greater client lag is noted
CLIENT_WAS_LATE = "the client itself was up to"  # the beginning of that note


def client_lags_s(measured: Measurements, target: Target) -> Floats:
    """Return each request's actual start minus its intended one; NaN where the client did not cause the delay.

    With `max_connections`, a request that finds all of them in use waits for the server. Each client process is taken
    to have an equal share of the connections.
    """
    lags_s = np.where(measured.is_begun, measured.started_s - measured.intended_s, np.nan)
    if target.max_connections is None:
        return lags_s
    processes = np.unique(measured.process)
    limit = target.max_connections // max(1, len(processes)) * target.batch_size
    for process in processes:
        own = measured.is_begun & (measured.process == process)
        busy = open_count(measured.started_s[own], measured.ended_s[own]).before(measured.intended_s[own])
        lags_s[own] = np.where(busy >= limit, np.nan, lags_s[own])
    return lags_s


def missing_records(plan: Plan, measured: Measurements) -> list[str]:
    planned = {each.index for each in plan.requests}
    recorded = [int(index) for index in measured.index]
    reasons = []
    if missing := len(planned - set(recorded)):
        reasons.append(f"{missing} of {len(planned)} planned requests have no record")
    if twice := len(recorded) - len(set(recorded)):
        reasons.append(f"{twice} requests have more than one record")
    if unknown := len(set(recorded) - planned):
        reasons.append(f"{unknown} records are of requests that are not in the plan")
    return reasons


def lag_limit_s(figures: Figures) -> float:
    """Return how late the client may be at the 99th percentile for its latencies to be valid.

    This is LAG_SHARE of the median TTFT, or MIN_LAG_LIMIT_S if that is more. Whole answers have no TTFT; the time to
    their end takes its place.
    """
    answer = figures.ttft_from_start_s or figures.e2e_from_start_s
    return max(MIN_LAG_LIMIT_S, LAG_SHARE * answer.p50 if answer else 0.0)


def client_lag_s(summary: Summary) -> float:
    """Return how late the client was at the 99th percentile, with requests or in its event loop."""
    lags_s = [lag_s.p99 for lag_s in (summary.full.client_lag_s, summary.event_loop_lag_s) if lag_s is not None]
    return max(lags_s, default=0.0)


def lag_limit_for_s(objectives: Objectives, figures: Figures) -> float:
    """Return how late the client may be, at the 99th percentile, to decide whether requests met their limits.

    This is LAG_SHARE of the tightest limit, or `lag_limit_s` if that is more. A lag moves both times that a TPOT is
    computed from by at most its own length, and the difference is divided by the tokens between them; a TPOT limit
    therefore allows as many times its own length.
    """
    num_later = max(1.0, figures.output_tokens.p50 - 1.0) if figures.output_tokens else 1.0
    tightest_s = min(limit.limit_s * (num_later if limit.name == "tpot" else 1.0) for limit in objectives.limits)
    return max(lag_limit_s(figures), LAG_SHARE * tightest_s)


def bottlenecks(full: Figures, loop_lag_s: Distribution | None) -> list[str]:
    if full.num_answered == 0:
        return ["no request was answered, so there is nothing to measure"]
    limit_s = lag_limit_s(full)
    median = "TTFT" if full.ttft_from_start_s else "E2E"
    reasons = []
    for what, lag_s in (("requests started", full.client_lag_s), ("its event loop ran", loop_lag_s)):
        if lag_s is not None and lag_s.p99 > limit_s:
            reasons.append(
                f"the client was the bottleneck: {what} {lag_s.p99 * 1e3:.3g} ms late at the 99th percentile, and "
                f"{limit_s * 1e3:.3g} ms are allowed ({LAG_SHARE * 100:g} % of the median {median}, at least "
                f"{MIN_LAG_LIMIT_S * 1e3:g} ms); use more --processes or a lower rate"
            )
    return reasons


def late_tails(full: Figures, loop_lag_s: Distribution | None) -> list[str]:
    """Name the figures that one stall of the client may have distorted although it took less than 1 % of the run.

    The 99th percentile of the lags does not show such a stall. p99.9 is checked as well as the maximum: a client that
    stalls for a thousandth of the run delays more than a thousandth of the requests, both those that start and those
    that are being answered.
    """
    late_s = max((each.max for each in (full.client_lag_s, loop_lag_s) if each is not None), default=0.0)
    if late_s <= MIN_LAG_LIMIT_S:
        return []
    doubtful = [
        f"{name} {percentile} ({value_s * 1e3:.3g} ms)"
        for name, figures in (("TTFT", full.ttft_s), ("pause", full.pause_s), ("E2E", full.e2e_s))
        if figures is not None
        for percentile, value_s in (("p99.9", figures.p999), ("max", figures.max))
        if late_s > NOTABLE_SHARE * value_s
    ]
    if not doubtful:
        return []
    return [f"{CLIENT_WAS_LATE} {late_s * 1e3:.3g} ms late, which may distort {', '.join(doubtful)}"]


def notes_on(measured: Measurements, full: Figures, num_lost_turns: int, num_forestalled: int) -> list[str]:
    notes = []
    if num_forestalled:
        notes.append(
            f"{num_forestalled} of {len(measured.records)} planned requests were not started before the run ended; no "
            "figure counts them"
        )
    if num_failed := int(measured.is_failed.sum()):
        notes.append(f"{num_failed} of {full.num_requests} requests failed; latencies leave them out")
    if num_stopped := int(measured.is_stopped.sum()):
        notes.append(
            f"{num_stopped} requests were in flight when the user stopped the run; latencies, goodput and objectives "
            "leave them out, so long requests are under-represented"
        )
    if num_lost_turns:
        notes.append(
            f"{num_lost_turns} turns were not sent because the turn before them had failed; they count as failed"
        )
    is_counted = measured.num_tokens_in_events > 0
    num_silent = int((is_counted & (measured.num_tokens > measured.num_tokens_in_events)).sum())
    if num_silent:
        notes.append(
            f"{num_silent} answers have more tokens than events, and the server does not report how many tokens an "
            "event has; their ITL is the time between events and too long"
        )
    return notes
