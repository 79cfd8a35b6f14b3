"""Figures as text, and as tables for issues and pull requests."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from loadtest.comparison import Comparison
from loadtest.record import Outcome
from loadtest.statistics import Distribution
from loadtest.summary import Failure, Figures, Summary, prefix_cache_hit_rate

NOTHING = "-"
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "p999", "max")


def as_time(seconds: float | None) -> str:
    """Three digits, in the unit that fits: 832 µs, 12.3 ms, 4.56 s."""
    if seconds is None:
        return NOTHING
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * factor >= 0.9995:
            return f"{as_number(seconds * factor)} {unit}"
    return "0 s" if seconds == 0.0 else f"{as_number(seconds * 1e6)} µs"


def as_number(value: float | None) -> str:
    """Three digits, and all of those before the point, in groups."""
    if value is None:
        return NOTHING
    if abs(value) >= 99.95 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def as_share(value: float | None) -> str:
    """Per cent; never 100 % of what is not all, nor 0 % of what is not none."""
    if value is None:
        return NOTHING
    for digits in (2, 3, 4):
        text = f"{value:.{digits}%}"
        if value in (0.0, 1.0) or float(text[:-1]) not in (0.0, 100.0):
            return text.replace("%", " %")
    return "< 0.0001 %" if value < 0.5 else "> 99.9999 %"


# -- what a table says of a span of a run -----------------------------------------------------------------------------

TIMES: dict[str, Callable[[Figures], Distribution | None]] = {
    "TTFT": lambda figures: figures.ttft_s,
    "TTFT from the actual start": lambda figures: figures.ttft_from_start_s,
    "second token": lambda figures: figures.second_token_s,
    "ITL": lambda figures: figures.itl_s,
    "pause between events": lambda figures: figures.pause_s,
    "TPOT": lambda figures: figures.tpot_s,
    "E2E": lambda figures: figures.e2e_s,
    "E2E from the actual start": lambda figures: figures.e2e_from_start_s,
    "queue, told by the server": lambda figures: figures.queue_s,
    "lag of the client": lambda figures: figures.client_lag_s,
}


def percentile_rows(figures: Figures, event_loop_lag_s: Distribution | None = None) -> Iterator[list[str]]:
    """For each time that was measured its name, how many there were, and PERCENTILES."""
    told = {name: of(figures) for name, of in TIMES.items()} | {"event loop of the client": event_loop_lag_s}
    for name, distribution in told.items():
        if distribution is not None:
            yield [
                name,
                as_number(distribution.num),
                *(as_time(getattr(distribution, percentile)) for percentile in PERCENTILES),
            ]


def headline(summary: Summary, figures: Figures) -> dict[str, str]:
    """What an issue needs to know, by what it is."""
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
    for name in ("TTFT", "ITL", "TPOT", "E2E", "lag of the client"):
        told = TIMES[name](figures)
        rows[f"{name} p50 / p99"] = f"{as_time(told.p50)} / {as_time(told.p99)}" if told else NOTHING
        if name in ("TTFT", "E2E", "lag of the client"):
            rows[f"{name} p99.9 / max"] = f"{as_time(told.p999)} / {as_time(told.max)}" if told else NOTHING
    loop = summary.event_loop_lag_s
    rows["event loop of the client p99 / max"] = f"{as_time(loop.p99)} / {as_time(loop.max)}" if loop else NOTHING
    hit_rate = prefix_cache_hit_rate([summary])
    if hit_rate is not None:
        rows["prefix cache hits, told by the server"] = f"{as_share(hit_rate)} of prompt tokens"
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
    told = f"{as_number(num_right)} of {as_number(num_right + num_wrong)}"
    return f"{told}: {as_number(num_wrong)} WRONG" if num_wrong else told


def distinct(labels: Sequence[str]) -> list[str]:
    """Repetitions that are called alike get their number."""
    totals, so_far = Counter(labels), Counter[str]()
    told = []
    for label in labels:
        so_far[label] += 1
        told.append(label if totals[label] == 1 else f"{label} ({so_far[label]} of {totals[label]})")
    return told


# -- tables -----------------------------------------------------------------------------------------------------------


def table(summaries: Sequence[Summary], labels: Sequence[str]) -> str:
    """One column for each run, and under it what was run, on what, and whether it can be believed."""
    labels = distinct(labels)
    columns = [headline(each, each.full) for each in summaries]
    steady = [headline(each, each.steady) if each.steady else {} for each in summaries]
    names = dict.fromkeys(name for column in columns for name in column)
    lines = [_row(["", *labels]), _row(["---", *("---:" for _ in labels)])]
    lines += [_row([name, *(column.get(name, NOTHING) for column in columns)]) for name in names]
    for name in ("output tokens/s", "TTFT p50 / p99", "TPOT p50 / p99"):
        if any(steady):
            lines.append(_row([f"{name}, steady state", *(column.get(name, NOTHING) for column in steady)]))
    lines.append(_row(["failures", *(frequent_failures(each) for each in summaries)]))
    lines.append(_row(["valid", *("yes" if each.is_valid else "**no**" for each in summaries)]))
    lines.append("")
    for label, summary in zip(labels, summaries, strict=True):
        lines += _below(label, summary)
    return "\n".join(lines) + "\n"


def comparison_table(comparison: Comparison) -> str:
    """b against a, with the interval of each ratio."""
    share = f"{comparison.confidence:.0%}".replace("%", " %")
    lines = [
        _row(["", comparison.a, comparison.b, "ratio", f"{share} interval", f"{comparison.b} is"]),
        _row(["---", "---:", "---:", "---:", "---:", "---"]),
    ]
    for each in comparison.figures:
        sides = [as_time(value) if each.unit == "s" else as_number(value) for value in (each.a, each.b)]
        name = each.name if each.unit == "s" else f"{each.name}/s"
        interval = NOTHING if each.low is None or each.high is None else f"{each.low:.3f} to {each.high:.3f}"
        lines.append(_row([name, *sides, f"{each.ratio:.3f}", interval, each.verdict]))
    lines += ["", *(f"- Mind: {_text(each)}." for each in comparison.warnings)]
    return "\n".join(lines).rstrip("\n") + "\n"


def frequent_failures(summary: Summary) -> str:
    """The three most frequent kinds."""
    kinds = [f"{as_number(each.num)} {failure_label(each)}" for each in summary.failures[:3]]
    num_more = sum(each.num for each in summary.failures[3:])
    return ", ".join(kinds + ([f"{as_number(num_more)} others"] if num_more else [])) or "none"


def failure_label(failure: Failure) -> str:
    return outcome_label(failure.outcome, failure.status, failure.error)


def outcome_label(outcome: str, status: int, error: str) -> str:
    """`refused 503 queue_full`; a status of 0 is none."""
    return " ".join(part for part in (outcome, str(status or ""), error) if part)


def _below(label: str, summary: Summary) -> Iterator[str]:
    environment = summary.environment
    yield f"- {_text(label)}: {_code(environment.command)} at {_text(environment.started_at)}"
    version = f", loadtest {_text(environment.version)}" if environment.version else ""
    yield f"  - on {_text(environment.host)}, Python {_text(environment.python)}{version}"
    counted = ", ".join(f"{as_number(num)} by {how}" for how, num in summary.tokens_counted_by.items()) or "none"
    yield (
        f"  - {_text(summary.settings.arrivals)}, {_text(summary.settings.workload)}, seed {summary.settings.seed}, "
        f"door {summary.settings.door}; tokens counted: {counted}"
    )
    yield from (f"  - **not valid**: {_text(reason)}" for reason in summary.invalid_because)
    yield from (f"  - {_text(note)}" for note in summary.notes)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_text(cell) for cell in cells)} |"


def _text(value: str) -> str:
    """As it is, whoever wrote it: an error's text must not end a cell, or be a link or an image."""
    return re.sub(r"([\\|<>\[\]`])", r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """In backticks, more of them than it has in a row itself."""
    line = " ".join(value.split())
    fence = "`" * (1 + max((len(each) for each in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"
