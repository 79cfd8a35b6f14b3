"""Count the sequences that wait for their first step, and their prompt tokens, for each tenant.

A preempted sequence waits again, but it is not counted, because it was admitted before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from servekit.scheduler.sequence import Sequence

MAX_SIZE_BITS = 63


class WorkCount(Struct, gc=False):
    """How much is queued."""

    num_sequences: int = 0
    num_tokens: int = 0  # prompt tokens; a prompt counts once for each of its sequences

    def add(self, num_sequences: int, num_tokens: int) -> None:
        """Count more, or with negative numbers less."""
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens


class QueuedCounts(Protocol):
    """What is queued, for those that only read it."""

    @property
    def total(self) -> WorkCount:
        """What all tenants have queued."""

    def of(self, tenant: str) -> WorkCount:
        """What one tenant has queued."""

    def by_tenant(self) -> Mapping[str, WorkCount]:
        """What each tenant has queued that has something queued."""


class CombinedWork:
    """What several managers have queued together, counted when it is read."""

    def __init__(self, parts: Iterable[QueuedCounts]) -> None:
        self._parts = list(parts)

    @property
    def total(self) -> WorkCount:
        """What all tenants have queued."""
        return _sum(part.total for part in self._parts)

    def of(self, tenant: str) -> WorkCount:
        """What one tenant has queued."""
        return _sum(part.of(tenant) for part in self._parts)

    def by_tenant(self) -> Mapping[str, WorkCount]:
        """What each tenant has queued that has something queued."""
        return {tenant: self.of(tenant) for part in self._parts for tenant in part.by_tenant()}


def _sum(counts: Iterable[WorkCount]) -> WorkCount:
    total = WorkCount()
    for count in counts:
        total.add(count.num_sequences, count.num_tokens)
    return total


class QueuedWork:
    """The sequences that were added and have never been in a step: in total and by tenant."""

    def __init__(self) -> None:
        self.total = WorkCount()
        self._by_tenant: dict[str, WorkCount] = {}  # only tenants with queued sequences
        # Prompts of 2^(i - 1) to 2^i - 1 tokens. The policy `shortest` takes these for equally long.
        self._of_size = [WorkCount() for _ in range(MAX_SIZE_BITS + 1)]

    def of(self, tenant: str) -> WorkCount:
        """What one tenant has queued."""
        return self._by_tenant.get(tenant) or WorkCount()

    def by_tenant(self) -> Mapping[str, WorkCount]:
        """What each tenant has queued that has something queued."""
        return self._by_tenant

    def not_longer(self, prompt_tokens: int) -> WorkCount:
        """The prompts that are shorter than one of so many tokens, or count as equally long."""
        return _sum(self._of_size[: prompt_tokens.bit_length() + 1])

    def add(self, sequence: Sequence) -> None:
        """A sequence was added."""
        self._of_size[sequence.prompt_length.bit_length()].add(1, sequence.prompt_length)
        self.total.add(1, sequence.prompt_length)
        self._by_tenant.setdefault(sequence.tenant, WorkCount()).add(1, sequence.prompt_length)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that was queued is in its first step, or has ended."""
        self._of_size[sequence.prompt_length.bit_length()].add(-1, -sequence.prompt_length)
        self.total.add(-1, -sequence.prompt_length)
        count = self._by_tenant[sequence.tenant]
        count.add(-1, -sequence.prompt_length)
        if not count.num_sequences:
            del self._by_tenant[sequence.tenant]
