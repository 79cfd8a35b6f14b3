"""Measure the memory of this process, in bytes that are allocated and not freed."""

from __future__ import annotations

import ctypes
import resource
from typing import Any

_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Mallinfo2(ctypes.Structure):
    """glibc's struct of that name."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def _find(name: str) -> Any:
    """Return a function of the C library; None if it has none of that name."""
    return getattr(ctypes.CDLL(None), name, None)


_mallinfo2 = _find("mallinfo2")  # since glibc 2.33
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2
_malloc_trim = _find("malloc_trim")


def allocated_bytes() -> int:
    """Return how many bytes are allocated. llguidance allocates with malloc, so a difference is exactly what it took.

    The call takes a microsecond, and up to half a millisecond after much was freed. Without glibc's `mallinfo2`, this
    returns the resident memory, which does not decrease by all that is freed.
    """
    if _mallinfo2 is None:
        return _resident_bytes()
    info = _mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def return_freed_memory() -> None:
    """Return freed memory to the kernel. Otherwise malloc keeps free memory that lies below allocated blocks."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
