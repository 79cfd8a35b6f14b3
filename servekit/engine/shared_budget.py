"""Share an amount of memory among tenants, so that none of them can use up all of it."""

from __future__ import annotations

from collections import Counter


class SharedBudget:
    """An amount, and how much of it each tenant holds. A tenant may hold as much as it leaves free for the others.

    So a tenant that is alone gets half of it, two get a third each, and the next one finds room. This is the dynamic
    threshold that switches use for the queues of their ports (Choudhury and Hahne, 1998). Requests without an API key
    have no tenant, and share all of it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: Counter[str] = Counter()

    def share_of(self, tenant: str) -> str:
        """Return the part of an error message that gives the tenant's share; "" without a tenant."""
        if not tenant:
            return ""
        return f", {self._held[tenant]} of them for your API key, which may hold as many as it leaves free"

    def has_room(self, tenant: str, amount: int) -> bool:
        """Whether the tenant may take this amount now."""
        free = self.limit - self.total - amount
        return free >= (self._held[tenant] + amount if tenant else 0)

    def take(self, tenant: str, amount: int) -> None:
        """Take an amount, for which there must be room."""
        self.total += amount
        self._held[tenant] += amount

    def release(self, tenant: str, amount: int) -> None:
        """Give back an amount."""
        self.total -= amount
        self._held[tenant] -= amount
        assert self._held[tenant] >= 0, "more was released than taken"
        if not self._held[tenant]:
            del self._held[tenant]
