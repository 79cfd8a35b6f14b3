"""Tests of frames in a stream of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.frames import FrameCodec
from servekit.protocol.sealed_frames import SealedFrameCodec


def plain() -> tuple[FrameCodec, FrameCodec]:
    return FrameCodec(), FrameCodec()


def sealed() -> tuple[FrameCodec, FrameCodec]:
    return SealedFrameCodec(b"a" * 32, b"b" * 32), SealedFrameCodec(b"b" * 32, b"a" * 32)


@settings(max_examples=100, deadline=None)
@given(payloads=st.lists(st.binary(max_size=200), max_size=6), piece=st.integers(1, 90), is_sealed=st.booleans())
def test_payloads_are_complete_for_any_pieces_of_the_stream(payloads: list[bytes], piece: int, is_sealed: bool) -> None:
    sender, receiver = sealed() if is_sealed else plain()
    stream = b"".join(map(sender.encode, payloads))
    received = []
    for start in range(0, len(stream), piece):
        received += receiver.decode(stream[start : start + piece])
    assert received == payloads


def test_a_frame_over_the_limit_is_refused_by_its_header() -> None:
    """Nothing is kept of it: a sender cannot make the receiver hold more than the limit."""
    sender = FrameCodec()
    assert FrameCodec(max_bytes=100).decode(sender.encode(b"x" * 100)) == [b"x" * 100]
    with pytest.raises(ValueError, match="101 bytes; the limit is 100"):
        FrameCodec(max_bytes=100).decode(sender.encode(b"x" * 101)[:4])
