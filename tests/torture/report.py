"""Hold the findings of a torture part: claims with the demanded and the measured figures."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

BUILD = Path(__file__).parents[2] / "build" / "torture"  # results, and the logs of the servers


class Finding(Struct, frozen=True):
    """One line of the report. `is_kept` is None for a figure without a demand."""

    what: str
    demanded: str
    measured: str
    is_kept: bool | None = None


def table(findings: list[Finding]) -> str:
    """Return a Markdown table; figures that miss their demand are bold."""
    lines = ["| what | demanded | measured |", "|---|---|---|"]
    for finding in findings:
        measured = f"**{finding.measured}**" if finding.is_kept is False else finding.measured
        lines.append(f"| {finding.what} | {finding.demanded} | {measured} |")
    return "\n".join(lines)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which `share` of the values lie, or 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
