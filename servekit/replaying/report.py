"""Write a recorded and a simulated run as a table for a terminal and as JSON."""

from __future__ import annotations

from msgspec import Struct

from servekit.replaying.run_record import Figures

ROWS = {  # of the fields of Figures: title and form
    "tokens_per_s": ("tokens/s", "rate"),
    "ttft_p50_s": ("TTFT p50", "time"),
    "ttft_p99_s": ("TTFT p99", "time"),
    "itl_p50_s": ("ITL p50", "time"),
    "itl_p99_s": ("ITL p99", "time"),
    "waiting_p50_s": ("waiting for a slot p50", "time"),
    "waiting_p99_s": ("waiting for a slot p99", "time"),
    "mean_waiting": ("requests that wait, mean", "rate"),
    "num_preemptions": ("preemptions", "count"),
    "cached_prompt_share": ("cached prompt", "share"),
    "peak_kv_share": ("KV blocks in use, peak", "share"),
    "num_steps": ("steps", "count"),
    "num_output_tokens": ("tokens", "count"),
    "num_past_deadline": ("requests past their deadline", "count"),
    "num_refused": ("requests that never fit", "count"),
    "duration_s": ("duration", "time"),
}
OPTIONAL = ("num_past_deadline", "num_refused")  # rows that are left out if both runs have zero


class Comparison(Struct, frozen=True, kw_only=True):
    """Two runs of the same requests."""

    file: str
    num_requests: int
    changes: dict[str, str]  # by the name of a setting: "what it was → what it would be"
    step_times: str  # sim:SPEC
    step_time_error: float | None  # median relative error of the fitted step times; None with those of a model
    happened: Figures
    replayed: Figures


def rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """The lines of the table: title, what happened, what would have happened, and the change."""
    lines = []
    for name, (title, form) in ROWS.items():
        before, after = getattr(comparison.happened, name), getattr(comparison.replayed, name)
        if name in OPTIONAL and not before and not after:
            continue
        lines.append((title, _text(before, form), _text(after, form), _change(before, after, form)))
    return lines


def as_text(comparison: Comparison) -> str:
    """Write the comparison for a terminal."""
    table = [("", "happened", "replayed", "change"), *rows(comparison)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [headline(comparison), ""]
    for title, *cells in table:
        line = [title.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        lines.append("  ".join(line).rstrip())
    lines += ["", step_times_text(comparison)]
    return "\n".join(lines)


def headline(comparison: Comparison) -> str:
    """Which requests were replayed, and what is different."""
    changes = ", ".join(f"{name} {change}" for name, change in comparison.changes.items())
    return f"{comparison.file}: {comparison.num_requests:,} requests; {changes or 'the same settings'}"


def step_times_text(comparison: Comparison) -> str:
    """Where the step times of the replay come from."""
    if comparison.step_time_error is None:
        return f"Step times: those of {comparison.step_times}."
    error = comparison.step_time_error
    return f"Step times: fitted to the journal, {comparison.step_times}; median error of a step: {error:.1%}."


def _text(value: float, form: str) -> str:
    match form:
        case "time":
            return f"{value:,.2f} s" if value >= 1.0 else f"{1e3 * value:,.4g} ms"
        case "share":
            return f"{value:.1%}"
        case "rate":
            return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        case _:
            return f"{value:,}"


def _change(before: float, after: float, form: str) -> str:
    if form in ("count", "share") or not before:
        return ""
    change = after / before - 1.0
    return f"{change:+,.0%}" if abs(change) >= 1.0 else f"{change:+.1%}"
