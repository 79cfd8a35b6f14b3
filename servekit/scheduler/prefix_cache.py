"""Find prefixes whose KV is in the pool already, by the hashes of their full blocks.

A block's hash covers its own tokens and the hash of the block before it, and so the whole prefix up to its end. The
chain starts from a salt, so that tenants never share blocks. Only full blocks are published, and only when every token
in them is committed and their computation has been dispatched. The worker runs steps in order, so a sequence that finds
a block reads it after it is written, even while the sequence that computes it is still being prefilled.

Block hashing: vLLM's automatic prefix caching; the chain and the salt are as there. Blocks found are shared, never
copied; a duplicate that was computed at the same time stays unpublished and is freed like any other block.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b

from servekit.scheduler.block_pool import BlockPool
from servekit.scheduler.kv_connector import KVConnector

HASH_BYTES = 16

HashBlock = Callable[[bytes, "array[int]"], bytes]
"""(hash of the block before it, the block's token ids) -> hash of the block."""


def chain_hash(previous: bytes, token_ids: array[int]) -> bytes:
    """The hash of a block with these tokens after the block with hash `previous`.

    Both parts have fixed lengths, so no two different chains have the same bytes. Hashes are compared only with others
    of the same machine, so its byte order does not matter. A KV connector stores blocks by them.
    """
    return blake2b(previous + token_ids, digest_size=HASH_BYTES).digest()


def salt_hash(salt: str) -> bytes:
    """The hash that a tenant's chains start from."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"servekit salt").digest()


def continue_chain(
    hashes: list[bytes],
    salt: str,
    token_ids: array[int],
    num_blocks: int,
    block_size: int,
    hash_block: HashBlock = chain_hash,
) -> None:
    """Append to the hashes of a sequence's first blocks until there are `num_blocks`: 0.5 µs for each block."""
    previous = hashes[-1] if hashes else salt_hash(salt)
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        previous = hash_block(previous, token_ids[start : start + block_size])
        hashes.append(previous)


class PrefixCache:
    """An index of the pool's published blocks. The pool decides which of them stay. A block that is evicted is stored
    by the connector, if there is one. Then the blocks that were published since the oldest step in flight was planned
    are remembered: if a load fails, they are forgotten.
    """

    def __init__(self, num_blocks: int, connector: KVConnector | None = None) -> None:
        self.pool = BlockPool(num_blocks, on_reuse=self._evict)
        self._connector = connector or KVConnector(is_on=False)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._unsettled: deque[tuple[int, list[int]]] = deque()  # (step in flight, published since it was planned)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of this chain."""
        # Without a loop in Python, up to the first hash that is not known: a prompt may have tens of thousands.
        blocks: list[int] = list(iter(map(self._block_of.get, hashes).__next__, None))
        return blocks[: self.pool.num_shareable(blocks)]

    def num_loadable(self, hashes: list[bytes]) -> int:
        """How many blocks at the beginning of this part of a chain are not published, but can be loaded."""
        return self._connector.num_loadable(hashes, self._block_of)

    def num_known(self, hashes: list[bytes]) -> int:
        """How many blocks at the beginning of this chain are published, or can be loaded after those.

        Some may be fenced: `find` finds them soon.
        """
        num_published = 0
        if hashes and hashes[0] in self._block_of:
            # Without a loop in Python: 20 ns for each block.
            num_published = [*map(self._block_of.__contains__, hashes), False].index(False)
        return num_published + (self.num_loadable(hashes[num_published:]) if self._connector.loads else 0)

    def publish(self, block: int, block_hash: bytes, is_sent: bool = False) -> None:
        """Make a leased block findable, and let the connector send it if `is_sent`.

        Of several blocks with one hash, the first one stays the one that is found.
        """
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.pool.keep(block)
            if is_sent:
                self._connector.send(block, block_hash)
            if self._unsettled:
                self._unsettled[-1][1].append(block)

    def begin_step(self, step_id: int) -> None:
        """Note that step `step_id` is planned from now on."""
        if self._connector.loads and (not self._unsettled or self._unsettled[-1][0] != step_id):
            self._unsettled.append((step_id, []))

    def settle(self, step_id: int, has_failed_loads: bool) -> set[int]:
        """Note the end of the oldest step in flight.

        If a load failed, forget the blocks that were published since that step was planned, and return them.
        """
        blocks: set[int] = set()
        if has_failed_loads:
            blocks = {block for _, published in self._unsettled for block in published if block in self._hash_of}
            for block in blocks:
                self._forget(block)
            self.pool.discard(sorted(blocks))
        while self._unsettled and self._unsettled[0][0] <= step_id:
            self._unsettled.popleft()
        return blocks

    def _evict(self, block: int) -> None:
        """Forget a block that is about to be reused."""
        block_hash = self._forget(block)
        if self._connector.stores:
            self._connector.store(block, block_hash)

    def _forget(self, block: int) -> bytes:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if self._connector.sends:
            self._connector.cancel_send(block)
        return block_hash

    def check(self) -> None:
        """Assert that the index and the pool agree."""
        self.pool.check()
        assert self.pool.kept() == self._hash_of.keys(), "a kept block is not in the index, or an indexed one not kept"
        assert list(map(self._block_of.__getitem__, self._hash_of.values())) == list(self._hash_of)
        assert len(self._block_of) == len(self._hash_of)
