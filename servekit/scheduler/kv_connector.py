"""Track which blocks the worker's KV connector holds, and which ones the next step stores in it and loads from it.

A KV connector keeps blocks outside the pool, by the hash of their prefix: in the host's memory and on its disk. The
worker owns these blocks, and drops the least recently used ones. The manager only has the set of keys:

- A block that is published and then reused is *stored*: the next plan names it, and the worker copies it before it
  computes anything. So the key is known from then on.
- A waiting sequence finds the blocks of its prefix that are in the pool, and after them those with a known key. When
  it is admitted it gets blocks for these, and the plan names them as *loads*. The worker runs its steps in order, and
  it loads at the beginning of a step. So loaded blocks are like computed ones: they are published at once, others may
  share them, and nothing waits for the result.
- A load may fail: the file is damaged, or the worker has dropped the block meanwhile. The result of the step says so.
  What was computed from such a block is wrong, but no token of it has been committed, because results are applied in
  order. The manager forgets the keys, and computes the sequences again that hold such a block or a copy of it
  (`WorkloadManager`). It also forgets all blocks that were published since the step was planned (`PrefixCache`),
  because these may depend on it, and computes the sequences again that found one of them. This forgets more than
  necessary; a failed load is rare, and costs only time.

Block offloading by hash: vLLM's KV connectors, and LMCache. There a sequence waits until its loads are done; here the
order of steps makes this state unnecessary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


class KVConnector:
    """The manager's side of the worker's KV connector. Without one, it knows no key, and stores nothing."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.num_loaded_blocks = 0  # planned loads; some may have failed
        self.num_failed_loads = 0
        self._keys: dict[bytes, None] = {}  # in order, so that a checkpoint is always the same
        # What the next plan does first. Empty between two commands.
        self._stores: list[tuple[int, bytes]] = []
        self._loads: list[tuple[bytes, int]] = []

    @property
    def num_keys(self) -> int:
        """How many blocks can be loaded, as far as is known."""
        return len(self._keys)

    def num_loadable(self, hashes: list[bytes], published: Collection[bytes]) -> int:
        """How many blocks at the beginning of this part of a chain can be loaded, and are not in the pool."""
        keys = self._keys
        if not hashes or hashes[0] not in keys:
            return 0
        # Without loops in Python: a prompt may have thousands of blocks.
        num_known = [*map(keys.__contains__, hashes), False].index(False)
        return [*map(published.__contains__, hashes[:num_known]), True].index(True)

    def announce(self, keys: Iterable[bytes]) -> None:
        """Note that the worker's connector holds these blocks."""
        if self.is_on:
            self._keys.update(dict.fromkeys(keys))

    def store(self, block: int, key: bytes) -> None:
        """Let the next step store a published block that is reused. The worker skips what it holds already."""
        self._stores.append((block, key))
        self._keys[key] = None

    def load(self, keys: list[bytes], blocks: list[int]) -> None:
        """Let the next step load these blocks."""
        self._loads += zip(keys, blocks, strict=True)
        self.num_loaded_blocks += len(blocks)

    def take_transfers(self) -> tuple[tuple[tuple[int, bytes], ...], tuple[tuple[bytes, int], ...]]:
        """(stores, loads) of the step that is planned now."""
        stores, loads = tuple(self._stores), tuple(self._loads)
        self._stores, self._loads = [], []
        return stores, loads

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the worker's connector does not hold these blocks any more."""
        for key in keys:
            self._keys.pop(key, None)

    def restarted(self, is_worker_lost: bool) -> None:
        """Forget what was to be done. If the worker is lost, forget all keys: the next one announces what it finds."""
        self._stores, self._loads = [], []
        if is_worker_lost:
            self._keys.clear()
