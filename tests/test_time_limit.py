"""The claim: a test that waits forever fails, and says where it waits."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from tests.support.time_limit import limited


def forever(event: threading.Event) -> None:
    event.wait()


async def never() -> None:
    await asyncio.Event().wait()


def test_a_thread_that_waits_is_interrupted_and_shown() -> None:
    expected = r"(?s)a wait took longer than 0\.1 s.*in forever"
    with pytest.raises(pytest.fail.Exception, match=expected), limited("a wait", 0.1):
        forever(threading.Event())


def test_tasks_that_wait_are_shown() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)took longer than .*in never"), limited("a wait", 0.1):
        asyncio.run(never())


def test_the_limit_of_what_is_around_it_stays() -> None:
    def work() -> None:
        with limited("a part", 60.0):
            pass
        time.sleep(60.0)

    with pytest.raises(pytest.fail.Exception, match="all of it"), limited("all of it", 0.2):
        work()
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 60.0, "that of this test"
