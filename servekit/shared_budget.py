"""Share an amount among tenants, so that none of them can use up all of it.

The rule is the dynamic threshold that switches use for the queues of their ports: a tenant may hold as much as it
leaves free for the others, and one unit as long as any is free. One tenant alone may hold half of the amount. If T
tenants take all they can get, each comes to 1 / (T + 1) of it, and as much stays free for the next one. Choudhury and
Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", IEEE/ACM Transactions on Networking 6(2),
1998, with alpha = 1; docs/design/fairness.md has the alternatives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class SharedBudget:
    """An amount, and how much of it each tenant holds.

    Requests without an API key have no tenant (""). Where they are allowed there are no others, so they may hold all of
    it. So may each tenant if `is_shared` is false.
    """

    def __init__(self, limit: int, is_shared: bool = True) -> None:
        self.limit = limit
        self.total = 0
        self._is_shared = is_shared
        self._held: Counter[str] = Counter()

    def held(self, tenant: str) -> int:
        """Return what the tenant holds."""
        return self._held[tenant]

    def is_shared_with(self, tenant: str) -> bool:
        """Return whether the tenant has to leave some of it for others."""
        return self._is_shared and tenant != ""

    def max_share(self, tenant: str) -> int:
        """Return what the tenant may hold while all others hold nothing. A request for more can never be admitted."""
        return max(1, self.limit // 2) if self.is_shared_with(tenant) else self.limit

    def describe_share(self, tenant: str) -> str:
        """Return the part of an error message that gives what the tenant holds; "" if others have no share."""
        if not self.is_shared_with(tenant):
            return ""
        return f", {self._held[tenant]} of them for your API key, which may hold as many as it leaves free"

    def num_missing(self, tenant: str, amount: int, held_elsewhere: int = 0, total_elsewhere: int = 0) -> int:
        """Return how much must be released at least before the tenant may take this amount; 0 if it may take it now.

        What is counted elsewhere is added: what this tenant holds of it, and the total.
        """
        num_free = self.limit - self.total - total_elsewhere - amount  # afterwards
        if num_free < 0:
            return -num_free
        if not self.is_shared_with(tenant):
            return 0
        return max(0, self._held[tenant] + held_elsewhere + amount - max(1, num_free))

    def has_room(self, tenant: str, amount: int) -> bool:
        """Return whether the tenant may take this amount now."""
        return not self.num_missing(tenant, amount)

    def usage(self, held_elsewhere: Mapping[str, int], total_elsewhere: int) -> float:
        """Return how much is used of all of it, or of its share by some tenant, whichever is more: 0 to 1.

        A tenant's share is half of what the others leave. At 1 the next request is refused: of that tenant, or of all.
        What is counted elsewhere is added: by tenant, and the total.
        """
        total = self.total + total_elsewhere
        parts = [total / self.limit]
        for tenant in filter(self.is_shared_with, {*self._held, *held_elsewhere}):
            held = self._held[tenant] + held_elsewhere.get(tenant, 0)
            parts.append(2 * held / max(2, self.limit - total + held))
        return min(1.0, max(parts))

    def take(self, tenant: str, amount: int) -> None:
        """Take an amount. The caller has checked that there is room for it."""
        self.total += amount
        self._held[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Give back an amount."""
        self.total -= amount
        self._held[tenant] -= amount
        assert self._held[tenant] >= 0, "more was released than taken"
        if not self._held[tenant]:
            del self._held[tenant]
