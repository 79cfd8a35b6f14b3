"""Run a server and write how much processor time each long callback of its event loop takes.

`python -m tests.torture.attacks.callback_times FILE python -m servekit ARGUMENTS` writes a line for each callback that
takes a millisecond or more. It counts processor time of the loop's thread, which other work of the machine changes
little.
The loop is asyncio's own: uvloop runs its callbacks where Python cannot measure them. They are the same callbacks.
"""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio.events import Handle
from pathlib import Path
from typing import Any, TextIO

import msgspec
import uvloop
from msgspec import Struct

MIN_S = 0.001


class Hold(Struct, array_like=True, order=True):
    """One callback that held the event loop."""

    cpu_s: float  # processor time of the loop's thread
    wall_s: float  # with the time that other threads and processes took
    what: str


def read_holds(lines: TextIO) -> list[Hold]:
    """Return what was written since the last call with the same file."""
    return [msgspec.json.decode(line, type=Hold) for line in lines]


def measure(file: Path) -> None:
    """Measure all callbacks of this process from now on."""
    output = file.open("w", buffering=1)
    run = Handle._run

    def timed(handle: Handle) -> None:
        began_s, began_wall_s = time.thread_time(), time.perf_counter()
        try:
            run(handle)
        finally:
            cpu_s = time.thread_time() - began_s
            if cpu_s >= MIN_S:
                hold = Hold(cpu_s, time.perf_counter() - began_wall_s, repr(handle)[:400])
                output.write(msgspec.json.encode(hold).decode() + "\n")

    replaced: Any = Handle
    replaced._run = timed
    uvloop.new_event_loop = asyncio.new_event_loop  # type: ignore[assignment]


def main() -> int:
    file, _, _, _, *arguments = sys.argv[1:]
    measure(Path(file))
    from servekit.cli import main as servekit

    return servekit(arguments)


if __name__ == "__main__":
    sys.exit(main())
