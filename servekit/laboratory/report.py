"""Write the figures of runs as a table for a terminal, values as JSON, and a number with its noun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from servekit.laboratory.summary import Summary

COLUMNS = {  # of the fields of Summary: title and form
    "tokens_per_s": ("tokens/s", "rate"),
    "tokens_per_s_while_waiting": ("tokens/s while requests wait", "rate"),
    "ttft_p50_s": ("TTFT p50", "time"),
    "ttft_p99_s": ("p99", "time"),
    "itl_p50_s": ("ITL p50", "time"),
    "itl_p99_s": ("p99", "time"),
    "idle_slot_share": ("idle slots", "share"),
    "unused_memory_share": ("unused KV memory", "share"),
    "cached_prompt_share": ("cached prompt", "share"),
    "last_token_s": ("last token", "time"),
    "duration_s": ("duration", "time"),
    "num_steps": ("steps", "count"),
}
COMPARISON = (
    *("tokens_per_s", "tokens_per_s_while_waiting", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"),
    *("idle_slot_share", "unused_memory_share", "duration_s"),
)


def as_table(title: str, rows: Sequence[tuple[str, Summary]], figures: Sequence[str] = COMPARISON) -> str:
    """Write one row for each run, as a Markdown table with columns of equal width."""
    cells = [[title, *(COLUMNS[name][0] for name in figures)]]
    cells += [[label, *(format_figure(name, getattr(summary, name)) for name in figures)] for label, summary in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(row, widths) for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + (":" if index else "-") for index, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return f"| {' | '.join(cells)} |"


def format_figure(name: str, value: float) -> str:
    """Write one figure of a Summary with its unit."""
    match COLUMNS[name][1]:
        case "time":
            return f"{value:.2f} s" if value >= 1.0 else f"{1e3 * value:.3g} ms"
        case "share":
            return f"{value:.1%}"
        case "rate":
            if not value:  # nothing ever waited
                return "-"
            return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        case _:
            return f"{value:,}"


def as_json(value: Any) -> str:
    """Write any of the laboratory's values as JSON."""
    return msgspec.json.format(msgspec.json.encode(value)).decode()


def counted(number: float, noun: str) -> str:
    """Return a number with its noun, such as `1 step` or `1,000 steps`."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"
