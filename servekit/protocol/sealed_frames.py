"""Protect frames by MACs: a frame that was altered, left out, repeated or inserted is detected. Pure."""

from __future__ import annotations

import hmac
from hashlib import sha256

from servekit.protocol.frames import HEADER_BYTES, MAX_MESSAGE_BYTES, Bytes, FrameCodec, encode_length, frame_length

MAC_BYTES = 16  # of HMAC-SHA256's 32; a guess succeeds with probability 2**-128, and the first wrong one is the last


class SealedFrameCodec(FrameCodec):
    """A FrameCodec with two MACs in each frame: one over its length, and one over its payload.

    Both cover the frame's number in the stream. The length has a MAC of its own, because it is used before the payload
    has arrived: an altered length would otherwise make the receiver wait for up to `max_bytes` and keep them. Each
    direction has its own key, so a frame that is sent back to its sender is not valid there. The contents are not
    encrypted: TLS does that.
    """

    header_bytes = HEADER_BYTES + MAC_BYTES

    def __init__(self, send_key: bytes, receive_key: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(max_bytes + MAC_BYTES)
        self._send_key = send_key
        self._receive_key = receive_key
        self._num_sent = 0
        self._num_received = 0

    def encode(self, *payload: Bytes) -> list[Bytes]:
        content = b"".join(payload)  # the MAC reads all of it anyway
        length = encode_length(len(content) + MAC_BYTES)
        header_mac = _mac(self._send_key, self._num_sent, b"length", length)
        payload_mac = _mac(self._send_key, self._num_sent, b"payload", content)
        self._num_sent += 1
        return [length + header_mac, content, payload_mac]

    def _read_length(self, header: bytes) -> int:
        """Return the length in a header. Raises ValueError if its MAC is wrong."""
        length, mac = header[:HEADER_BYTES], header[HEADER_BYTES:]
        self._check(mac, b"length", length)
        return frame_length(length)

    def _next_payload(self) -> bytes | None:
        """As in FrameCodec. Raises ValueError for a frame with a wrong MAC, and delivers no frame after it."""
        sealed = super()._next_payload()
        if sealed is None:
            return None
        payload, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        self._check(mac, b"payload", payload)
        self._num_received += 1
        return payload

    def _check(self, mac: bytes, label: bytes, content: bytes) -> None:
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._num_received, label, content)):
            raise ValueError("a frame has a wrong MAC: it was altered, repeated or left out on the network")


def _mac(key: bytes, number: int, label: bytes, content: bytes) -> bytes:
    """Return the MAC of one part of a frame. The labels differ in their first byte, so no part passes for another."""
    return hmac.digest(key, number.to_bytes(8, "big") + label + content, "sha256")[:MAC_BYTES]


def framed_digest(frames: list[bytes]) -> bytes:
    """Return the SHA-256 digest of frames with their lengths, so that no two lists of frames have the same."""
    digest = sha256()
    for frame in frames:
        digest.update(len(frame).to_bytes(HEADER_BYTES, "big"))
        digest.update(frame)
    return digest.digest()
