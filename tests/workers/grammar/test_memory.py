"""Claims about the measured memory, compared with what is allocated."""

from __future__ import annotations

import subprocess
import sys

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
    block = bytearray(b"1" * 16 * MIB)
    assert allocated_bytes() - before > 8 * MIB
    assert block


def test_a_lower_limit_that_was_inherited_stays() -> None:
    code = (
        "import resource\n"
        "from workers.grammar.memory import limit_address_space\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "limit_address_space(2**32)\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[0])\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == f"{2**30}\n"
    )


def test_beyond_the_limit_of_the_address_space_an_allocation_fails() -> None:
    code = (
        "from workers.grammar.memory import limit_address_space\n"
        "limit_address_space(64 * 2**20)\n"
        "bytearray(32 * 2**20)\n"
        "try: bytearray(128 * 2**20)\n"
        "except MemoryError: print('refused')\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "refused\n"
    )
