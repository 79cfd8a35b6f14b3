"""Tests of what a process cannot do after it has dropped its privileges. The process is a real one."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

PROBES = """
import ctypes, fcntl, json, mmap, os, resource, signal, socket, subprocess, sys, termios, threading
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

def system_call(number, *arguments):
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, *arguments) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

def fork():
    if os.fork() == 0:
        os._exit(0)

def thread():
    thread = threading.Thread(target=lambda: (outside / "of a thread").write_text("x"))
    thread.start()
    thread.join()
    assert not (outside / "of a thread").exists()

TGKILL = 234 if os.uname().machine == "x86_64" else 131

print(json.dumps({
    "a process like itself": result_of(fork),
    "to end a thread of its parent": result_of(lambda: system_call(TGKILL, os.getppid(), os.getppid(), 0)),
    "to let the kernel signal its parent": result_of(lambda: fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())),
    "to limit its parent": result_of(lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE)),
    "to type into a terminal": result_of(lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x")),
    "to start threads, which have no more rights": result_of(thread),
    "to signal itself": result_of(lambda: system_call(TGKILL, os.getpid(), threading.get_native_id(), 0)),
    "to ask for its own limits": result_of(lambda: resource.getrlimit(resource.RLIMIT_NOFILE)),
    "to link outside": result_of(lambda: os.symlink("/", outside / "link")),
    "to link inside": result_of(lambda: os.symlink("/", inside / "link")),
    "to link to a file outside": result_of(lambda: os.link(outside / "there", inside / "hard link")),
    "to cut a file outside": result_of(lambda: os.truncate(outside / "there", 0)),
    "to cut a file outside by opening it": result_of(lambda: os.open(outside / "there", os.O_RDONLY | os.O_TRUNC)),
    "to change permissions": result_of(lambda: os.chmod(outside / "there", 0o666)),
    "to change owners": result_of(lambda: os.chown(outside / "there", os.getuid(), os.getgid())),
    "to change times": result_of(lambda: os.utime(outside / "there", (0, 0))),
    "to change attributes": result_of(lambda: os.setxattr(outside / "there", "user.x", b"x")),
    "to cut a file inside": result_of(lambda: (inside / "old").open("r+").truncate(0)),
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
    (inside / "old").write_text("x")
    command = [sys.executable, "-c", PROBES, str(inside), str(outside)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
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
        "a process like itself",
        "to end a thread of its parent",
        "to let the kernel signal its parent",
        "to limit its parent",
        "to type into a terminal",
        "to link outside",
        "to link inside",
        "to link to a file outside",
        "to cut a file outside",
        "to change permissions",
        "to change owners",
        "to change times",
        "to change attributes",
    ],
)
def test_a_confined_process_may_not_have(right: str, results: dict[str, str]) -> None:
    assert results[right] == "PermissionError"


def test_a_confined_process_gets_no_more_memory_than_its_limit(results: dict[str, str]) -> None:
    assert results["much memory"] == "OSError"


def test_a_confined_process_reads_files_and_writes_in_one_directory(results: dict[str, str]) -> None:
    assert results["to read"] == results["to write inside"] == results["to cut a file inside"] == "done"


@pytest.mark.parametrize("right", ["to signal itself", "to ask for its own limits"])
def test_a_confined_process_keeps_what_libraries_need(right: str, results: dict[str, str]) -> None:
    assert results[right] == "done"


def test_a_process_with_threads_is_not_confined_in_part() -> None:
    code = """
import threading
from pathlib import Path
from workers.conversion.confinement import confine
threading.Thread(target=threading.Event().wait, daemon=True).start()
confine(Path("."), 2**27, 60)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "has 2 threads before it drops its privileges" in ended.stderr


@pytest.mark.parametrize("right", ["to write outside", "to overwrite outside", "to remove outside"])
def test_a_confined_process_may_not_change_other_directories(right: str, results: dict[str, str]) -> None:
    if ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) < 1:  # landlock_create_ruleset, for its version
        pytest.skip("this kernel has no Landlock")
    assert results[right] == "PermissionError"
