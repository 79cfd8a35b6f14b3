"""The next KV blocks have memory before a step writes to them, and not more of them than the reserve holds."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from workers.kv_cache import memory_reserve
from workers.kv_cache.memory_reserve import MemoryReserve
from workers.kv_cache.pages import KVCache, LayerShape

NUM_BLOCKS, BLOCK_BYTES = 256, 2**16  # for each layer's keys, and for its values
RESERVED_BLOCKS = 64


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> KVCache:
    """A cache of 64 MiB, of which a quarter is reserved."""
    layers = [LayerShape(1, 256, 256)] * 2
    monkeypatch.setattr(memory_reserve, "RESERVED_BYTES", RESERVED_BLOCKS * 2 * len(layers) * BLOCK_BYTES)
    monkeypatch.setattr(memory_reserve, "PIECE_BYTES", 4 * BLOCK_BYTES)
    shape = (BLOCK_BYTES // 4,)
    cache = KVCache(layers, lambda *_: (shape, shape), NUM_BLOCKS, 16, torch.float32, torch.device("cpu"))
    no_huge_pages, give_back = 15, 4
    for tensor in (*cache.keys, *cache.values):
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = ctypes.c_void_p(first), ctypes.c_size_t(tensor.nbytes - mmap.PAGESIZE)
        # Small pages, so that each block has memory of its own; and none yet: the heap may give what was used before.
        ctypes.CDLL(None).madvise(*pages, no_huge_pages)  # fails if the kernel has none
        assert ctypes.CDLL(None).madvise(*pages, give_back) == 0
    return cache


def blocks_with_memory(pages: Tensor) -> list[int]:
    """Return the blocks whose first whole page is in memory."""
    found = []
    for block in range(NUM_BLOCKS):
        address = -(-pages[block].data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        is_present = ctypes.c_ubyte()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(is_present)) == 0
        if is_present.value & 1:
            found.append(block)
    return found


def test_an_idle_worker_takes_the_memory_of_the_blocks_that_come_next(cache: KVCache) -> None:
    num_used = 0
    reserve = MemoryReserve(cache, lambda: num_used)
    tensors = (*cache.keys, *cache.values)
    assert all(RESERVED_BLOCKS - 1 not in blocks_with_memory(tensor) for tensor in tensors)
    assert reserve.refill(lambda: True)
    assert all(blocks_with_memory(tensor) == list(range(RESERVED_BLOCKS)) for tensor in tensors)
    num_used = 40
    assert reserve.refill(lambda: True)
    assert all(blocks_with_memory(tensor) == list(range(RESERVED_BLOCKS + 40)) for tensor in tensors)
    num_used = NUM_BLOCKS
    assert reserve.refill(lambda: True)
    assert len(blocks_with_memory(tensors[0])) == RESERVED_BLOCKS + 40, "the others got their memory by being used"


def test_in_a_small_container_the_reserve_is_small(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reserve, "cpu_memory", lambda: 32 * cache.num_bytes // NUM_BLOCKS * 8)
    assert MemoryReserve(cache, lambda: 0).refill(lambda: True)
    assert blocks_with_memory(cache.keys[0]) == list(range(8))


def test_it_stops_when_a_step_begins_and_goes_on_later(cache: KVCache) -> None:
    answers = iter([True, True, False, *[True] * 1000])
    reserve = MemoryReserve(cache, lambda: 0)
    tensors = (*cache.keys, *cache.values)
    _, *others = map(blocks_with_memory, tensors)  # not always none: the heap may give memory that was used before
    assert reserve.refill(lambda: next(answers))
    assert blocks_with_memory(tensors[0]) == [0, 1, 2, 3]
    assert [blocks_with_memory(tensor) for tensor in tensors[1:]] == others, "the second answer, one piece"
    assert reserve.refill(lambda: next(answers))
    assert all(len(blocks_with_memory(tensor)) == RESERVED_BLOCKS for tensor in tensors)


def test_what_is_in_the_cache_stays(cache: KVCache) -> None:
    for tensor in (*cache.keys, *cache.values):
        tensor[3] = 7.0
    MemoryReserve(cache, lambda: 0).refill(lambda: True)
    for tensor in (*cache.keys, *cache.values):
        assert (tensor[3] == 7.0).all() and not tensor[:3].any() and not tensor[4:].any()


def test_it_gives_up_if_the_kernel_gives_no_memory(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reserve, "_MADV_POPULATE_WRITE", 9999)  # what older kernels say to the right number
    assert not MemoryReserve(cache, lambda: 0).refill(lambda: True)
