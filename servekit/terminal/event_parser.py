"""Parse server-sent events from a byte stream into the data of each event."""

from __future__ import annotations

MAX_EVENT_BYTES = 8 << 20  # a complete frame of the live view has some 100 KB


class EventTooLong(Exception):
    """An event is longer than MAX_EVENT_BYTES, so the sender is not a servekit server."""


class EventParser:
    """Return the data of events; ignore their names, ids and comments, which the terminal clients do not need."""

    def __init__(self) -> None:
        self._unfinished = bytearray()
        self._data: list[bytes] = []
        self._num_bytes = 0  # of the data lines held so far, empty ones included

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of each event that ends in this chunk. Raises EventTooLong."""
        self._unfinished += chunk
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
            if self._num_bytes > MAX_EVENT_BYTES:
                break
        if len(rest) + self._num_bytes > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES:,} bytes")
        return events
