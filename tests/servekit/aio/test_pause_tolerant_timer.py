"""Tests of the timer that tolerates pauses of the process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer, pause_tolerant_timeout
from tests.support.pauses import pause


class Clock:
    """The event loop's clock, which the test moves on."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def time(self) -> float:
        return self.now_s


@pytest.fixture
async def run_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that moves the event loop's clock on, and runs the timers that are due."""
    clock, loop = Clock(), asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", clock.time)
    due: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []

    def call_later(delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(clock.now_s + delay_s, callback, (), loop)
        due.append((clock.now_s + delay_s, callback, handle))
        return handle

    monkeypatch.setattr(loop, "call_later", call_later)

    def run_for(seconds: float) -> None:
        clock.now_s += seconds
        ready = [each for each in due if each[0] <= clock.now_s]
        due[:] = [each for each in due if each not in ready]
        for _, callback, handle in ready:
            if not handle.cancelled():
                callback()

    return run_for


@pytest.mark.parametrize("delay_s", [0.3, 1.0, 10.0, 300.0])
async def test_it_fires_after_the_delay_and_once(run_for: Callable[[float], None], delay_s: float) -> None:
    fired: list[None] = []
    PauseTolerantTimer(delay_s, lambda: fired.append(None))
    ticks_s = 0.1
    for _ in range(int(delay_s / ticks_s) - 1):
        run_for(ticks_s)
    assert not fired
    for _ in range(round(delay_s / ticks_s)):  # each tick of the timer is late by at most one of these
        run_for(ticks_s)
    assert len(fired) == 1


async def test_a_pause_of_any_length_takes_one_tick(run_for: Callable[[float], None]) -> None:
    fired: list[None] = []
    PauseTolerantTimer(10.0, lambda: fired.append(None))
    run_for(3600.0)
    for _ in range(8):
        run_for(1.0)
    assert not fired, "nine of ten seconds have passed"
    run_for(1.0)
    assert fired


async def test_a_short_timer_outlasts_a_pause_too(run_for: Callable[[float], None]) -> None:
    fired: list[None] = []
    PauseTolerantTimer(0.3, lambda: fired.append(None))
    run_for(3600.0)
    assert not fired


async def test_a_cancelled_timer_does_not_fire(run_for: Callable[[float], None]) -> None:
    fired: list[None] = []
    timer = PauseTolerantTimer(2.0, lambda: fired.append(None))
    run_for(1.0)
    timer.cancel()
    timer.cancel()
    run_for(10.0)
    run_for(10.0)
    assert not fired


async def test_a_timeout_ends_what_takes_longer_and_nothing_else() -> None:
    async with pause_tolerant_timeout(60.0):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with pause_tolerant_timeout(0.01):
            await asyncio.Event().wait()
    with pytest.raises(KeyError):
        async with pause_tolerant_timeout(60.0):
            raise KeyError


async def test_a_timeout_outlasts_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pause_tolerant_timeout(60.0):
        pause(monkeypatch, 3600.0)
        await asyncio.sleep(0.01)


async def test_a_timeout_that_is_restarted_begins_again() -> None:

    async def wait_forever() -> None:
        async with pause_tolerant_timeout(60.0) as timeout:
            timeout.restart(0.01)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await wait_forever()
    async with pause_tolerant_timeout(30.0) as timeout:
        timeout._expire()  # as if it had just run out
        timeout.restart(60.0)
        await asyncio.sleep(0.01)
