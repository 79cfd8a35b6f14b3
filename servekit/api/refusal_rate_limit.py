"""Delay the refusals of a tenant whose clients send refused requests without pause.

A refusal costs the event loop a third of a millisecond: a connection, a head, an answer. Clients that ignore
Retry-After and send again at once could take all the time of the event loop. So the rate of refusals is limited for
each tenant, and those above the rate are delayed. The first ones are immediate, because a load balancer sends the
request elsewhere.
"""

from __future__ import annotations

from msgspec import Struct

REFUSALS_PER_S = 100.0
BURST = 100  # immediate refusals, after a second without one
MAX_DELAY_S = 5.0  # what Retry-After says most often


class RefusalRateLimit(Struct):
    """The rate limit of each tenant. The caller passes the time, in seconds on a clock that never goes back."""

    next_s: dict[str, float] = {}  # by tenant, when its next refusal is due; as many as the keys files have named

    def delay_s(self, tenant: str, now_s: float) -> float:
        """Count a refusal of this tenant, and return how long it waits, in seconds."""
        due_s = max(self.next_s.get(tenant, 0.0), now_s - BURST / REFUSALS_PER_S)
        self.next_s[tenant] = min(due_s + 1 / REFUSALS_PER_S, now_s + MAX_DELAY_S)
        return max(0.0, due_s - now_s)
