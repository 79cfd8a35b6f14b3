"""What a child process of the server does before anything else."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Makes a worker write what each of its threads is doing, also one that holds the interpreter's lock in a kernel.
DUMP_SIGNAL = signal.SIGUSR2


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends.

    A queue's end reports that too, but only to a process that is reading; one that is stuck in a kernel would live on
    and keep its GPU. The parent may have died before the request, hence the second look.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("servekit: the server that started this process is gone")


def ignore_signals() -> None:
    """Supervisors signal every process of a service; when a child stops is the server's decision alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave_traces() -> None:
    """Write the stacks to standard error when this process crashes, or is asked to by DUMP_SIGNAL.

    And no core dump: with the weights in it, writing it takes longer than starting the successor, which waits for it.
    """
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
