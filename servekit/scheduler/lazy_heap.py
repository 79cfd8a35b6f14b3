"""A heap of sequences with lazy deletion: an entry that is no longer valid stays until it surfaces.

To search the heap for each sequence that leaves it would cost time linear in its size. To drop entries only when they
surface would keep them for as long as a valid entry is before them. So invalid entries are counted, and all of them are
swept out when they are half of the heap: constant cost per entry, and memory linear in the number of valid entries.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf

from servekit.scheduler.sequence import Sequence


class LazyHeap:
    """Sequences by ascending (key, sequence id).

    An entry has a version, which tells it from other entries of its sequence. `is_valid(sequence, version)` says
    whether the entry still counts; once false, it stays false.
    """

    def __init__(self, is_valid: Callable[[Sequence, int], bool]) -> None:
        self._is_valid = is_valid
        # Keys, ids and versions of entries are never all equal, so sequences are never compared.
        self._entries: list[tuple[float, int, int, Sequence]] = []
        self._num_discarded = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, key: float, sequence: Sequence, version: int) -> None:
        heappush(self._entries, (key, sequence.sequence_id, version, sequence))

    def first(self) -> Sequence | None:
        """The sequence of the first valid entry. Drops invalid entries before it."""
        while self._entries:
            _, _, version, sequence = self._entries[0]
            if self._is_valid(sequence, version):
                return sequence
            heappop(self._entries)
        return None

    @property
    def first_key(self) -> float:
        """The key of the first valid entry; infinite if there is none."""
        if not self._entries or self.first() is None:
            return inf
        return self._entries[0][0]

    def pop(self) -> tuple[float, Sequence]:
        """Remove the first entry, and return its key and its sequence. Raises IndexError if there is none."""
        key, _, _, sequence = heappop(self._entries)
        return key, sequence

    def discard(self, num_entries: int = 1) -> None:
        """Note that so many entries became invalid, and sweep them out when they are half of the heap."""
        self._num_discarded += num_entries
        if self._num_discarded > len(self._entries) // 2:
            self._num_discarded = 0
            self._entries = [entry for entry in self._entries if self._is_valid(entry[3], entry[2])]
            heapify(self._entries)
