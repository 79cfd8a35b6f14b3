"""Run a child process that the event loop watches by a pidfd.

asyncio starts a thread for each child in Python 3.11. Such a thread may outlive the event loop, and asyncio logs a
warning when a signal to a child finds it ended: `subprocess` then takes the exit code that the thread waits for.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence


class ChildProcess:
    """A process whose end can be awaited. Its output goes nowhere, and signals of a terminal do not reach it."""

    def __init__(self, command: Sequence[str], stdin: int, environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError.

        Call this on the event loop's thread: the child may have asked the kernel to be killed when that thread ends.
        """
        self._process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # no session of its own: priorities count only within one
            env=environment,
        )
        self.pid = self._process.pid
        try:
            self._descriptor = os.pidfd_open(self.pid)
        except OSError:  # there are no file descriptors left
            self._process.kill()
            self._process.wait()
            raise
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._on_end)

    @property
    def returncode(self) -> int | None:
        """The exit code, or the signal's number below zero; None while it runs."""
        return self._process.returncode

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._ended.wait()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._process.wait()  # it has ended, so this returns at once
        self._ended.set()
