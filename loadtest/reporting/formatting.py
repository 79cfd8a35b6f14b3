"""Figures as text, for tables and pages alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from loadtest.analysis.statistics import Distribution
from loadtest.analysis.summary import Failure, Figures, Summary, prefix_cache_hit_rate
from loadtest.record import Outcome

NOTHING = "-"
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "p999", "max")


def as_time(seconds: float | None) -> str:
    """Format with three digits in the unit that fits: 832 µs, 12.3 ms, 4.56 s."""
    if seconds is None:
        return NOTHING
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 0.9995:
            return f"{as_number(seconds * factor)} {unit}"
    return "0 s" if seconds == 0.0 else f"{as_number(seconds * 1e6)} µs"


def as_number(value: float | None) -> str:
    """Format with three digits, or with all digits before the decimal point, in groups."""
    if value is None:
        return NOTHING
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def as_share(value: float | None) -> str:
    """Format as per cent; 100 % only for all, 0 % only for none."""
    if value is None:
        return NOTHING
    for digits in (2, 3, 4):
        text = f"{value:.{digits}%}"
        if value in (0.0, 1.0) or float(text[:-1]) not in (0.0, 100.0):
            return text.replace("%", " %")
    return "< 0.0001 %" if value < 0.5 else "> 99.9999 %"


# -- rows of tables ----------------------------------------------------------------------------------------------------

TIMES: dict[str, Callable[[Figures], Distribution | None]] = {
    "TTFT": lambda figures: figures.ttft_s,
    "TTFT from the actual start": lambda figures: figures.ttft_from_start_s,
    "second token": lambda figures: figures.second_token_s,
    "ITL": lambda figures: figures.itl_s,
    "pause between events": lambda figures: figures.pause_s,
    "TPOT": lambda figures: figures.tpot_s,
    "E2E": lambda figures: figures.e2e_s,
    "E2E from the actual start": lambda figures: figures.e2e_from_start_s,
    "queue, as the server reports it": lambda figures: figures.queue_s,
    "client lag": lambda figures: figures.client_lag_s,
}


def percentile_rows(figures: Figures, event_loop_lag_s: Distribution | None = None) -> Iterator[list[str]]:
    """Yield, for each time that was measured, its name, the number of values and PERCENTILES."""
    times = {name: of(figures) for name, of in TIMES.items()} | {"client event loop lag": event_loop_lag_s}
    for name, distribution in times.items():
        if distribution is not None:
            yield [
                name,
                as_number(distribution.num),
                *(as_time(getattr(distribution, percentile)) for percentile in PERCENTILES),
            ]


def headline(summary: Summary, figures: Figures) -> dict[str, str]:
    """Return the most important figures by name."""
    rows = {
        "requests answered": f"{as_number(figures.num_answered)} of {as_number(figures.num_requests)}",
        "requests/s": as_number(figures.requests_per_s),
        "output tokens/s": as_number(figures.output_tokens_per_s),
        "input tokens/s": as_number(figures.input_tokens_per_s),
        "tokens/s per user, p50": as_number(
            figures.tokens_per_s_per_user.p50 if figures.tokens_per_s_per_user else None
        ),
        "in flight, mean / max": f"{as_number(figures.in_flight_mean)} / {as_number(figures.in_flight_max)}",
    }
    for name in ("TTFT", "ITL", "TPOT", "E2E", "client lag"):
        times = TIMES[name](figures)
        rows[f"{name} p50 / p99"] = f"{as_time(times.p50)} / {as_time(times.p99)}" if times else NOTHING
        if name in ("TTFT", "E2E", "client lag"):
            rows[f"{name} p99.9 / max"] = f"{as_time(times.p999)} / {as_time(times.max)}" if times else NOTHING
    loop = summary.event_loop_lag_s
    rows["client event loop lag p99 / max"] = f"{as_time(loop.p99)} / {as_time(loop.max)}" if loop else NOTHING
    hit_rate = prefix_cache_hit_rate([summary])
    if hit_rate is not None:
        rows["prefix cache hits, as the server reports them"] = f"{as_share(hit_rate)} of prompt tokens"
    if summary.settings.verifies:
        rows["answers verified"] = _verified(summary.outcomes)
    if figures.goodput is not None:
        good = figures.goodput
        share = f"{as_share(good.share)}, {as_number(good.requests_per_s)} requests/s"
        rows[f"goodput ({summary.objectives})"] = share
    for verdict in summary.verdicts:
        demand = verdict.demand
        value = "too many failed, or none measured" if verdict.value_s is None else as_time(verdict.value_s)
        name = f"{demand.name} {demand.statistic} within {as_time(demand.limit_s)}"
        rows[name] = f"{value}: {'met' if verdict.is_met else 'MISSED'}"
    return rows


def _verified(outcomes: Mapping[str, int]) -> str:
    num_right, num_wrong = outcomes.get(Outcome.OK.value, 0), outcomes.get(Outcome.WRONG.value, 0)
    text = f"{as_number(num_right)} of {as_number(num_right + num_wrong)}"
    return f"{text}: {as_number(num_wrong)} WRONG" if num_wrong else text


def distinct(labels: Sequence[str]) -> list[str]:
    """Number the repetitions that have the same label."""
    totals, so_far = Counter(labels), Counter[str]()
    numbered = []
    for label in labels:
        so_far[label] += 1
        numbered.append(label if totals[label] == 1 else f"{label} ({so_far[label]} of {totals[label]})")
    return numbered


def frequent_failures(summary: Summary) -> str:
    """Return the three most frequent kinds of failure as text."""
    kinds = [f"{as_number(each.num)} {failure_label(each)}" for each in summary.failures[:3]]
    num_more = sum(each.num for each in summary.failures[3:])
    return ", ".join(kinds + ([f"{as_number(num_more)} others"] if num_more else [])) or "none"


def failure_label(failure: Failure) -> str:
    return outcome_label(failure.outcome, failure.status, failure.error)


def outcome_label(outcome: str, status: int, error: str) -> str:
    """Return, for example, `refused 503 queue_full`; a status of 0 is left out."""
    return " ".join(part for part in (outcome, str(status or ""), error) if part)
