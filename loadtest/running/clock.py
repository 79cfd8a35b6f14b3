"""The clock of all measurements, and timers that fire on time.

The timers of event loops count whole milliseconds (uvloop, and epoll's timeout under asyncio), from a time that is read
once in each turn. This tool must keep errors smaller than a millisecond. Its timers are therefore kernel timers: they
wake the loop through a file descriptor, to the microsecond, at a given time and not after a delay.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

# CLOCK_MONOTONIC: the same for all processes of a machine, and cannot be set.
now_s = time.monotonic

_NONBLOCK_AND_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_AT_A_TIME = 1  # TFD_TIMER_ABSTIME

_libc = ctypes.CDLL(None, use_errno=True)


class _Setting(ctypes.Structure):
    """struct itimerspec."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


class Timer:
    """Call `callback` once at the time it is set to; setting it again moves it. Linux only (timerfd_create(2))."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._fd = _libc.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_AND_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        loop.add_reader(self._fd, self._ready)

    def set(self, at_s: float) -> None:
        """Set to a time of `now_s`; a time that has passed fires in the next turn of the loop."""
        whole_s, rest_s = divmod(max(at_s, 0.0), 1.0)
        setting = _Setting(0, 0, int(whole_s), max(1, int(rest_s * 1e9)))  # 0 s and 0 ns would disarm it
        if _libc.timerfd_settime(self._fd, _AT_A_TIME, ctypes.byref(setting), None) < 0:
            raise OSError(ctypes.get_errno(), f"timerfd_settime to {at_s} s")

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ready(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # the timer was moved after the loop had been woken
        self._callback()


class Heartbeat:
    """Measure how late an event loop is: a beat is due every `interval_s`, and each has its delay.

    A loop that stalls for 300 ms misses thirty beats, and each of them was late. If only the beat that ended the stall
    counted, percentiles would hardly show it (Tene, "How NOT to measure latency", 2015).
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, start_s: float, interval_s: float, beat: Callable[[], None]
    ) -> None:
        """`beat` is called for each beat, and once after a stall."""
        self.lags_s: list[float] = []  # element i was due at start_s + i * interval_s
        self._start_s = start_s
        self._interval_s = interval_s
        self._beat = beat
        self._timer = Timer(loop, self._callback)
        self._timer.set(start_s)

    def stop(self) -> None:
        self._count()  # or a stall that lasts to the end would not be counted
        self._timer.close()

    def _callback(self) -> None:
        self._count()
        self._timer.set(self._next_s)
        self._beat()

    @property
    def _next_s(self) -> float:
        return self._start_s + len(self.lags_s) * self._interval_s

    def _count(self) -> None:
        now = now_s()
        while (due_s := self._next_s) <= now:
            self.lags_s.append(now - due_s)
