"""An event for one who waits."""

from __future__ import annotations

import asyncio


class Bell:
    """As `asyncio.Event`, which has a deque for any number of waiters: 760 bytes, and each stream has three events."""

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
        """Until it is set. As with an event, it may have been cleared again since."""
        if self._is_set:
            return
        assert self._waiter is None, "somebody else is waiting"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
