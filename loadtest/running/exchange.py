"""One HTTP request and the bytes of its answer, with the times at which they came."""

from __future__ import annotations

from array import array
from typing import Protocol

from loadtest.record import Outcome

# Most bytes of a stream that wait to be read: some sixty events.
MAX_BUFFERED_BYTES = 2**13


class Carrier(Protocol):
    """The connection that an exchange is sent over."""

    exchange: Exchange | None

    def abort(self) -> None:
        """Close it now."""


class Exchange:
    """One request and its answer.

    Subclasses override `on_first` (first byte of a stream), `on_full` (much of a stream is unread) and `on_end` (once,
    at the end; an `outcome` of None is a complete HTTP answer, whatever it says).
    """

    __slots__ = (
        "body",
        "connection",
        "ended_s",
        "ends",
        "error",
        "first_s",
        "full_at",
        "is_ended",
        "is_stream",
        "outcome",
        "queue_s",
        "received",
        "started_s",
        "status",
        "times_s",
    )

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.connection: Carrier | None = None
        self.started_s = 0.0  # when its connection was opened, or over an open one, when its first byte was sent
        self.first_s = 0.0
        self.ended_s = 0.0
        self.status = 0
        self.is_stream = False
        self.queue_s: float | None = None  # TGI's header
        self.received = bytearray()  # of the answer's body, unread
        self.ends = array("L")  # size of the body after each piece that came
        self.times_s = array("d")  # the time of each piece
        self.full_at = MAX_BUFFERED_BYTES
        self.is_ended = False
        self.outcome: Outcome | None = None
        self.error = ""

    def on_first(self) -> None:
        """Called when the first bytes of a stream have come, at `first_s`."""

    def on_full(self) -> None:
        """Called when `full_at` bytes are unread. The reader of them calls `discard`."""

    def on_end(self) -> None:
        """Called at the end. Must not raise."""

    def discard(self, num_bytes: int) -> None:
        """Drop bytes that have been read.

        What is left is less than an event, so the times at which it came are dropped, too.
        """
        del self.received[:num_bytes]
        del self.ends[:], self.times_s[:]
        self.full_at = len(self.received) + MAX_BUFFERED_BYTES

    def arrived(self, at_s: float) -> None:
        """Note the time; there may be more of a stream than before."""
        size = len(self.received)
        if not size or (self.ends and self.ends[-1] == size):
            return
        self.ends.append(size)
        self.times_s.append(at_s)
        if not self.first_s:
            self.first_s = at_s
            self.on_first()
        if size >= self.full_at:
            self.on_full()

    def end(self, at_s: float, outcome: Outcome | None = None, error: str = "") -> None:
        assert not self.is_ended
        self.is_ended = True
        self.connection = None
        self.body = b""
        self.ended_s, self.outcome, self.error = at_s, outcome, error
        self.on_end()
