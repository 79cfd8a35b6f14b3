"""Run a stage with all its processes, and end them, so that the device's memory is free before the next stage."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

MARK = "GPU_STAGE"  # an environment variable of all that a stage starts; a worker leaves the process group
GONE_S = 20.0  # time in which the driver frees memory, even a hundred GiB
PROC = Path("/proc")


def run_to_end(command: Sequence[str], output: BinaryIO, limit_s: float) -> int | None:
    """Run a command; return its exit code, or None if it was killed at its limit.

    All processes that it started are killed, too, and have ended when this returns, except one that the driver holds
    for more than 20 s.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, process_group=0, env={**os.environ, MARK: mark}
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process, f"{MARK}={mark}".encode())


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    deadline = time.monotonic() + GONE_S
    # Remember them: an ending process loses its environment long before its memory is freed.
    known = _marked(mark)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be in the driver, where signals are not delivered
        process.wait(timeout=GONE_S)
    while True:
        known |= _marked(mark)
        for pid in known:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        known = {pid for pid in known if lives(pid)}
        if not known or time.monotonic() > deadline:
            return
        time.sleep(0.05)


def _marked(mark: bytes) -> set[int]:
    """Return the processes with the mark in their environment; none on systems without /proc."""
    found = set()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def lives(pid: int) -> bool:
    """Return whether a process may still hold memory. A zombie without other threads holds none."""
    try:
        state = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        num_threads = len(list((PROC / str(pid) / "task").iterdir()))
    except OSError:
        return False
    return state != "Z" or num_threads > 1
