"""Take the memory of the KV blocks that come next from the kernel while no step runs, on a CPU.

The memory of a cache is taken page by page at first use, so that a server whose cache is mostly empty takes little. But
the kernel clears a page when it is taken, and a virtual machine first gets it from its host: 5 ms for 2 MiB were
measured, where a prompt of 512 tokens of a model of 88 million weights takes 90 ms and writes 6 MiB. So some blocks
beyond those that were used have their memory already. What a worker that is never idle uses is taken at first use.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from workers.kv_cache.pages import KVCache

RESERVED_BYTES = 2**28  # beyond the blocks that were used
PIECE_BYTES = 2**21  # taken at once: a huge page. A step that begins meanwhile may wait for it
IDLE_S = 0.1  # the worker is idle when no step has run for so long; it is also how often the thread looks
_MADV_POPULATE_WRITE = 23  # Linux 5.14; makes pages present and leaves what is in them


class MemoryReserve:
    """The memory of a cache's first blocks, some more than were used."""

    def __init__(self, cache: KVCache, count_used: Callable[[], int]) -> None:
        """`count_used` returns the number of blocks at the cache's start of which some are, or were, in use."""
        self._count_used = count_used
        self._tensors = (*cache.keys, *cache.values)
        self._num_blocks = cache.num_blocks
        self._num_reserved = max(1, RESERVED_BYTES * cache.num_blocks // cache.num_bytes)
        largest_block = max(tensor[0].nbytes for tensor in self._tensors)
        self._num_at_once = max(1, PIECE_BYTES // largest_block)
        self._end = 0  # blocks before this one were used, or have memory, or are among the pieces
        self._pieces: Iterator[tuple[int, int]] = iter(())

    def start(self, is_idle: Callable[[], bool]) -> None:
        """Refill the reserve in a thread, whenever the worker is idle."""
        threading.Thread(target=self._keep_filled, args=(is_idle,), daemon=True, name="memory reserve").start()

    def _keep_filled(self, is_idle: Callable[[], bool]) -> None:
        while self.refill(is_idle) and self._end < self._num_blocks:
            time.sleep(IDLE_S)

    def refill(self, is_idle: Callable[[], bool]) -> bool:
        """Take memory until the reserve is full or the worker is not idle. Returns False if the kernel gives none."""
        while is_idle():
            piece = next(self._pieces, None)
            if piece is not None:
                if not _populate(*piece):
                    return False
                continue
            num_used = self._count_used()
            if self._end >= min(self._num_blocks, num_used + self._num_reserved):
                break
            blocks = slice(max(self._end, num_used), max(self._end, num_used) + self._num_at_once)
            self._pieces = (piece for tensor in self._tensors for piece in _pieces_of(tensor[blocks]))
            self._end = blocks.stop
        return True


def _pieces_of(blocks: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the address and length of pieces, in whole pages, that together hold these blocks."""
    first = blocks.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = blocks.data_ptr() + blocks.nbytes
    for address in range(first, end, PIECE_BYTES):
        length = min(PIECE_BYTES, end - address)
        yield address, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def _populate(address: int, num_bytes: int) -> bool:
    """Make pages present. What is in them stays, whatever other threads write to them meanwhile."""
    error: int = _madvise(address, num_bytes, _MADV_POPULATE_WRITE)
    return error == 0


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
