"""Compute figures from intervals, from the times of tokens, and from pytest's last line. Pure functions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence


def step_while_all_run(times: Sequence[Sequence[float]]) -> float:
    """Return the mean time between two tokens of a sequence, while all sequences run.

    That is from the time when each has a token until the first one ends. Raises ValueError if there is no such time.
    """
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    num_tokens = sum(begin < time <= end for each in times for time in each)
    if num_tokens == 0:
        raise ValueError("there was no time at which all of them ran")
    return (end - begin) * len(times) / num_tokens


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length that at least one interval covers."""
    covered, reached = 0.0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def summary_line(output: str) -> str:
    """Return pytest's last line without its frame."""
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "pytest printed nothing"


def counts(summary: str) -> dict[str, int]:
    """Parse '1 failed, 12 passed, 2 skipped in 3.10s'; empty if the line is another one."""
    names = {"passed": "passed", "failed": "failed_tests", "skipped": "skipped_tests", "error": "errors"}
    found = re.findall(r"(\d+) (passed|failed|skipped|error)", summary)
    return {names[word]: int(number) for number, word in found} if re.search(r" in [\d.]+s", summary) else {}
