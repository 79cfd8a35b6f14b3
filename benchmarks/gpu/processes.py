"""A stage's processes, and their end: what they hold of the device's memory is back before the next stage begins."""

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

MARK = "GPU_STAGE"  # in the environment of whatever a stage starts, which may leave its group, as a worker does
GONE_S = 20.0  # in which the driver takes memory back, even a hundred GiB
PROC = Path("/proc")


def run_apart(command: Sequence[str], output: BinaryIO, limit_s: float) -> int | None:
    """The exit code; None if it had to be ended. Whatever it started is ended, too, and gone when this returns.

    Or nearly: what the driver does not let go of for 20 s is not waited for any longer.
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
    # Remembered, for a process that is ending has no environment any more, long before its memory is given back.
    known = _marked(mark)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be in the driver, where no signal reaches it
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
    """Empty where there is no /proc."""
    found = set()
    for folder in PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def lives(pid: int) -> bool:
    """Whether it may still hold anything: what has ended and was not asked for its exit code does not."""
    try:
        state = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
        num_threads = len(list((PROC / str(pid) / "task").iterdir()))
    except OSError:
        return False
    return state != "Z" or num_threads > 1
