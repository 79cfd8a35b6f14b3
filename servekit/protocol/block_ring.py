"""Keep blocks in memory that several processes map: one appends them, in a circle, and the others read.

The memory is an open file without a name (`memfd_create`). The server makes it, or the agent of a worker that joins,
and workers inherit it. So it has a fixed size, it outlives a worker, and the kernel frees it when the last of these
processes has ended, however it ended.

Nothing is locked. A reader copies a block, and then compares the copy with the block's key and sum. So a block that is
overwritten meanwhile is found to be wrong, whatever order the processors see the writes in. A reader takes blocks that
will be overwritten soon for lost: so this is rare.

The layout: what the bytes mean, how many blocks were ever appended, and the size of one; the keys; the sums; and the
blocks.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from servekit.errors import ConfigError

KEY_BYTES = LAYOUT_BYTES = 16
MIN_BLOCKS = 8
LOST_RATIO = 0.25  # of the blocks: those that are overwritten next
_HEADER_BYTES = 64
_SIZE = slice(LAYOUT_BYTES + 8, LAYOUT_BYTES + 16)  # in the header: bytes of a block
_WORD = 8  # bytes; a sum is one of 64-bit words
_PAGE = 4096


def open_memory(names: Iterable[str], num_bytes: int) -> tuple[int, ...]:
    """Open one file without a name in memory for each of `names`, which only tools show. Child processes inherit them.

    The memory is taken page by page when it is written. Raises OSError, and leaves no file open then.
    """
    fds: list[int] = []
    try:
        for name in names:
            fds.append(os.memfd_create(f"servekit-kv-{name}"))
            os.ftruncate(fds[-1], num_bytes)
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    return tuple(fds)


class BlockRing:
    """The blocks of one prefill worker. Blocks have numbers in the order in which they were appended."""

    def __init__(self, fd: int, block_bytes: int, layout: bytes, is_writer: bool = False) -> None:
        """Map the memory behind `fd`. `layout` is a digest of all that the bytes of blocks depend on.

        Raises ConfigError if there is room for less than MIN_BLOCKS.
        """
        assert len(layout) == LAYOUT_BYTES
        size = os.fstat(fd).st_size
        self.layout, self.block_bytes = layout, block_bytes
        row_bytes = -(-block_bytes // _WORD) * _WORD
        self.num_blocks = (size - _HEADER_BYTES - _PAGE) // (KEY_BYTES + _WORD + row_bytes)
        if self.num_blocks < MIN_BLOCKS:
            raise ConfigError(
                f"the memory for handed-over KV blocks, {size:,} bytes in this process, holds less than {MIN_BLOCKS}: "
                f"one has {block_bytes:,} bytes; raise --kv-transfer-memory-bytes"
            )
        self._num_lost = int(LOST_RATIO * self.num_blocks)
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writer else 0))
        raw = np.frombuffer(memory, np.uint8)
        keys_end = _HEADER_BYTES + self.num_blocks * KEY_BYTES
        sums_end = keys_end + self.num_blocks * _WORD
        rows_begin = -(-sums_end // _PAGE) * _PAGE
        self._found_layout = raw[:LAYOUT_BYTES]
        self._count = raw[LAYOUT_BYTES : LAYOUT_BYTES + _WORD].view(np.int64)  # blocks that were ever appended
        self._keys = raw[_HEADER_BYTES:keys_end].reshape(self.num_blocks, KEY_BYTES)
        self._sums = raw[keys_end:sums_end].view(np.uint64)
        rows = raw[rows_begin : rows_begin + self.num_blocks * row_bytes].reshape(self.num_blocks, row_bytes)
        self.rows: NDArray[np.uint8] = rows  # [num_blocks, bytes of a block, and up to 7 more]
        self._number_of: dict[bytes, int] = {}
        self._numbers: deque[tuple[int, bytes]] = deque()  # of all known blocks, the oldest first
        self._num_seen = 0  # blocks, of those that were ever appended
        if is_writer and self._found_layout.tobytes() != layout:
            self._count[0] = 0
            raw[_SIZE].view(np.int64)[0] = block_bytes
            self._found_layout[:] = np.frombuffer(layout, np.uint8)
        self.refresh()

    @classmethod
    def attach(cls, fd: int, is_writer: bool = False) -> BlockRing:
        """Map memory as the process that wrote to it first has laid it out. Raises ValueError if none has."""
        header = os.pread(fd, _HEADER_BYTES, 0)
        block_bytes = int.from_bytes(header[_SIZE], sys.byteorder)
        if not block_bytes:
            raise ValueError("no process has laid out the memory for KV blocks")
        return cls(fd, block_bytes, header[:LAYOUT_BYTES], is_writer)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block can be read, as far as is known since the last `refresh`."""
        return key in self._number_of

    def __len__(self) -> int:
        return len(self._number_of)

    @property
    def max_append(self) -> int:
        """How many blocks may be appended at once: others know for so many that they will be overwritten."""
        return self._num_lost

    @property
    def max_readable(self) -> int:
        """How many blocks can be read at the most: the others will be overwritten soon."""
        return self.num_blocks - self._num_lost

    def list_keys(self) -> list[bytes]:
        """List the blocks that can be read, the last ones those that were appended last."""
        return [key for number, key in self._numbers if self._number_of.get(key) == number]

    def refresh(self) -> list[bytes]:
        """Look at what was appended. Returns the keys of blocks that are lost since the last call, or soon will be."""
        if self._found_layout.tobytes() != self.layout:
            return []  # no worker has written to it yet
        count, dropped = int(self._count[0]), list[bytes]()
        # Of those that were appended and overwritten between two calls, nothing was known.
        for number in range(max(self._num_seen, count - self.num_blocks), count):
            key = self._keys[number % self.num_blocks].tobytes()
            self._number_of[key] = number
            self._numbers.append((number, key))
        self._num_seen = count
        first = count - self.num_blocks + self._num_lost  # that is not lost
        while self._numbers and self._numbers[0][0] < first:
            number, key = self._numbers.popleft()
            if self._number_of.get(key) == number:  # otherwise it was appended once more
                del self._number_of[key]
                dropped.append(key)
        return dropped

    def next_rows(self, num_blocks: int) -> list[int]:
        """Return the rows for the next blocks, which the caller fills. At most `max_append`."""
        assert num_blocks <= self.max_append
        return [number % self.num_blocks for number in range(self._num_seen, self._num_seen + num_blocks)]

    def append(self, keys: list[bytes]) -> None:
        """Let others read the blocks in the rows of `next_rows`."""
        rows = self.next_rows(len(keys))
        self._keys[rows] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        self._sums[rows] = block_sums(self.rows[rows])
        self._count[0] = self._num_seen + len(keys)

    def read(self, keys: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Return copies of blocks that are there, as far as is known, and for each whether it is right."""
        rows = [self._number_of[key] % self.num_blocks for key in keys]
        blocks = self.rows[rows]
        expected = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        return blocks, (block_sums(blocks) == self._sums[rows]) & (self._keys[rows] == expected).all(axis=1)

    def locate(self, keys: list[bytes]) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.bool_]]:
        """Return at which byte of `rows` each block is, the sum that a copy must have, and whether the block is there.

        For those that copy the memory themselves, and then compare `block_sums`. Each array has one item for each key.
        """
        rows = np.array([self._number_of[key] % self.num_blocks for key in keys], np.uint64)
        offsets = rows * np.uint64(self.rows.shape[1])
        sums = self._sums[rows]
        expected = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        # Keys are compared after the sums were read. The writer writes a block's key before its sum, so if the key is
        # still the old one, the sum is, too.
        return offsets, sums, (self._keys[rows] == expected).all(axis=1)


def block_sums(blocks: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the sum of each block. `blocks` are whole rows of a ring, [num_blocks, bytes of a row]."""
    sums: NDArray[np.uint64] = blocks.view(np.uint64).sum(axis=1, dtype=np.uint64)
    return sums
