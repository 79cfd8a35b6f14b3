"""Tests of the kernel's format for sets of cores."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.protocol.cpu_list import format_cpu_list, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", [0]), ("0-3,8\n", [0, 1, 2, 3, 8]), ("8,0-1", [8, 0, 1]), ("5-5", [5]), (" \n", []), ("", [])],
)
def test_a_list_has_the_cores_that_the_kernel_means(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["a", "1,", "-1", "1-", "3-1", "0-2-4", "0 1", "1..2", "0-999999999", "\u0661"])
def test_a_malformed_list_is_refused_and_no_range_fills_the_memory(text: str) -> None:
    with pytest.raises(ValueError, match=r"is neither a core nor a range|ends before it begins"):
        parse_cpu_list(text)


@given(st.sets(st.integers(0, 99)))
def test_a_list_is_read_as_it_was_written(cpus: set[int]) -> None:
    text = format_cpu_list(cpus)
    assert parse_cpu_list(text) == sorted(cpus)
    assert text.count(",") + bool(cpus) == sum(cpu - 1 not in cpus for cpu in cpus), "one range for each run of cores"


def test_lists_of_this_machines_kernel_are_written_as_it_writes_them() -> None:
    for path in Path("/sys/devices/system/cpu").glob("o*line"):  # offline, online
        text = path.read_text().strip()
        assert format_cpu_list(parse_cpu_list(text)) == text
