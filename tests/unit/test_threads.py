"""Claims about work beside the event loop."""

import asyncio
import subprocess
import sys
import time

import pytest

from servekit.threads import in_daemon_thread


async def test_results_and_errors_come_back() -> None:
    assert await in_daemon_thread(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await in_daemon_thread(int, "seven")


async def test_a_caller_may_give_up() -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_daemon_thread(time.sleep, 0.2), 0.01)
    await asyncio.sleep(0.3)  # the thread's end must not raise into anything


def test_the_process_does_not_wait_for_it() -> None:
    code = (
        "import asyncio, time; from servekit.threads import in_daemon_thread\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(in_daemon_thread(time.sleep, 30), 0.05)\n"
        "    except TimeoutError: pass\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=15)
