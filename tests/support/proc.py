"""What /proc says about other processes. Each may end between two looks; one that has ended has nothing to show."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError)


def read(pid: int, name: str) -> str:
    """Return a file of /proc/PID; empty if the process has ended."""
    return read_bytes(pid, name).decode()


def read_bytes(pid: int, name: str) -> bytes:
    with suppress(*GONE):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def children(pid: int) -> list[int]:
    """Return the processes that the main thread of a process has started, in the order of their start."""
    return list(map(int, read(pid, f"task/{pid}/children").split()))


def all_pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; one that has ended may remain as a zombie until its parent reaps it."""
    return read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def with_variable(name: str, value: str) -> list[int]:
    """Return the living processes that were started with this variable: children inherit it from their parents."""
    found, entry = [], f"{name}={value}\0".encode()
    for pid in all_pids():
        with suppress(PermissionError):  # of another user, or of the system
            if entry in read_bytes(pid, "environ") and is_alive(pid):
                found.append(pid)
    return found


def wait_until_gone(*pids: int, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"after {timeout_s} s these processes live on: {alive}"
        time.sleep(0.01)


def open_files(pid: int) -> list[str]:
    """Return what each file descriptor of a process refers to, like `socket:[1234]`."""
    found = []
    with suppress(*GONE):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(*GONE):  # closed since it was listed
                found.append(os.readlink(descriptor))
    return found


def listening_sockets(pid: int) -> set[str]:
    """Return the sockets on which a process waits for TCP connections."""
    lines = [line for name in ("tcp", "tcp6") for line in read(pid, f"net/{name}").splitlines()]
    fields = [line.split() for line in lines]
    listening = {f"socket:[{each[9]}]" for each in fields if each[3] == "0A"}
    return listening & set(open_files(pid))


def cpu_s(pid: int) -> float:
    """Return the processor time of a process in seconds; 0.0 if it has ended."""
    fields = read(pid, "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return the memory of a process that runs. Fails if it has ended."""
    return int(read(pid, "statm").split()[1]) * resource.getpagesize() / 2**20
