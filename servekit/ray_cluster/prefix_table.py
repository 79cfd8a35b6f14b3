"""Remember which replica has had which beginnings of prompts. Pure.

A prompt is cut into chunks, and each chunk is known by a hash of it and of all chunks before it. So the longest known
beginning is found without comparing texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

CHUNK_BYTES = 128
MAX_CHUNKS = 512  # of one prompt that are looked at
MAX_ENTRIES = 2**17  # chunks that are remembered; of more, those that were used least recently are forgotten

Replica = TypeVar("Replica", bound=Hashable)


class PrefixTable:
    """The chunks that each replica has had."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._replicas: OrderedDict[int, set[Hashable]] = OrderedDict()  # by the hash of a chunk

    def add(self, prompt: bytes, replica: Hashable) -> None:
        """Note that a replica gets a prompt."""
        for key in _chain(prompt):
            self._replicas.setdefault(key, set()).add(replica)
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._max_entries:
            self._replicas.popitem(last=False)

    def known_bytes(self, prompt: bytes, replicas: Iterable[Replica]) -> dict[Replica, int]:
        """Return how long the beginning of a prompt is that each of these replicas has had, in bytes."""
        known = dict.fromkeys(replicas, 0)
        remaining = set(known)
        for key in _chain(prompt):
            remaining &= self._replicas.get(key, set())
            if not remaining:
                break
            for each in remaining:
                known[each] += CHUNK_BYTES
        return known


def _chain(prompt: bytes) -> Iterator[int]:
    """Yield a hash for each whole chunk, which depends on all before it."""
    key = 0
    for start in range(0, min(len(prompt), MAX_CHUNKS * CHUNK_BYTES) - CHUNK_BYTES + 1, CHUNK_BYTES):
        key = hash((key, prompt[start : start + CHUNK_BYTES]))
        yield key
