"""Write the result of an evaluation as text: tables that a terminal and Markdown show alike, or JSON."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from servekit.client.safe_text import safe_line
from servekit.evaluation.comparison import Comparison
from servekit.evaluation.measurement import Summary
from servekit.evaluation.statistics import Interval


class Report(Struct):
    """What an evaluation has found."""

    servers: list[Summary]
    comparison: Comparison | None
    losses: list[str]  # significant losses over the limits, each as a sentence


def as_json(report: Report) -> str:
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def as_markdown(report: Report) -> str:
    """Return the tables, and whether there is a loss over the limits."""
    parts = [_servers(report.servers)]
    comparison = report.comparison
    if comparison is None:
        if report.servers[0].categories:
            parts.append(_categories(report.servers[0]))
        return "\n".join(parts)
    parts += [_perplexity(comparison), _differences(comparison), _answers(comparison)]
    losses = [f"LOSS: {safe_line(loss)}" for loss in report.losses]
    parts.append("\n".join(losses) or "No significant loss over the limits.")
    return "\n".join(part for part in parts if part).rstrip("\n") + "\n"


def _servers(servers: list[Summary]) -> str:
    rows = [
        [
            server.url,
            server.model,
            "-" if server.perplexity is None else f"{server.num_text_tokens:,}",
            "-" if server.perplexity is None else _with_bounds(server.perplexity, ".4f"),
            "-" if server.bits_per_byte is None else f"{server.bits_per_byte:.4f}",
            f"{100 * server.categories[0].share.estimate:.2f} %" if server.categories else "-",
        ]
        for server in servers
    ]
    return table(["server", "model", "tokens", "perplexity (95 %)", "bits per byte", "right answers"], rows)


def _categories(server: Summary) -> str:
    rows = [
        [
            each.category,
            f"{each.num:,}",
            f"{each.num_right:,}",
            f"{100 * each.share.estimate:.2f} %",
            f"{100 * each.share.low:.2f} to {100 * each.share.high:.2f}",
        ]
        for each in server.categories
    ]
    return table(["category", "questions", "right", "share", "95 %"], rows)


def _perplexity(comparison: Comparison) -> str:
    found = comparison.perplexity
    if found is None:
        return ""
    increase = Interval(*(100 * value for value in (found.increase.estimate, found.increase.low, found.increase.high)))
    same = "-" if found.same_likeliest is None else f"{100 * found.same_likeliest:.2f} %"
    row = [f"{found.first:.4f}", f"{found.second:.4f}", _with_bounds(increase, "+.3f") + " %", same]
    return table(["perplexity", "against", "increase (95 %)", "same likeliest token"], [row])


def _differences(comparison: Comparison) -> str:
    if not comparison.categories:
        return ""
    rows = [
        [
            each.category,
            f"{each.num:,}",
            f"{100 * each.first:.2f} %",
            f"{100 * each.second:.2f} %",
            f"{100 * each.difference.estimate:+.2f}",
            f"{100 * each.difference.low:+.2f} to {100 * each.difference.high:+.2f}",
            f"{each.p_value:.3g}",
        ]
        for each in comparison.categories
    ]
    return table(["category", "questions", "right", "against", "difference", "95 %", "p"], rows)


def _answers(comparison: Comparison) -> str:
    rows = []
    if (found := comparison.agreement) is not None:
        share = f"{100 * found.num_identical / found.num:.2f} %"
        rows.append(["identical answers", f"{found.num_identical:,} of {found.num:,} ({share})"])
        if found.first_difference is not None:
            rows.append(["first token that differs, median", f"{found.first_difference:g} tokens are equal before it"])
    if (judged := comparison.judgement) is not None:
        rows.append(
            [
                f"judged by {judged.model}",
                f"{judged.num_first:,} better, {judged.num_second:,} worse, {judged.num_ties:,} ties, "
                f"{judged.num_unreadable:,} unreadable; p = {judged.p_value:.3g}",
            ]
        )
    return table(["answers", ""], rows) if rows else ""


def _with_bounds(interval: Interval, form: str) -> str:
    return f"{interval.estimate:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns: the first one to the left, the others to the right."""
    cells = [[safe_line(cell).replace("|", "\\|") for cell in row] for row in [heads, *rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(heads))]

    def line(row: list[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return "| " + " | ".join(aligned) + " |"

    rule = ["-" * (width - 1) + ":" if column else "-" * width for column, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])]) + "\n"
