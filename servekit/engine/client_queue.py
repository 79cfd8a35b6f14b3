"""Queue the output of one request for its client.

The engine never waits for a client. A reader gets everything that is pending at once, so a slow reader is woken less
often, holds at most the length of its own output, and never delays other clients. With an `interval` above 1, a fast
reader is woken less often, too: at once for the first tokens, later only when a sequence has that many new tokens, or
has ended.

Resuming a task takes a microsecond, for each token of each stream. So a reader may pass a function that takes what is
pending. The event loop then calls this function, and does not resume the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from msgspec import Struct

from servekit.aio.single_waiter_event import SingleWaiterEvent
from servekit.parsing.answer_events import AnswerEvent
from servekit.protocol.messages import TokenLogprobs
from servekit.scheduler.sequence import FinishReason


class TokenDelta(Struct, frozen=True, array_like=True, gc=False):
    """One token of a sequence and the text that it completes; or the end of a sequence, without a token."""

    index: int  # index of the sequence in its request
    token_id: int | None
    text: str
    special: bool
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: TokenLogprobs | None = None


class ParsedDelta(TokenDelta, frozen=True, array_like=True, gc=False):
    """A piece of a chat's answer that its server has parsed: what it adds besides the text of its content."""

    events: tuple[AnswerEvent, ...] = ()


class ClientQueue:
    """A queue that the engine fills and one reader empties."""

    __slots__ = ("_changed", "_error", "_interval", "_is_offered", "_is_read", "_num_pending", "_pending", "_take")
    takes_token_ids: ClassVar[bool] = False  # whether its reader makes the text, where that does not end a sequence

    def __init__(self, interval: int = 1) -> None:
        self._interval = interval
        self._is_read = False  # whether anything has been taken yet
        self._pending: list[TokenDelta] = []
        self._num_pending: dict[int, int] = {}  # new tokens by sequence, if the interval is above 1
        self._error: Exception | None = None
        self._changed = SingleWaiterEvent()
        self._take: Callable[[list[TokenDelta]], bool] | None = None  # of the reader that waits
        self._is_offered = False  # whether the event loop will soon call `_offer`

    def put(self, delta: TokenDelta) -> None:
        """Add a delta, and wake the reader if it is due. Never waits."""
        self._pending.append(delta)
        if self._interval != 1 and self._is_read and delta.finish_reason is None:
            num_pending = self._num_pending[delta.index] = self._num_pending.get(delta.index, 0) + 1
            if num_pending < self._interval:
                return
        if self._take is None:
            self._changed.set()
        elif not self._is_offered:
            self._is_offered = True
            asyncio.get_running_loop().call_soon(self._offer)

    def fail(self, error: Exception) -> None:
        """Make the reader raise this error, after it has got what is pending."""
        self._error = error
        self._changed.set()

    def wake(self) -> None:
        """Make a waiting reader return, even if nothing is pending."""
        self._changed.set()

    async def get(self, take: Callable[[list[TokenDelta]], bool] | None = None) -> list[TokenDelta]:
        """Return everything that has been added since the last call; wait until there is something.

        If `take` is given, the event loop calls it with everything that is pending, each time the reader would be
        woken. As long as it returns True, it has taken the deltas, and this goes on waiting. When it returns False, it
        has not taken them, and they are returned.

        Returns an empty list after `wake`. Raises the error that `fail` was given. There is no timeout: each sequence
        ends by length at the latest, a worker that does not answer fails its clients' queues, and a reader whose client
        disconnects is cancelled.
        """
        self._take = take
        try:
            await self._changed.wait()
        finally:
            self._take = None
        if not self._pending and self._error is not None:
            raise self._error
        pending = self._take_pending()
        if self._error is None:
            self._changed.clear()
        return pending

    def _offer(self) -> None:
        """Let the reader's function take what is pending. If it does not, or fails, wake the reader."""
        self._is_offered = False
        take = self._take
        if take is None or not self._pending:
            return  # the reader is awake
        pending = self._take_pending()
        try:
            is_taken = take(pending)
        except Exception as error:
            self.fail(error)
            return
        if not is_taken:
            self._pending, self._take = pending, None
            self._changed.set()

    def _take_pending(self) -> list[TokenDelta]:
        pending, self._pending = self._pending, []
        if self._num_pending:
            self._num_pending.clear()
        self._is_read = True
        return pending
