"""The claim: if a process of `make test` crashes, the tests end, and name the test that ran."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAKEFILE = Path(__file__).parents[1] / "Makefile"
TIMEOUT_S = 120.0
# The process gets the next file before this last test. When it crashes, the other process has no work left.
CRASHING = """
import os, time
def test_one(): pass
def test_two(): pass
def test_last():
    time.sleep(1)
    os._exit(3)
"""
OTHER = "import pytest\n@pytest.mark.parametrize('number', range(3))\ndef test_it(number): pass\n"


def test_a_process_that_crashes_in_the_last_test_of_a_file_ends_the_tests(tmp_path: Path) -> None:
    options = set(re.findall(r"--max-worker-restart \d+", MAKEFILE.read_text()))
    assert len(options) == 1, "of `make test` and `make coverage`"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_crashing.py").write_text(CRASHING)
    for name in ("other", "second_other", "third_other"):
        (tmp_path / f"test_{name}.py").write_text(OTHER)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "no:langsmith_plugin", "-p", "no:schemathesis"]
    done = subprocess.run(
        [*command, *options.pop().split()], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 1 and "crashed while running 'test_crashing.py::test_last'" in done.stdout, done.stdout
