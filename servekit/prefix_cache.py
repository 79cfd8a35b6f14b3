"""Which prefixes have their KV in the pool already, by the hashes of their full blocks.

A block's hash covers its own tokens and the hash of the block before it, and so the whole prefix up to its end; the
chain starts from a salt, so that tenants never meet in it. Only full blocks are published, and only when every token in
them is committed and their computation has been dispatched: the worker runs steps in order, so whoever finds them reads
them after they are written, even while their first owner is still being prefilled.

Block hashing: vLLM's automatic prefix caching; the chain and the salt are as there. Blocks found are shared, never
copied; a duplicate that was computed at the same time stays unpublished and is freed like any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as TokenSequence
from hashlib import blake2b

from servekit.block_pool import BlockPool

HASH_BYTES = 16


def chain_hash(previous: bytes, token_ids: TokenSequence[int]) -> bytes:
    """The hash of a block with these tokens after the block with hash `previous`.

    Both parts have fixed lengths, so no two different chains spell the same bytes.
    """
    return blake2b(previous + array("I", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def salt_hash(salt: str) -> bytes:
    """Where a tenant's chains start."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"servekit salt").digest()


class PrefixCache:
    """An index of the pool's published blocks. The pool decides which of them survive."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, on_reuse=self._forget)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def find(self, hashes: TokenSequence[bytes]) -> list[int]:
        """The blocks that hold the longest known beginning of this chain."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None or not self.pool.is_shareable(block):
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, block_hash: bytes) -> None:
        """Let a leased block be found. The first of several equal ones is the one that is."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.pool.keep(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]

    def check(self) -> None:
        """Assert that the index and the pool agree."""
        self.pool.check()
        assert self.pool.kept() == self._hash_of.keys(), "a block is kept that nobody can find, or the other way round"
        assert [self._block_of[block_hash] for block_hash in self._hash_of.values()] == list(self._hash_of)
        assert len(self._block_of) == len(self._hash_of)
