"""Convert megabytes of bytes in short slices, so that the event loop runs everything else between them."""

from __future__ import annotations

import asyncio
from array import array
from codecs import getincrementaldecoder

SLICE_BYTES = 2**16  # less than a millisecond each


async def text_of(utf8: memoryview) -> str:
    """Decode valid UTF-8."""
    decode, pieces = getincrementaldecoder("utf-8")().decode, []
    for start in range(0, len(utf8), SLICE_BYTES):
        pieces.append(decode(utf8[start : start + SLICE_BYTES]))
        await asyncio.sleep(0)
    text = "".join(pieces)
    await asyncio.sleep(0)  # joining 8 MB takes some milliseconds, and what comes next takes more
    return text


async def integers_of(int32: memoryview) -> array[int]:
    """Decode integers of 32 bits, in the byte order of this machine."""
    integers = array("i")
    for start in range(0, len(int32), SLICE_BYTES):
        integers.frombytes(int32[start : start + SLICE_BYTES])
        await asyncio.sleep(0)
    return integers
