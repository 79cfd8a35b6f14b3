"""A child process is watched without threads, and its end is always noticed."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading

import pytest

from servekit.aio.child_process import ChildProcess


def start(code: str) -> ChildProcess:
    return ChildProcess([sys.executable, "-S", "-c", code], subprocess.DEVNULL, os.environ)


async def test_the_exit_code_of_a_process_that_ends() -> None:
    process = start("raise SystemExit(7)")
    assert process.returncode is None
    async with asyncio.timeout(30):
        await process.wait()
    assert process.returncode == 7


async def test_a_killed_process_has_its_signal_as_exit_code() -> None:
    process = start("import time; time.sleep(600)")
    process.kill()
    async with asyncio.timeout(30):
        await process.wait()
    assert process.returncode == -9
    process.kill()  # does nothing


def test_a_process_is_killed_again_after_its_end_and_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With asyncio's own, the second kill takes the exit code away from the thread that waits for it."""

    async def kill_twice() -> None:
        process = start("import time; time.sleep(600)")
        before = threading.active_count()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # its exit code stays there
        process.kill()
        async with asyncio.timeout(30):
            await process.wait()
        assert process.returncode == -9
        assert threading.active_count() <= before

    with caplog.at_level(logging.WARNING), asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(kill_twice())
    assert caplog.records == []
