"""Proof that the server serves: a token that was sampled lately, or one that is sampled for the purpose.

A process that runs, a port that answers and a worker that says it is there have all been seen on servers that served
nobody. The question is asked at most once at a time, and only where no client's tokens answer it anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

from servekit.errors import ServekitError

LASTS_S = 30.0
TIMEOUT_S = 5.0


class Proof:
    """`ask` samples a token, if it can; whoever sees one calls `given`."""

    def __init__(self, ask: Callable[[], Coroutine[None, None, None]], clock: Callable[[], float]) -> None:
        self._ask = ask
        self._clock = clock
        self._given_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def is_given(self) -> bool:
        return self._given_s is not None and self._clock() - self._given_s < LASTS_S

    def given(self, now: float) -> None:
        """A token was sampled."""
        self._given_s = now

    async def obtain(self) -> bool:
        """Whether there is one, within a few seconds."""
        if not self.is_given:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask_once(), name="servekit proof")
            await asyncio.wait([self._asking])
        return self.is_given

    async def _ask_once(self) -> None:
        with contextlib.suppress(ServekitError, TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._ask()

    def stop(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
