"""Server-sent events, from bytes in any pieces to what each event says."""

from __future__ import annotations

MOST_BYTES = 8 << 20  # of one event; a whole frame of the live view has some 100 KB


class EventTooLong(Exception):
    """An event has no end: what sends it is no server of ours."""


class EventParser:
    """Events' names, ids and comments mean nothing to a terminal; their data is all."""

    def __init__(self) -> None:
        self._unfinished = bytearray()
        self._data: list[bytes] = []
        self._num_bytes = 0  # of their lines: those that say nothing are held, too

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece. Raises EventTooLong."""
        self._unfinished += piece
        *lines, rest = self._unfinished.split(b"\n")
        self._unfinished = rest
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(bytes(line[5:].removeprefix(b" ")))
                self._num_bytes += len(line) + 1
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._num_bytes = [], 0
            if self._num_bytes > MOST_BYTES:
                break
        if len(rest) + self._num_bytes > MOST_BYTES:
            raise EventTooLong(f"an event is longer than {MOST_BYTES:,} bytes")
        return events
