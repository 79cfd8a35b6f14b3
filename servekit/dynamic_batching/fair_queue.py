"""Order the waiting items: tenants take turns by what was computed for them; items of one tenant go by rank.

The rule is that of virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): the
tenant that was served least is next. The counter of a tenant that had nothing waiting is raised to the lowest of those
that had.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

from servekit.dynamic_batching.item import Item, ItemStatus


class _TenantQueue:
    """The waiting items of one tenant, and some that have ended and are removed later."""

    def __init__(self) -> None:
        self.entries: list[tuple[tuple[float, int], Item]] = []  # ranks are never equal, so items are not compared
        self.num_ended = 0

    def first(self) -> Item | None:
        while self.entries:
            item = self.entries[0][1]
            if item.status is ItemStatus.WAITING:
                return item
            heappop(self.entries)
            self.num_ended -= 1
        return None

    def discard(self) -> None:
        """Note that an item has ended. At most half of the entries belong to ended items."""
        self.num_ended += 1
        if self.num_ended > len(self.entries) // 2:
            self.entries = [entry for entry in self.entries if entry[1].status is ItemStatus.WAITING]
            heapify(self.entries)
            self.num_ended = 0


class FairQueue:
    """Waiting items by tenant. Call `discard` if an item ends while it waits."""

    def __init__(self) -> None:
        self._queues: dict[str, _TenantQueue] = {}  # of tenants with waiting items
        self._served: dict[str, int] = {}  # by tenant: its counter, in tokens
        # A heap of (counter when last read, tenant), with one entry for each queue. Counters only rise.
        self._turns: list[tuple[int, str]] = []
        self._last_left = 0  # the highest counter of a tenant when it had no item left

    def num_served(self, tenant: str) -> int:
        """The tenant's counter, in tokens. The tenant with the lowest counter is next."""
        return self._served.get(tenant, 0)

    def push(self, item: Item) -> None:
        """Add an item that has arrived, or that waits again."""
        first, queue = self.first(), self._queues.get(item.tenant)
        if queue is None:
            # A tenant cannot save unused service: if it was idle, its counter is raised to the lowest of those waiting.
            floor = self._last_left if first is None else self._served[first.tenant]
            self._served[item.tenant] = max(floor, self.num_served(item.tenant))
            queue = self._queues[item.tenant] = _TenantQueue()
            heappush(self._turns, (self._served[item.tenant], item.tenant))
        heappush(queue.entries, (item.rank, item))

    def first(self) -> Item | None:
        """The next item."""
        while self._turns:
            counter, tenant = self._turns[0]
            item = self._queues[tenant].first()
            if item is None:
                heappop(self._turns)
                del self._queues[tenant]
                self._last_left = max(self._last_left, self._served[tenant])
            elif counter < self._served[tenant]:
                heapreplace(self._turns, (self._served[tenant], tenant))
            else:
                return item
        return None

    def pop(self, item: Item) -> None:
        """Take the item that `first` returned out of the queue."""
        heappop(self._queues[item.tenant].entries)

    def discard(self, item: Item) -> None:
        """Note that an item has ended while it was waiting here."""
        self._queues[item.tenant].discard()

    def charge(self, item: Item) -> None:
        """Count an item that is about to be computed."""
        self._served[item.tenant] = self.num_served(item.tenant) + item.work
