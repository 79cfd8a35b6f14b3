"""Divide a stream of bytes into frames, each with its length before it. Pure: it reads and writes nothing."""

from __future__ import annotations

Bytes = bytes | bytearray | memoryview

# A step plan takes about 5 bytes for each token and block in it, and the rest of a request is limited at admission. So
# this is far more than any valid message takes, and a longer frame means that the stream is corrupt.
MAX_MESSAGE_BYTES = 2**30
HEADER_BYTES = 4


class FrameCodec:
    """Frames in a stream of bytes: the length of each, and then its payload.

    The payload of a frame that is received has at most `max_bytes`. The received part of an incomplete frame is kept.
    """

    header_bytes = HEADER_BYTES

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._partial = bytearray()
        self._length: int | None = None  # of the first frame in `_partial`, once its header has arrived

    def encode(self, *payload: Bytes) -> list[Bytes]:
        """Return the frame of a payload, both in parts, because joining them would copy a payload of megabytes."""
        return [encode_length(sum(map(len, payload))), *payload]

    def decode(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the stream, and return the payloads that are complete.

        Raises ValueError if the length of a frame is not valid.
        """
        self._partial += data
        payloads = []
        while (payload := self._next_payload()) is not None:
            payloads.append(payload)
        return payloads

    def _next_payload(self) -> bytes | None:
        """Take the first frame out of what has arrived; None if it has not arrived completely."""
        start = self.header_bytes
        if self._length is None:
            if len(self._partial) < start:
                return None
            self._length = self._read_length(bytes(self._partial[:start]))
            if not 0 <= self._length <= self._max_bytes:
                raise ValueError(f"the length of a message is {self._length} bytes; the limit is {self._max_bytes}")
        end = start + self._length
        if len(self._partial) < end:
            return None
        with memoryview(self._partial) as partial, partial[start:end] as part:  # which copies it once
            payload = bytes(part)
        del self._partial[:end]
        self._length = None
        return payload

    def _read_length(self, header: bytes) -> int:
        return frame_length(header)


def add_header(payload: bytes) -> bytes:
    """Put the length of an encoded message before it, in the format of `multiprocessing.Connection`."""
    return encode_length(len(payload)) + payload


def encode_length(length: int) -> bytes:
    """Return a length as `frame_length` reads it."""
    return length.to_bytes(HEADER_BYTES, "big", signed=True)


def frame_length(header: bytes | bytearray) -> int:
    """Return the length of the message after this header, which may be invalid."""
    return int.from_bytes(header[:HEADER_BYTES], "big", signed=True)
