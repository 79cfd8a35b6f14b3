"""Define what the agents of two workers exchange, so that KV blocks go from one machine directly to another. Pure.

The agent of a worker that has blocks listens, and an agent that needs some connects. They authenticate each other as a
worker and its server do (`handshake.py`), with a key that is derived from the one that all of them share: so a message
of one handshake is of no use in the other. Then each frame is sealed.

    agent that needs blocks                        agent that has them
      RequestBlocks(layouts, keys)         ──▶
                                           ◀──    BlocksFound(keys)
                                           ◀──    their bytes: all parts of the first rank, then of the next one

If both use NIXL, the side that needs the bytes reads them from the other side's memory:

      RequestBlocks(.., by_nixl)           ──▶
                                           ◀──    BlocksFound(keys, where they are)
      BlocksRead                           ──▶

Each rank of a worker has a part of each block. A block is found only if all its parts are.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from servekit.protocol.messages import Key

BATCH_BYTES = 4 * 2**20  # of the blocks in one frame; a larger block has a frame of its own
MAX_BATCH_KEYS = 1024
MAX_REQUEST_BYTES = 2**16  # of a RequestBlocks
MAX_METADATA_BYTES = 2**20  # of NIXL: 0.5 KB and some bytes for each rank
MAX_BLOCK_BYTES = 2**28  # of one rank's part: more than any model's


class BlockLayout(Struct, frozen=True):
    """How one rank stores its part of a block."""

    digest: Annotated[bytes, Meta(min_length=16, max_length=16)]  # of all that its bytes depend on
    block_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES)]


class RequestBlocks(Struct, frozen=True, tag="request_blocks"):
    """Ask for blocks. The layouts are those of the ranks of the worker that needs them."""

    layouts: Annotated[tuple[BlockLayout, ...], Meta(min_length=1, max_length=1024)]
    keys: Annotated[tuple[Key, ...], Meta(min_length=1, max_length=MAX_BATCH_KEYS)]
    by_nixl: bool = False  # whether this side can read them with NIXL


class BlocksInMemory(Struct, frozen=True):
    """Where blocks can be read with NIXL: all parts of the first rank, then of the next one.

    A block may be overwritten before it is read, so the reader compares sums.
    """

    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA_BYTES)]  # how to reach the memory, and its keys
    addresses: tuple[Annotated[int, Meta(ge=0)], ...]
    sums: tuple[Annotated[int, Meta(ge=0)], ...]


class BlocksFound(Struct, frozen=True, tag="blocks_found"):
    """The answer: those of the keys whose blocks come in the next frame, in the order of the request."""

    keys: Annotated[tuple[Key, ...], Meta(max_length=MAX_BATCH_KEYS)] = ()
    refusal: Annotated[str, Meta(max_length=500)] = ""  # why no block of the other side can be used here
    in_memory: BlocksInMemory | None = None  # if they do not come in the next frame


class BlocksRead(Struct, frozen=True, tag="blocks_read"):
    """Say that the blocks of one answer have been read: the other side may stop serving reads of them."""


def transfer_key(key: bytes, group: bytes) -> bytes:
    """Derive the key of transfers between the workers of one server from the key that they share with it."""
    return hmac.digest(key, b"servekit kv transfer " + group, "sha256")


def bytes_of_block(layouts: Sequence[BlockLayout]) -> int:
    """Return the bytes of one block in all ranks."""
    return sum(layout.block_bytes for layout in layouts)


def max_frame_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Return the longest payload that an agent with blocks sends. So no peer makes the other one keep more."""
    return max(BATCH_BYTES, bytes_of_block(layouts))


def num_keys_at_once(layouts: Sequence[BlockLayout]) -> int:
    """Return how many blocks one request may ask for: those that fit into a batch, and at least one."""
    return max(1, min(MAX_BATCH_KEYS, BATCH_BYTES // bytes_of_block(layouts)))
