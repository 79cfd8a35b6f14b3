"""Remember the outcomes of jobs, within a bound of bytes that tenants share.

A grammar that was compiled is not compiled again, and a job that was refused is refused again at once. When the cache
is full, the tenant whose entries take the most bytes loses its least recently used one. So a tenant that always sends
new grammars replaces its own entries, and the entries of tenants that hold less stay.

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
    tenant: str  # of the first such job
    num_bytes: int
    expires_s: float


class OutcomeCache:
    """Outcomes by the digest of their job. Tenants find what others have stored: equal jobs have equal outcomes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[bytes, _Entry] = {}
        self._by_tenant: dict[str, OrderedDict[bytes, None]] = {}  # least recently used first
        self._bytes_by_tenant: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes_by_tenant.values())

    def get(self, digest: bytes, now_s: float) -> Done | Refused | None:
        """Return the outcome of an equal job, if it is known."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if entry.expires_s <= now_s:
            self._remove(digest)
            return None
        self._by_tenant[entry.tenant].move_to_end(digest)
        return entry.outcome

    def put(self, digest: bytes, tenant: str, outcome: Done | Refused, expires_s: float) -> None:
        """Store an outcome. One that is larger than the whole cache is not stored."""
        text = outcome.text if isinstance(outcome, Done) else outcome.message
        num_bytes = ENTRY_BYTES + 4 * len(text)  # a character takes one to four bytes
        if digest in self._entries:
            self._remove(digest)
        if num_bytes > self._max_bytes:
            return
        self._entries[digest] = _Entry(outcome, tenant, num_bytes, expires_s)
        self._by_tenant.setdefault(tenant, OrderedDict())[digest] = None
        self._bytes_by_tenant[tenant] = self._bytes_by_tenant.get(tenant, 0) + num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._bytes_by_tenant, key=self._bytes_by_tenant.__getitem__)
            self._remove(next(iter(self._by_tenant[largest])))

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        del self._by_tenant[entry.tenant][digest]
        self._bytes_by_tenant[entry.tenant] -= entry.num_bytes
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant], self._bytes_by_tenant[entry.tenant]
