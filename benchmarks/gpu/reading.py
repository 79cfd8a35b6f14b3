"""Figures out of what others tell: spans of time, the times of tokens, pytest's last line. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence


def step_while_all_run(times: Sequence[Sequence[float]]) -> float:
    """The mean time between two tokens of a sequence, from when each of them has one until the first one ends.

    Raises ValueError if they were never all there.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    num_tokens = sum(begin < time <= end for each in times for time in each)
    if num_tokens == 0:
        raise ValueError("there was no time at which all of them ran")
    return (end - begin) * len(times) / num_tokens


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of a line is covered by at least one of them."""
    covered, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def summary_line(output: str) -> str:
    """What pytest says at the end, without its frame."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "pytest said nothing"


def counts(summary: str) -> dict[str, int]:
    """From '1 failed, 12 passed, 2 skipped in 3.10s'; empty if it is no such line."""
    names = {"passed": "passed", "failed": "failed_tests", "skipped": "skipped_tests", "error": "errors"}
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", summary)
    return {names[word]: int(number) for number, word in found} if re.search(r" in [\d.]+s", summary) else {}
