"""Provide a semaphore that tenants acquire in turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque


class RoundRobinSemaphore:
    """A number of places. Tenants get them in turns, and the tasks of one tenant in the order in which they came.

    One tenant holds at most `max_per_tenant` places (by default all of them). The rest stays free for other tenants.
    With `anonymous_may_hold_all`, requests without an API key may hold all places: where they are allowed, there are no
    other tenants.
    """

    def __init__(
        self, capacity: int, max_per_tenant: int | None = None, *, anonymous_may_hold_all: bool = False
    ) -> None:
        self._capacity = capacity
        self._anonymous_may_hold_all = anonymous_may_hold_all
        self._max_per_tenant = capacity if max_per_tenant is None else max_per_tenant
        self._held = Counter[str]()  # places of each tenant
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the tenant whose turn is next comes first

    def num_waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    async def acquire(self, tenant: str) -> None:
        """Wait for a place. A task that is cancelled meanwhile gets none, or gives it back."""
        # `release` gives a free place to a waiting task at once. So if a place is free here, no waiting task may take
        # it.
        if self._held.total() < self._capacity and self._may_hold_more(tenant):
            self._held[tenant] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._stop_waiting(tenant, turn)
            else:
                self.release(tenant)  # the place was passed to this task already
            raise

    def release(self, tenant: str) -> None:
        """Pass a place of this tenant to the oldest task of the next tenant that may hold more, or free it."""
        assert self._held[tenant] > 0, "only a tenant that holds a place releases one"
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        # One place became free, so at most one task gets a place.
        for candidate in filter(self._may_hold_more, list(self._waiting)):
            turns = self._waiting.pop(candidate)
            while turns:
                turn = turns.popleft()
                if turn.cancelled():
                    continue
                turn.set_result(None)
                self._held[candidate] += 1
                if turns:
                    self._waiting[candidate] = turns  # after the other tenants
                return

    def _may_hold_more(self, tenant: str) -> bool:
        return self._held[tenant] < self._max_per_tenant or (self._anonymous_may_hold_all and tenant == "")

    def _stop_waiting(self, tenant: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(tenant, deque())
        with contextlib.suppress(ValueError):  # `release` has removed it
            turns.remove(turn)
        if not turns:
            self._waiting.pop(tenant, None)
