"""What is read of a file's first bytes is what a decoder finds, or nothing."""

from __future__ import annotations

import base64
import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from servekit.dynamic_batching.image_header import beginning_of, pixels_in_header

KINDS = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "exif": b"Exif\0\0" + bytes(30_000)}),
    ("GIF", {}),
    ("BMP", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"exif": b"Exif\0\0" + bytes(100)}),
]


def saved(width: int, height: int, kind: str, **options: object) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(content, kind, **options)
    return content.getvalue()


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("size", [(1, 1), (300, 7), (16, 1025)])
def test_the_size_in_a_header_is_that_of_the_decoder(
    size: tuple[int, int], kind: str, options: dict[str, object]
) -> None:
    data = saved(*size, kind, **options)
    assert pixels_in_header(data) == size[0] * size[1]
    assert pixels_in_header(data[:9]) is None, "what is cut off is not guessed"


@given(st.sampled_from(KINDS), st.data())
def test_no_header_is_too_odd_to_be_read(kind: tuple[str, dict[str, object]], data: st.DataObject) -> None:
    content = bytearray(saved(9, 5, kind[0], **kind[1])[:400])
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    found = pixels_in_header(bytes(content))
    assert found is None or found >= 0


def test_bmp_files_may_be_upside_down_or_of_os_2() -> None:
    head = b"BM" + bytes(12)
    assert pixels_in_header(head + struct.pack("<Iii", 40, 7, -5)) == 35
    assert pixels_in_header(head + struct.pack("<IHHI", 12, 7, 5, 0)) == 35


def test_other_files_have_no_size() -> None:
    assert pixels_in_header(b"") is None and pixels_in_header(b"not an image" * 10) is None
    assert pixels_in_header(b"RIFF\0\0\0\0WEBPALPH" + bytes(40)) is None


def test_a_jpeg_may_pad_markers_but_its_size_is_not_searched_for_ever() -> None:
    data = saved(9, 5, "JPEG")
    assert pixels_in_header(data[:2] + b"\xff" * 20 + data[2:]) == 45
    assert pixels_in_header(data[:2] + b"\xff" * 2000 + data[2:]) is None
    assert pixels_in_header(data[:2] + b"garbage" + data[2:]) is None


@given(st.binary(min_size=200, max_size=500))
def test_the_beginning_of_base64_is_that_of_the_file(data: bytes) -> None:
    text = base64.b64encode(data)
    wrapped = b"\r\n".join(text[start : start + 76] for start in range(0, len(text), 76))
    for form in (text, wrapped, b"data:image/png;base64," + text, b"DATA:image/jpeg;base64,\n" + wrapped):
        found = beginning_of(memoryview(form), True, 200)
        assert data.startswith(found) and len(found) > 120
        assert beginning_of(memoryview(form), True, 10_000) == data[: len(text) // 4 * 3]
    assert beginning_of(memoryview(data), False, 150) == data[:150]
    assert beginning_of(memoryview(b"A==="), True, 150) == b""
