"""Read how many pixels an image file has in its header, because an image costs by its pixels, and not by its bytes.

This is no decoder: it reads a few numbers at fixed places, and searches those of a JPEG by the lengths of its segments.
What it does not understand has no number of pixels, and is counted as an image of the largest size. The worker refuses
a file in which its decoder finds more pixels.
"""

from __future__ import annotations

import base64
import binascii
from typing import Literal

_MAX_SEGMENTS = 1000  # of a JPEG before its size, and bytes between them
_MAX_DATA_URL_HEAD = 1024  # bytes before the base64 text


def beginning_of(data: memoryview, is_base64: bool, num_bytes: int) -> bytes:
    """Return the first bytes of an image file, of at most `num_bytes` of `data`; nothing if they are not base64."""
    text = bytes(data[:num_bytes])
    if not is_base64:
        return text
    if text[:5].lower() == b"data:":
        text = text[text.find(b",", 0, _MAX_DATA_URL_HEAD) + 1 :]
    text = b"".join(text.split())
    try:
        return base64.b64decode(text[: len(text) // 4 * 4])
    except binascii.Error:
        return b""


def pixels_in_header(data: bytes) -> int | None:
    """Return the width times the height of the image file that begins with `data`; None if they are not found."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and len(data) >= 24:
        return _number(data, 16, 4, "big") * _number(data, 20, 4, "big")
    if data[:2] == b"\xff\xd8":
        return _pixels_of_jpeg(data)
    if data[:4] == b"GIF8" and len(data) >= 10:
        return _number(data, 6, 2) * _number(data, 8, 2)
    if data[:2] == b"BM" and len(data) >= 26:
        return _pixels_of_bmp(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        return _pixels_of_webp(data)
    return None


def _number(data: bytes, start: int, num_bytes: int, order: Literal["little", "big"] = "little") -> int:
    return int.from_bytes(data[start : start + num_bytes], order)


def _pixels_of_jpeg(data: bytes) -> int | None:
    """Return the pixels that the first frame's header says."""
    position = 2
    for _ in range(_MAX_SEGMENTS):
        if data[position : position + 2] == b"\xff\xff":  # padding
            position += 1
            continue
        if len(data) < position + 9 or data[position] != 0xFF:
            break
        kind = data[position + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # tables, and what is not used
            return _number(data, position + 5, 2, "big") * _number(data, position + 7, 2, "big")
        position += 2 + max(2, _number(data, position + 2, 2, "big"))
    return None


def _pixels_of_bmp(data: bytes) -> int:
    if _number(data, 14, 4) == 12:  # the header of OS/2
        return _number(data, 18, 2) * _number(data, 20, 2)
    # A height below zero: the first row is the uppermost one.
    return _number(data, 18, 4) * abs(int.from_bytes(data[22:26], "little", signed=True))


def _pixels_of_webp(data: bytes) -> int | None:
    kind = data[12:16]
    if kind == b"VP8 ":
        return (_number(data, 26, 2) & 0x3FFF) * (_number(data, 28, 2) & 0x3FFF)
    if kind == b"VP8L":
        sizes = _number(data, 21, 4)
        return ((sizes & 0x3FFF) + 1) * ((sizes >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X":
        return (_number(data, 24, 3) + 1) * (_number(data, 27, 3) + 1)
    return None
