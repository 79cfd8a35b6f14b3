"""Tables in Markdown, for issues and pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from loadtest.analysis.comparison import Comparison
from loadtest.analysis.summary import Summary
from loadtest.reporting.formatting import NOTHING, as_number, as_time, distinct, frequent_failures, headline


def table(summaries: Sequence[Summary], labels: Sequence[str]) -> str:
    """Return a table with one column for each run, and below it what was run, on what, and whether it is valid."""
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
    """Return a table of b against a, with the interval of each ratio."""
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
    lines += ["", *(f"- Note: {_text(each)}." for each in comparison.warnings)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _below(label: str, summary: Summary) -> Iterator[str]:
    environment = summary.environment
    yield f"- {_text(label)}: {_code(environment.command)} at {_text(environment.started_at)}"
    version = f", loadtest {_text(environment.version)}" if environment.version else ""
    yield f"  - on {_text(environment.host)}, Python {_text(environment.python)}{version}"
    counted = ", ".join(f"{as_number(num)} by {how}" for how, num in summary.tokens_counted_by.items()) or "none"
    yield (
        f"  - {_text(summary.settings.arrivals)}, {_text(summary.settings.workload)}, seed {summary.settings.seed}, "
        f"API {summary.settings.api}; tokens counted: {counted}"
    )
    yield from (f"  - **not valid**: {_text(reason)}" for reason in summary.invalid_because)
    yield from (f"  - {_text(note)}" for note in summary.notes)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_text(cell) for cell in cells)} |"


def _text(value: str) -> str:
    """Escape Markdown. A server wrote some of the text: it must not end a cell or become a link or an image."""
    return re.sub(r"([\\|<>\[\]`])", r"\\\1", " ".join(value.split()))


def _code(value: str) -> str:
    """Put into backticks, more of them than the text has in a row."""
    line = " ".join(value.split())
    fence = "`" * (1 + max((len(each) for each in re.findall("`+", line)), default=0))
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"
