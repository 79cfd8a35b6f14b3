"""How many scans a JPEG file has is found without decoding it, and as a decoder would find it."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from tests.support.predictor_checkpoints import make_image
from workers.prediction.jpeg import MAX_SCANS, MAX_SEGMENTS, has_too_many_scans


def progressive() -> tuple[bytes, bytes]:
    """Return a progressive file up to its end, and its last scan, which may be repeated."""
    content = io.BytesIO()
    Image.open(io.BytesIO(make_image(200, 100))).save(content, "JPEG", progressive=True, restart_marker_blocks=1)
    data = content.getvalue()
    return data[:-2], data[data.rindex(b"\xff\xda") : -2]


def test_usual_files_have_few_scans() -> None:
    data, _ = progressive()
    assert data.count(b"\xff\xda") == 10 and data.count(b"\xff\xd0") > 100
    assert not has_too_many_scans(data + b"\xff\xd9")
    assert not has_too_many_scans(make_image(200, 100, "JPEG"))


@pytest.mark.parametrize("between", [b"", b"\xff\xff", b"garbage", b"\xff\x00", b"\xff\xd3", b"\xff\xfe\x00\x02"])
def test_a_file_of_many_scans_is_found_whatever_is_between_them(between: bytes) -> None:
    data, scan = progressive()
    again = between + scan
    assert not has_too_many_scans(data + again * (MAX_SCANS - 10) + b"\xff\xd9")
    assert has_too_many_scans(data + again * (MAX_SCANS - 9) + b"\xff\xd9")
    assert has_too_many_scans(data + again * (MAX_SCANS - 9)), "decoders do not need the end"


def test_scans_in_a_thumbnail_or_behind_the_end_do_not_count() -> None:
    data, _ = progressive()
    thumbnail = b"\xff\xe1" + (2 + 4 * 200).to_bytes(2, "big") + b"\xff\xda\x00\x02" * 200
    assert not has_too_many_scans(data[:2] + thumbnail + data[2:] + b"\xff\xd9" + b"\xff\xda\x00\x02" * 200)


def test_a_file_of_a_million_segments_is_not_walked_to_its_end() -> None:
    data, _ = progressive()
    assert not has_too_many_scans(data[:2] + b"\xff\xfe\x00\x02" * (MAX_SEGMENTS - 100) + data[2:])
    assert has_too_many_scans(data[:2] + b"\xff\xfe\x00\x02" * MAX_SEGMENTS + data[2:])
