"""Claims about time on a machine that others use, too.

Other programs may delay a run by any time; they never make it quicker. So a claim like "this takes less than 100 ms"
holds if one of several runs takes less, and it fails if each of them takes longer. Only such a claim is tried again: a
test that fails for another reason fails at once.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

NUM_ATTEMPTS = 6


class TooLate(AssertionError):
    """Something took longer than it should, perhaps because other programs used the processor."""


def assert_within(limit_s: float, elapsed_s: float, claim: str = "") -> None:
    """Raise TooLate if more than `limit_s` seconds have passed. For tests with `@again_if_late`."""
    if elapsed_s >= limit_s:
        raise TooLate(f"{elapsed_s:.3f} s, which is not within {limit_s:g} s. {claim}")


def assert_on_time(holds: bool, claim: str) -> None:
    """Raise TooLate if a claim does not hold that a delay may have made untrue. For tests with `@again_if_late`."""
    if not holds:
        raise TooLate(claim)


def again_if_late(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test again while it raises TooLate, up to six times, with longer and longer pauses."""

    def pause(number: int) -> None:
        time.sleep(0.1 * 2**number)

    @functools.wraps(test)
    async def run_async(*arguments: Any, **named: Any) -> None:
        for number in range(NUM_ATTEMPTS - 1):
            try:
                return await test(*arguments, **named)
            except TooLate:
                pause(number)
        await test(*arguments, **named)
        return None

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        for number in range(NUM_ATTEMPTS - 1):
            try:
                return test(*arguments, **named)
            except TooLate:
                pause(number)
        test(*arguments, **named)
        return None

    return run_async if inspect.iscoroutinefunction(test) else run


async def until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until something is true that other tasks or threads bring about."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
