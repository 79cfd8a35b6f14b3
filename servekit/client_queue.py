"""What has been generated for one client and not yet been taken: one queue per request.

The engine never waits for a client. Whoever reads gets all that is pending at once, so a slow reader is woken less
often, costs at most the length of its own output, and never stalls the others. With an `interval`, so is a quick one:
the first tokens wake it at once, later ones only when a sequence has that many, or has ended.
"""

from __future__ import annotations

from msgspec import Struct

from servekit.bell import Bell
from servekit.messages import TokenLogprobs
from servekit.sequence import FinishReason


class TokenDelta(Struct, frozen=True):
    """One token of one of the request's sequences, and the text that it made certain; or an end without a token."""

    index: int  # which of the request's sequences
    token_id: int | None
    text: str
    special: bool
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None


class ClientQueue:
    """Filled by the engine, drained by one reader."""

    __slots__ = ("_changed", "_error", "_interval", "_is_read", "_num_pending", "_pending")

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._is_read = False  # whether anything was taken yet
        self._pending: list[TokenDelta] = []
        self._num_pending: dict[int, int] = {}  # by sequence, where an interval is to be waited for
        self._error: Exception | None = None
        self._changed = Bell()

    def put(self, delta: TokenDelta) -> None:
        self._pending.append(delta)
        if self._interval == 1 or not self._is_read or delta.finish_reason is not None:
            self._changed.set()
            return
        num_pending = self._num_pending[delta.index] = self._num_pending.get(delta.index, 0) + 1
        if num_pending >= self._interval:
            self._changed.set()

    def fail(self, error: Exception) -> None:
        """After what is pending, the reader gets this error."""
        self._error = error
        self._changed.set()

    def wake(self) -> None:
        """Let the reader go on, even if there is nothing."""
        self._changed.set()

    async def get(self) -> list[TokenDelta]:
        """Everything that has come since the last call; waits until there is something, or for `wake`, after which
        there may be nothing. Raises what `fail` gave.

        There is no timeout here: each sequence ends by length at the latest, a worker that does not answer fails
        its clients' queues, and a reader that gives up is cancelled.
        """
        await self._changed.wait()
        if not self._pending and self._error is not None:
            raise self._error
        pending, self._pending = self._pending, []
        if self._num_pending:
            self._num_pending.clear()
        self._is_read = True
        if self._error is None:
            self._changed.clear()
        return pending
