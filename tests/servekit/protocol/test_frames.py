"""Tests of frames in a stream of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servekit.protocol.frames import FrameCodec, add_header
from servekit.protocol.sealed_frames import SealedFrameCodec


def framed(sender: FrameCodec, payload: bytes) -> bytes:
    return b"".join(sender.encode(payload))


def plain() -> tuple[FrameCodec, FrameCodec]:
    return FrameCodec(), FrameCodec()


def sealed() -> tuple[FrameCodec, FrameCodec]:
    return SealedFrameCodec(b"a" * 32, b"b" * 32), SealedFrameCodec(b"b" * 32, b"a" * 32)


@settings(max_examples=100, deadline=None)
@given(payloads=st.lists(st.binary(max_size=200), max_size=6), piece=st.integers(1, 90), is_sealed=st.booleans())
def test_payloads_are_complete_for_any_pieces_of_the_stream(payloads: list[bytes], piece: int, is_sealed: bool) -> None:
    sender, receiver = sealed() if is_sealed else plain()
    stream = b"".join(framed(sender, payload) for payload in payloads)
    received = []
    if not is_sealed:
        assert stream == b"".join(map(add_header, payloads))
    for start in range(0, len(stream), piece):
        received += receiver.decode(stream[start : start + piece])
    assert received == payloads


def test_a_frame_over_the_limit_is_refused_by_its_header() -> None:
    """Nothing is kept of it: a sender cannot make the receiver hold more than the limit."""
    sender = FrameCodec()
    assert FrameCodec(max_bytes=100).decode(framed(sender, b"x" * 100)) == [b"x" * 100]
    with pytest.raises(ValueError, match="101 bytes; the limit is 100"):
        FrameCodec(max_bytes=100).decode(framed(sender, b"x" * 101)[:4])


def test_a_length_that_was_altered_is_refused_before_the_payload_arrives() -> None:
    """Otherwise the receiver would wait for as many bytes as an attacker likes, and keep them."""
    for bit in range(8 * SealedFrameCodec.header_bytes):
        sender, receiver = sealed()
        header = bytearray(framed(sender, b"x" * 1000)[: SealedFrameCodec.header_bytes])
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="MAC"):
            receiver.decode(bytes(header))


def test_the_header_of_another_frame_is_refused() -> None:
    sender, receiver = sealed()
    first, second = framed(sender, b"first"), framed(sender, b"longer than first")
    assert receiver.decode(first) == [b"first"]
    for header in (first, second[:4] + first[4:20]):
        _, again = sealed()
        again.decode(first)
        with pytest.raises(ValueError, match="MAC"):
            again.decode(header)
    assert receiver.decode(second) == [b"longer than first"]


def test_the_mac_of_a_length_does_not_pass_for_that_of_a_payload() -> None:
    sender, receiver = sealed()
    frame = framed(sender, b"abcd")
    length, mac_of_length = frame[:4], frame[4:20]
    with pytest.raises(ValueError, match="MAC"):
        receiver.decode(length + mac_of_length + length + mac_of_length)


def test_a_sealed_frame_over_the_limit_is_refused_by_its_header() -> None:
    frame = framed(SealedFrameCodec(b"a" * 32, b"b" * 32), b"x" * 101)
    receiver = SealedFrameCodec(b"b" * 32, b"a" * 32, max_bytes=100)
    with pytest.raises(ValueError, match="117 bytes; the limit is 116"):
        receiver.decode(frame[: SealedFrameCodec.header_bytes])
