"""What a part of the torture found: claims with the figures that were demanded and measured."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

BUILD = Path(__file__).parents[2] / "build" / "torture"  # results, and the logs of the servers that were hurt


class Finding(Struct, frozen=True):
    """One line of the report. `is_kept` is None for a figure that is only told."""

    what: str
    demanded: str
    measured: str
    is_kept: bool | None = None


def table(findings: list[Finding]) -> str:
    """As Markdown; a miss is bold."""
    lines = ["| what | demanded | measured |", "|---|---|---|"]
    for finding in findings:
        measured = f"**{finding.measured}**" if finding.is_kept is False else finding.measured
        lines.append(f"| {finding.what} | {finding.demanded} | {measured} |")
    return "\n".join(lines)


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
