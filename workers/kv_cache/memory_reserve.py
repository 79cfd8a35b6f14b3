"""Let the kernel allocate the memory of the next KV blocks while no step runs, on a CPU.

The kernel allocates the memory of a cache page by page, at first use, so a server whose cache is mostly empty uses
little memory. But it clears each page that it allocates, and a virtual machine may first have to get the page from its
host. 5 ms for 2 MiB were measured, where a prompt of 512 tokens of a model of 88 million weights takes 90 ms and writes
6 MiB. So the memory of some blocks beyond those that were used is allocated ahead. In a worker that is never idle, all
memory is allocated at first use.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator

from torch import Tensor

from workers.device.memory import cpu_memory
from workers.kv_cache.pages import KVCache

RESERVED_BYTES = 2**28  # beyond the blocks that were used
# At most this part of the machine's memory, or its container's: a small one may have no more to give, and the kernel
# then ends the process.
RESERVED_SHARE = 1 / 32
PIECE_BYTES = 2**21  # allocated at once: a huge page. A step that begins meanwhile may wait for it
IDLE_S = 0.1  # a worker is idle if no step has run for so long; it is also how often the thread looks
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; allocates pages, and keeps the contents of those that are there


class MemoryReserve:
    """Memory that is allocated for blocks of a cache beyond those that were used."""

    def __init__(self, cache: KVCache, count_used: Callable[[], int]) -> None:
        """`count_used` returns how many blocks from the cache's start on were used, the last of these included."""
        self._count_used = count_used
        self._tensors = (*cache.keys, *cache.values)
        self._num_blocks = cache.num_blocks
        num_bytes = min(RESERVED_BYTES, int(RESERVED_SHARE * cpu_memory()))
        self._num_reserved = max(1, num_bytes * cache.num_blocks // cache.num_bytes)
        largest_block = max(tensor[0].nbytes for tensor in self._tensors)
        self._num_at_once = max(1, PIECE_BYTES // largest_block)
        self._end = 0  # blocks before this one were used, or have memory, or are among the pieces
        self._pieces: Iterator[tuple[int, int]] = iter(())  # that come next: address and number of bytes

    def start(self, is_idle: Callable[[], bool]) -> None:
        """Refill the reserve in a thread, whenever the worker is idle."""
        threading.Thread(target=self._keep_filled, args=(is_idle,), daemon=True, name="memory reserve").start()

    def _keep_filled(self, is_idle: Callable[[], bool]) -> None:
        while self.refill(is_idle) and self._end < self._num_blocks:
            time.sleep(IDLE_S)

    def refill(self, is_idle: Callable[[], bool]) -> bool:
        """Allocate memory until the reserve is full, or the worker is not idle. Returns False if the kernel refuses."""
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
    """Yield the pieces that together hold these blocks, in whole pages: address and number of bytes."""
    first = blocks.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = blocks.data_ptr() + blocks.nbytes
    for address in range(first, end, PIECE_BYTES):
        length = min(PIECE_BYTES, end - address)
        yield address, -(-length // mmap.PAGESIZE) * mmap.PAGESIZE


def _populate(address: int, num_bytes: int) -> bool:
    """Allocate the pages that are not there yet, and return whether the kernel did. Contents of pages do not change.

    Other threads may write to the pages meanwhile.
    """
    error: int = _madvise(address, num_bytes, _MADV_POPULATE_WRITE)
    return error == 0


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
