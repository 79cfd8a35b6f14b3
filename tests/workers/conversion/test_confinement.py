"""Tests of what a process cannot do after it has given up its rights. The process is a real one."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

PROBES = """
import ctypes, json, mmap, os, socket, subprocess, sys
from pathlib import Path
from workers.conversion.confinement import confine

inside, outside = map(Path, sys.argv[1:])
confine(inside, 2**27, 60)

def result_of(probe):
    try:
        probe()
    except Exception as error:
        return type(error).__name__
    return "done"

def io_uring():
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(425, 1, ctypes.create_string_buffer(120)) < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")

print(json.dumps({
    "a socket to the internet": result_of(lambda: socket.socket(socket.AF_INET)),
    "a socket to a program of this machine": result_of(lambda: socket.socket(socket.AF_UNIX)),
    "a socket by another way": result_of(io_uring),
    "another program": result_of(lambda: subprocess.run(["/bin/true"])),
    "another program, in place of this one": result_of(lambda: os.execv("/bin/true", ["true"])),
    "to end its parent": result_of(lambda: os.kill(os.getppid(), 9)),
    "much memory": result_of(lambda: mmap.mmap(-1, 2**28)),
    "to read": result_of((outside / "there").read_text),
    "to write inside": result_of(lambda: (inside / "new").write_text("x")),
    "to write outside": result_of(lambda: (outside / "new").write_text("x")),
    "to overwrite outside": result_of(lambda: (outside / "there").write_text("x")),
    "to remove outside": result_of((outside / "there").unlink),
}))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    inside, outside = tmp_path_factory.mktemp("inside"), tmp_path_factory.mktemp("outside")
    (outside / "there").write_text("secret")
    command = [sys.executable, "-c", PROBES, str(inside), str(outside)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    results: dict[str, str] = json.loads(ended.stdout)
    return results


@pytest.mark.parametrize(
    "right",
    [
        "a socket to the internet",
        "a socket to a program of this machine",
        "a socket by another way",
        "another program",
        "another program, in place of this one",
        "to end its parent",
    ],
)
def test_a_confined_process_may_not_have(right: str, results: dict[str, str]) -> None:
    assert results[right] == "PermissionError"


def test_a_confined_process_gets_no_more_memory_than_its_limit(results: dict[str, str]) -> None:
    assert results["much memory"] == "OSError"


def test_a_confined_process_reads_files_and_writes_in_one_directory(results: dict[str, str]) -> None:
    assert results["to read"] == results["to write inside"] == "done"


@pytest.mark.parametrize("right", ["to write outside", "to overwrite outside", "to remove outside"])
def test_a_confined_process_may_not_change_other_directories(right: str, results: dict[str, str]) -> None:
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:  # landlock_create_ruleset, for its version
        pytest.skip("this kernel has no Landlock")
    assert results[right] == "PermissionError"
