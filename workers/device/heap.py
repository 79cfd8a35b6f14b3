"""Give free memory of the C heap back to the kernel, so that the worker's memory does not grow with its age.

Each step allocates tensors of other sizes than the step before, and glibc puts them into the same heap as everything
that stays. So the free memory lies in pieces between what is in use, and the heap grows although no more of it is used.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 2**26  # less growth is not worth the time of a trim, about 20 ms
MIN_INTERVAL_S = 10.0  # steps wait for memory during a trim, and then take its pages again from the kernel


def trim_heap() -> None:
    """Return free pages of the heap to the kernel. Without glibc, nothing happens."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class HeapTrimmer:
    """Trims the heap of this process when its memory has grown by GROWTH_BYTES since the last time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._least_bytes = anonymous_bytes()  # since the last trim
        self._trimmed_s = clock()

    def trim_if_grown(self) -> bool:
        """Return free pages to the kernel if it is time for that, and return whether it was. May run in any thread."""
        num_bytes = anonymous_bytes()
        self._least_bytes = min(self._least_bytes, num_bytes)
        has_grown = num_bytes - self._least_bytes >= GROWTH_BYTES
        if not has_grown or self._clock() - self._trimmed_s < MIN_INTERVAL_S:
            return False
        trim_heap()
        self._least_bytes, self._trimmed_s = anonymous_bytes(), self._clock()
        return True


def anonymous_bytes() -> int:
    """Return the resident bytes of this process that are no file's: heap, stacks, the KV cache on a CPU."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
