"""Claims about the measured memory, compared with what is allocated."""

from __future__ import annotations

from mmap import PAGESIZE, mmap

import pytest

from workers.grammar import memory
from workers.grammar.memory import allocated_bytes

MIB = 2**20


def test_allocated_bytes_are_those_that_were_allocated_and_not_freed() -> None:
    before = allocated_bytes()
    blocks = [bytearray(MIB) for _ in range(8)] + [bytearray(1000) for _ in range(2000)]
    grown = allocated_bytes() - before
    assert 10 * 10**6 - MIB < grown < 11 * MIB
    del blocks
    assert abs(allocated_bytes() - before) < MIB


def test_without_glibc_it_is_the_resident_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_mallinfo2", None)
    before = allocated_bytes()
    with mmap(-1, 64 * MIB) as block:  # pages that this process did not have before
        for start in range(0, len(block), PAGESIZE):
            block[start] = 1
        assert allocated_bytes() - before > 32 * MIB
