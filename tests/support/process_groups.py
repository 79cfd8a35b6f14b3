"""Processes that compute together, such as the ranks of a model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence


def run_together(commands: Sequence[Sequence[str]], timeout_s: float) -> None:
    """Run the commands at the same time. Raises CalledProcessError if one fails, and TimeoutExpired.

    Whatever happens, neither they nor processes that they have started are left: a rank that waits for one which has
    failed may wait forever.
    """
    deadline_s = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(command, start_new_session=True)
            stack.callback(_kill_group, process)
            processes.append(process)
        for process in processes:
            if code := process.wait(max(0.0, deadline_s - time.monotonic())):
                raise subprocess.CalledProcessError(code, process.args)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and those that it has started, as far as they still run."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
