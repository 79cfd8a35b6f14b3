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

Where prefill and decode are apart, the connector carries blocks from worker to worker instead:

- A *prefill* replica *sends* each block that it publishes, and each one that a new sequence finds: the plan of the step
  that computes the block names it, and the worker sends it behind all that it computes. So a result that has come says
  that the blocks of its step can be loaded elsewhere.
- A *decode* replica learns the keys with each sequence that is handed over to it (`AnnounceBlocks`), and loads them.

A sequence that has more full blocks than others can load at a time cannot be handed over. So its blocks are not sent:
they would overwrite those of other sequences.

A prefill replica never loads. Otherwise it could send what it computed from a block whose load failed, before the
result says so, and other managers would not know that.

Block offloading by hash: vLLM's KV connectors, and LMCache. There a sequence waits until its loads are done; here the
order of steps makes this state unnecessary. The roles are those of vLLM's producer and consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum

MAX_PREFETCHES = 1024  # keys in one plan: a message has a bound
MAX_WAITING_PREFETCHES = 4 * MAX_PREFETCHES

Stored = tuple[int, bytes]  # (block, key)
Loaded = tuple[bytes, int]  # (key, block)


class ReplicaRole(StrEnum):
    """What a replica does with the sequences of a server."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts and first tokens, and hands sequences over
    DECODE = "decode"  # goes on with sequences that are handed over


class KVConnector:
    """The manager's side of the worker's KV connector. Without one, it knows no key, and stores nothing."""

    def __init__(self, is_on: bool, role: ReplicaRole = ReplicaRole.BOTH, num_transfer_blocks: int = 0) -> None:
        """`num_transfer_blocks`: how many sent blocks can be loaded at the most; 0 if that is not known."""
        self.is_on = is_on
        self.stores = is_on and role is ReplicaRole.BOTH  # blocks that are reused
        self.sends = is_on and role is ReplicaRole.PREFILL  # blocks that are computed
        self.loads = is_on and role is not ReplicaRole.PREFILL
        self.num_loaded_blocks = 0  # planned loads; some may have failed
        self.num_failed_loads = 0
        self.num_sent_blocks = 0
        self._num_transfer_blocks = num_transfer_blocks
        self._keys: dict[bytes, None] = {}  # in order, so that a checkpoint is always the same
        self._pending: dict[int, bytes] = {}  # by block, the keys that the next step sends
        self._on_the_way: set[bytes] = set()  # keys that are pending, or that a step in flight sends
        # What the next plan does first. Empty between two commands.
        self._stores: list[Stored] = []
        self._loads: list[Loaded] = []
        self._prefetches: list[bytes] = []  # keys that will be loaded soon; no decision depends on them

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

    def sends_sequence(self, num_blocks: int) -> bool:
        """Whether the blocks of a sequence that has so many full ones are sent."""
        return self.sends and (not self._num_transfer_blocks or num_blocks <= self._num_transfer_blocks)

    def send(self, block: int, key: bytes) -> None:
        """Let the next step send a published block, unless others can load it already."""
        if key not in self._keys and key not in self._on_the_way:
            self._pending[block] = key
            self._on_the_way.add(key)

    def cancel_send(self, block: int) -> None:
        """Do not send a block that is forgotten: the next step may write to it."""
        key = self._pending.pop(block, None)
        if key is not None:
            self._on_the_way.remove(key)

    def sent(self, sends: Collection[tuple[int, bytes]]) -> None:
        """Note that a step has sent blocks: its result has come."""
        for _, key in sends:
            self._on_the_way.discard(key)
            self._keys[key] = None
        self.num_sent_blocks += len(sends)

    def num_sent(self, hashes: list[bytes]) -> int:
        """How many blocks at the beginning of a chain others can load, as far as is known."""
        return [*map(self._keys.__contains__, hashes), False].index(False)

    def load(self, keys: list[bytes], blocks: list[int]) -> None:
        """Let the next step load these blocks."""
        self._loads += zip(keys, blocks, strict=True)
        self.num_loaded_blocks += len(blocks)

    def take_transfers(self) -> tuple[tuple[Stored, ...], tuple[Loaded, ...], tuple[Stored, ...]]:
        """(stores, loads, sends) of the step that is planned now."""
        stores, loads, sends = tuple(self._stores), tuple(self._loads), tuple(self._pending.items())
        self._stores, self._loads, self._pending = [], [], {}
        return stores, loads, sends

    def prefetch(self, keys: list[bytes]) -> None:
        """Let the worker read blocks from its disk before they are loaded: a sequence waits that needs them."""
        self._prefetches += keys[: MAX_WAITING_PREFETCHES - len(self._prefetches)]

    def take_prefetches(self) -> tuple[bytes, ...]:
        """The keys that the worker should have in memory soon."""
        taken, self._prefetches = self._prefetches[:MAX_PREFETCHES], self._prefetches[MAX_PREFETCHES:]
        return tuple(taken)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note that the worker's connector does not hold these blocks any more."""
        for key in keys:
            self._keys.pop(key, None)

    def restarted(self, is_worker_lost: bool) -> None:
        """Forget what was to be done. If the worker is lost, forget all keys: the next one announces what it finds.

        A replica that sends forgets them also if the worker lives: a failed step does not report which blocks were
        overwritten, and those would never be sent again. The sequences are computed again, and their blocks are sent.
        """
        self._stores, self._loads, self._prefetches, self._pending = [], [], [], {}
        self._on_the_way.clear()
        if is_worker_lost or self.sends:
            self._keys.clear()
