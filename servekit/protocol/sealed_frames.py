"""Frames that carry a MAC: a frame that was altered, left out, repeated or inserted on its way is detected. Pure."""

from __future__ import annotations

import hmac
from hashlib import sha256

from servekit.protocol.frames import HEADER_BYTES, MAX_MESSAGE_BYTES, FrameCodec, add_header

MAC_BYTES = 16  # of HMAC-SHA256's 32; a guess succeeds with probability 2**-128, and the first wrong one is the last


class SealedFrameCodec(FrameCodec):
    """A FrameCodec whose frames end with a MAC over their number in the stream and their payload.

    Each direction has its own key, so a frame that is sent back to its sender is not valid there. The contents are not
    encrypted: TLS does that.
    """

    def __init__(self, send_key: bytes, receive_key: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(max_bytes + MAC_BYTES)
        self._send_key = send_key
        self._receive_key = receive_key
        self._num_sent = 0
        self._num_received = 0

    def encode(self, payload: bytes) -> bytes:
        mac = _mac(self._send_key, self._num_sent, payload)
        self._num_sent += 1
        return add_header(payload + mac)

    def decode(self, data: bytes) -> list[bytes]:
        """As in FrameCodec. Raises ValueError for a frame whose MAC is wrong, and delivers no frame behind it."""
        return [self._open(sealed) for sealed in super().decode(data)]

    def _open(self, sealed: bytes) -> bytes:
        payload, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self._receive_key, self._num_received, payload)):
            raise ValueError("a frame has a wrong MAC: it was altered, repeated or left out on the network")
        self._num_received += 1
        return payload


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + payload, "sha256")[:MAC_BYTES]


def framed_digest(frames: list[bytes]) -> bytes:
    """Return the SHA-256 digest of frames with their lengths, so that no two lists of frames have the same."""
    digest = sha256()
    for frame in frames:
        digest.update(len(frame).to_bytes(HEADER_BYTES, "big"))
        digest.update(frame)
    return digest.digest()
