"""Provide a timer and a timeout that do not count pauses of this process.

A container can be frozen, a process group stopped, a laptop put to sleep. Meanwhile the clock continues, but neither
this process nor its children run. A timeout by the clock expires as soon as they continue, before a healthy child can
answer. So this timer counts ticks of the event loop: a pause of any length counts as one tick.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MAX_TICK_S = 1.0
MIN_TICKS = 3  # a pause takes one of them at most, and the others are left for the answer


class PauseTolerantTimer:
    """Calls a function once, after this process has run for `delay_s` seconds, unless it is cancelled before.

    Trade-off: the timer is late by the sum of the delays of its ticks, where `call_later` is late by one delay.
    """

    __slots__ = ("_callback", "_handle", "_loop", "_num_ticks", "_tick_s")

    def __init__(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Start the timer, on the event loop's thread."""
        self._callback = callback
        self._num_ticks = max(MIN_TICKS, math.ceil(delay_s / MAX_TICK_S))  # that are left
        self._tick_s = delay_s / self._num_ticks
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(self._tick_s, self._on_tick)

    def _on_tick(self) -> None:
        self._num_ticks -= 1
        if self._num_ticks:
            self._handle = self._loop.call_later(self._tick_s, self._on_tick)
        else:
            self._callback()

    def cancel(self) -> None:
        """Stop the timer. Idempotent; without effect after the call."""
        self._handle.cancel()


class PauseTolerantTimeout:
    """The timeout of a block: see `pause_tolerant_timeout`."""

    __slots__ = ("_timeout", "_timer")

    def __init__(self, timeout: asyncio.Timeout, delay_s: float) -> None:
        self._timeout = timeout
        self._timer = PauseTolerantTimer(delay_s, self._expire)

    def restart(self, delay_s: float) -> None:
        """Let the block run for `delay_s` seconds from now on."""
        self._timer.cancel()
        self._timeout.reschedule(None)  # if the timer has called a moment ago
        self._timer = PauseTolerantTimer(delay_s, self._expire)

    def cancel(self) -> None:
        """Stop the timer. Idempotent."""
        self._timer.cancel()

    def _expire(self) -> None:
        self._timeout.reschedule(0.0)


@asynccontextmanager
async def pause_tolerant_timeout(delay_s: float) -> AsyncIterator[PauseTolerantTimeout]:
    """Raise TimeoutError when this process has run for `delay_s` seconds inside the block; like `asyncio.timeout`."""
    async with asyncio.timeout(None) as timeout:
        timer = PauseTolerantTimeout(timeout, delay_s)
        try:
            yield timer
        finally:
            timer.cancel()
