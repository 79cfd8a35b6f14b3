"""Tests of trimming: pages that are free within the heap go back to the kernel, and not more often than allowed."""

from __future__ import annotations

import ctypes

import pytest

from workers.device import heap
from workers.device.heap import GROWTH_BYTES, MIN_INTERVAL_S, HeapTrimmer, anonymous_bytes

BLOCK_BYTES = 64 * 2**10  # below glibc's threshold from which a block is mapped by itself


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim")
def test_free_memory_between_blocks_in_use_goes_back_to_the_kernel() -> None:
    now_s = 0.0
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    libc.malloc_trim(0)  # of what other tests have freed: the blocks would take it, and nothing would grow
    trimmer = HeapTrimmer(lambda: now_s)  # after that trim, because it counts growth from the memory in use now
    before = anonymous_bytes()
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(4 * GROWTH_BYTES // BLOCK_BYTES)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for index, block in enumerate(blocks):
        if index % 16:
            libc.free(block)
    grown = anonymous_bytes() - before
    assert grown > 3 * GROWTH_BYTES, "blocks in use keep glibc from shrinking the heap"
    now_s += MIN_INTERVAL_S
    assert trimmer.trim_if_grown()
    assert anonymous_bytes() - before < GROWTH_BYTES
    for block in blocks[::16]:
        libc.free(block)


def test_a_trim_waits_for_growth_and_for_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, num_bytes = 0.0, GROWTH_BYTES
    monkeypatch.setattr(heap, "anonymous_bytes", lambda: num_bytes)
    monkeypatch.setattr(heap, "trim_heap", lambda: None)
    trimmer = HeapTrimmer(lambda: now_s)
    now_s += MIN_INTERVAL_S
    assert not trimmer.trim_if_grown(), "it has not grown"
    num_bytes = 2 * GROWTH_BYTES
    assert trimmer.trim_if_grown()
    num_bytes = 3 * GROWTH_BYTES
    assert not trimmer.trim_if_grown(), "the last trim was just now"
    now_s += MIN_INTERVAL_S
    assert trimmer.trim_if_grown()
