"""Give free memory of the C heap back to the kernel.

glibc keeps free memory that lies between blocks in use, so a process stays as large as it ever was.
"""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return free pages of the heap to the kernel. Without glibc, nothing happens.

    Other Python threads go on meanwhile, but one that allocates may wait until this has ended.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
