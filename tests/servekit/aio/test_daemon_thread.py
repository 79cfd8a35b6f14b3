"""Tests of blocking work in a daemon thread."""

import asyncio
import subprocess
import sys
import time

import pytest

from servekit.aio.daemon_thread import run_in_daemon_thread


async def test_results_and_errors_are_returned() -> None:
    assert await run_in_daemon_thread(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await run_in_daemon_thread(int, "seven")


async def test_a_caller_may_be_cancelled() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run_in_daemon_thread(time.sleep, 0.2), 0.01)
    await asyncio.sleep(0.3)  # the end of the thread must not raise


def test_the_process_exits_without_waiting_for_the_thread() -> None:
    code = (
        "import asyncio, time; from servekit.aio.daemon_thread import run_in_daemon_thread\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(run_in_daemon_thread(time.sleep, 600), 0.05)\n"
        "    except TimeoutError: pass\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
