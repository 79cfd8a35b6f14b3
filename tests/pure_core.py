"""The tests of the pure core, in which `make coverage` measures branches.

They are in the files that mirror the modules of `[tool.coverage.run]` in pyproject.toml. None of them starts a process
or waits for anything, so which branches they reach does not depend on the machine. What such a module does is shown by
these tests alone: a test of the server may reach its lines, too, and does not count.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_IN_COVERAGE = ("long", "exhaustive")  # marks


def measured() -> list[str]:
    """Return the patterns of the modules that are measured, like `servekit/scheduler/*.py`."""
    patterns: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage"]["run"]["include"]
    return patterns


@functools.cache
def test_files() -> list[Path]:
    """Return the files of tests that mirror these modules."""
    folders = [(ROOT / "tests" / pattern).parent for pattern in measured()]
    names = [f"test_{Path(pattern).name}" for pattern in measured()]
    return sorted({path for folder, name in zip(folders, names, strict=True) for path in folder.glob(name)})


@functools.cache
def is_test_file(path: Path) -> bool:
    """Return whether `path` is one of `test_files()`."""
    return path in test_files()


def is_in_coverage(item: pytest.Item) -> bool:
    """Return whether `make coverage` runs this test."""
    return is_test_file(item.path) and not any(map(item.get_closest_marker, NOT_IN_COVERAGE))
