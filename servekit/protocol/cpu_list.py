"""Parse sets of cores in the kernel's list format, like `0-3,8`, which /sys, taskset and docker use."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")  # Linux has 8,192 cores at most


def parse_cpu_list(text: str) -> list[int]:
    """Return the cores of a list, in its order. White space around the list is ignored, and an empty list has no cores.

    Raises ValueError if it is malformed.
    """
    cpus: list[int] = []
    for part in text.strip().split(",") if text.strip() else ():
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is neither a core nor a range of cores")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {part!r} ends before it begins")
        cpus += range(first, last + 1)
    return cpus


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return the list of some cores, sorted."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][-1] == cpu - 1:
            ranges[-1][-1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
