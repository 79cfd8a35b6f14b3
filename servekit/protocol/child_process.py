"""Prepare a child process of the server: its end, its signals, its memory, and what it writes when it crashes."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Makes a worker write the stacks of its threads, even while a thread holds the interpreter's lock inside a kernel.
DUMP_SIGNAL = signal.SIGUSR2


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent exits for any reason. Exits if the parent is gone already.

    EOF on a pipe also reports the parent's exit, but only to a process that reads. A process that is blocked in a GPU
    kernel would continue to run and keep its GPU.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit(
            f"servekit: the server that started this process (process {parent_pid}, --parent-pid) has exited, so this "
            "process exits, too. To start a server with its workers, run `servekit serve`."
        )


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM. Supervisors signal every process of a service, but the server ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def limit_address_space(extra_bytes: int) -> None:
    """Let allocations fail that exceed the present address space by more than `extra_bytes`, or the inherited limit."""
    with open("/proc/self/statm") as file:
        present_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit, (_, inherited) = present_bytes + extra_bytes, resource.getrlimit(resource.RLIMIT_AS)
    if inherited != resource.RLIM_INFINITY:
        limit = min(limit, inherited)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def dump_stacks_on_crash() -> None:
    """Write the stacks of all threads to standard error on a crash and on DUMP_SIGNAL, and never dump core.

    A core dump contains the weights. Writing it takes longer than starting the next worker, which waits for it.
    """
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
