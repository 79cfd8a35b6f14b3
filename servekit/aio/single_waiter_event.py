"""An event that at most one task waits for."""

from __future__ import annotations

import asyncio


class SingleWaiterEvent:
    """Like `asyncio.Event`, but without its deque of waiters, which takes 760 bytes. Each stream has three events."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set. As with asyncio.Event, it may have been cleared again since."""
        if self._is_set:
            return
        assert self._waiter is None, "another task is waiting for this event"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
