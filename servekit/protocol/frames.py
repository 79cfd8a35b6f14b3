"""Divide a stream of bytes into frames, each with its length before it. Pure: it reads and writes nothing."""

from __future__ import annotations

# A step plan takes about 5 bytes for each token and block in it, and the rest of a request is limited at admission. So
# this is far more than any valid message takes, and a longer frame means that the stream is corrupt.
MAX_MESSAGE_BYTES = 2**30
HEADER_BYTES = 4


class FrameCodec:
    """Frames in a stream of bytes: the length of each, and then its payload.

    The payload of a frame is at most `max_bytes`. Of a frame that has not arrived completely, what has arrived is kept.
    """

    def __init__(self, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._partial = bytearray()

    def encode(self, payload: bytes) -> bytes:
        """Return the frame of a payload."""
        return add_header(payload)

    def decode(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the stream, and return the payloads that are complete.

        Raises ValueError if the length of a frame is not valid.
        """
        self._partial += data
        payloads = []
        while (end := self._end_of_frame()) is not None:
            payloads.append(bytes(self._partial[HEADER_BYTES:end]))
            del self._partial[:end]
        return payloads

    def _end_of_frame(self) -> int | None:
        """Return where the first frame ends; None if it has not arrived completely."""
        if len(self._partial) < HEADER_BYTES:
            return None
        length = frame_length(self._partial[:HEADER_BYTES])
        if not 0 <= length <= self._max_bytes:
            raise ValueError(f"the length of a message is {length} bytes; the limit is {self._max_bytes}")
        end = HEADER_BYTES + length
        return end if len(self._partial) >= end else None


def add_header(payload: bytes) -> bytes:
    """Put the length of an encoded message before it, in the format of `multiprocessing.Connection`."""
    return len(payload).to_bytes(HEADER_BYTES, "big", signed=True) + payload


def frame_length(header: bytes | bytearray) -> int:
    """Return the length of the message after this header, which may be invalid."""
    return int.from_bytes(header, "big", signed=True)
