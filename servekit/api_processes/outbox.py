"""Collect the engine's output for the requests of one API process until it is sent.

All tokens that one turn of the event loop delivers, over all requests, travel in one message. A main loop delivers the
tokens of a step and then sends the next plan before it waits, so the worker does not wait for this.

Its size is bounded like that of a `ClientQueue`: it holds at most the output that admitted requests may have. While the
API process does not read, nothing is encoded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import ClassVar

from msgspec import Struct

from servekit.api_processes.frame_connection import FrameConnection
from servekit.api_processes.messages import (
    Failure,
    FromApiProcess,
    Output,
    PromptLogprobsPart,
    RequestFailed,
    SequenceTimes,
)
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.request_state import RequestState

MAX_DELTAS = 2**11  # in a message; encoding so many takes about a millisecond
MAX_PROMPT_LOGPROBS = 2**12  # in a message; one such message is sent in a turn of the event loop


class Outbox:
    """The output of all requests of one API process, in order."""

    def __init__(self, connection: FrameConnection[FromApiProcess]) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._deltas: list[tuple[int, TokenDelta]] = []  # of this turn of the event loop
        self._times: list[SequenceTimes] = []
        self._messages: deque[Struct] = deque()  # that precede them
        self._is_due = False
        connection.on_room = self._send_later

    def put(self, request: int, delta: TokenDelta) -> None:
        """Add a delta."""
        self._deltas.append((request, delta))
        if not self._is_due:
            self._send_later()

    def put_times(self, times: SequenceTimes) -> None:
        """Add what is known of a sequence, before its next delta."""
        self._times.append(times)

    def put_message(self, message: Struct) -> None:
        """Add a message that comes after the deltas so far."""
        self._close_message()
        self._messages.append(message)
        if not self._is_due:
            self._send_later()

    def _send_later(self) -> None:
        self._is_due = True
        self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        self._close_message()
        messages = self._messages
        while messages and not self._connection.is_full:
            message = messages.popleft()
            self._connection.send(message)
            if isinstance(message, PromptLogprobsPart) and messages:
                self._send_later()  # a long prompt has hundreds of these
                return

    def _close_message(self) -> None:
        """Make messages of the deltas so far."""
        deltas, times = self._deltas, self._times
        if not deltas and not times:
            return
        self._deltas, self._times = [], []
        if len(deltas) <= MAX_DELTAS:
            self._messages.append(Output(deltas, times))
            return
        self._messages.append(Output([], times))
        self._messages.extend(Output(deltas[at : at + MAX_DELTAS]) for at in range(0, len(deltas), MAX_DELTAS))


class RemoteClientQueue(ClientQueue):
    """The queue of a request whose client is connected to another process."""

    __slots__ = ("_begun", "_number", "_outbox", "state")
    takes_token_ids: ClassVar[bool] = True
    state: RequestState  # set before anything is put

    def __init__(self, number: int, outbox: Outbox) -> None:
        super().__init__()
        self._number = number
        self._outbox = outbox
        self._begun: set[int] = set()  # sequences with at least one delta

    def put(self, delta: TokenDelta) -> None:
        index = delta.index
        if index not in self._begun:
            self._begun.add(index)
            self._put_prompt_logprobs(index)
            self._put_times(index)
        elif delta.finish_reason is not None:
            self._put_times(index)
        self._outbox.put(self._number, delta)

    def fail(self, error: Exception) -> None:
        self._outbox.put_message(RequestFailed(self._number, Failure.of(error)))

    def _put_times(self, index: int) -> None:
        output = self.state.outputs[index]
        sequence = output.sequence
        self._outbox.put_times(
            SequenceTimes(
                self._number,
                index,
                sequence.num_cached_tokens,
                sequence.num_preemptions,
                sequence.first_scheduled_s,
                output.first_token_s,
                output.last_token_s,
                sequence.num_drafted_tokens,
                sequence.num_accepted_tokens,
            )
        )

    def _put_prompt_logprobs(self, index: int) -> None:
        """Send the logprobs of the prompt before the first token of the sequence that computed it."""
        output = self.state.outputs[index]
        if output.is_fork or self.state.request.prompt_logprobs is None:
            return
        logprobs = output.sequence.prompt_logprobs
        for start in range(0, len(logprobs), MAX_PROMPT_LOGPROBS):
            part = logprobs[start : start + MAX_PROMPT_LOGPROBS]
            self._outbox.put_message(PromptLogprobsPart(self._number, index, part))
