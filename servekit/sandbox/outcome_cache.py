"""Cache the outcomes of each tenant's jobs, within one limit of bytes for all tenants.

A grammar that was compiled is not compiled again, and a job that was refused is refused again at once. Tenants share no
outcome. The load that one tenant causes can make its job too slow, and the refusal must not reach another tenant. Nor
may a quick answer tell a tenant that another one uses the same schema.

When the cache is full, the tenant whose entries take the most bytes loses its least recently used one. So a tenant that
always sends new grammars replaces its own entries, and the entries of tenants that hold less stay.

This module is pure: times are arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from servekit.sandbox.jobs import Done, Refused

ENTRY_BYTES = 512  # of an entry besides its text, about


@dataclass(frozen=True, slots=True)
class _Entry:
    outcome: Done | Refused
    num_bytes: int
    expires_s: float


class OutcomeCache:
    """Outcomes by tenant and by the digest of their job."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[str, OrderedDict[bytes, _Entry]] = {}  # least recently used first
        self._num_bytes: dict[str, int] = {}  # bytes of each tenant's entries

    @property
    def num_bytes(self) -> int:
        return sum(self._num_bytes.values())

    def get(self, tenant: str, digest: bytes, now_s: float) -> Done | Refused | None:
        """Return the outcome of an equal job of the tenant, if it is known."""
        entries = self._entries.get(tenant)
        if entries is None or (entry := entries.get(digest)) is None:
            return None
        if entry.expires_s <= now_s:
            self._remove(tenant, digest)
            return None
        entries.move_to_end(digest)
        return entry.outcome

    def put(self, tenant: str, digest: bytes, outcome: Done | Refused, expires_s: float) -> None:
        """Store an outcome. One that is larger than the whole cache is not stored."""
        text = outcome.text if isinstance(outcome, Done) else outcome.message
        num_bytes = ENTRY_BYTES + 4 * len(text)  # a character takes one to four bytes
        if digest in self._entries.get(tenant, {}):
            self._remove(tenant, digest)
        if num_bytes > self._max_bytes:
            return
        self._entries.setdefault(tenant, OrderedDict())[digest] = _Entry(outcome, num_bytes, expires_s)
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._remove(largest, next(iter(self._entries[largest])))

    def _remove(self, tenant: str, digest: bytes) -> None:
        self._num_bytes[tenant] -= self._entries[tenant].pop(digest).num_bytes
        if not self._entries[tenant]:
            del self._entries[tenant], self._num_bytes[tenant]
