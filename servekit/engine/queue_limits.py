"""Limit how much may wait for its first step, and compute when a refused request should come back.

Sequences and their prompt tokens are both limited: a hundred long prompts can be more work than thousands of short
ones.
"""

from __future__ import annotations

from collections import deque
from math import ceil

from servekit.config import ServeConfig
from servekit.errors import InvalidRequest, QueueFull
from servekit.observability.observer import Observer
from servekit.request import GenerationRequest
from servekit.scheduler.sequence import FinishReason, Sequence

RATE_WINDOW_S = 30.0  # the rate of ended sequences is measured over this time
MAX_RETRY_AFTER_S = 60
DEFAULT_RETRY_AFTER_S = 10  # if no sequence has ended recently


class QueueLimits(Observer):
    """Checks requests against the limits of the queue, and measures how fast sequences end."""

    NUM_ENDS_KEPT = 4096

    def __init__(self, config: ServeConfig) -> None:
        self._max_answers = config.max_client_batch_size
        self._max_sequences = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._ended_s: deque[float] = deque(maxlen=self.NUM_ENDS_KEPT)

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        self._ended_s.append(now_s)

    def check_answers(self, request: GenerationRequest, num_waiting: int, now_s: float) -> None:
        """Check the number of answers that a request asks for.

        Raises InvalidRequest if they exceed an empty queue, and QueueFull if they exceed the room that is left.
        """
        num_answers = request.num_sequences
        if request.n > 1:
            param = "n"
        elif request.best_of > 1:
            param = "best_of"
        else:
            param = request.prompts[0].param.partition("[")[0]
        if num_answers > self._max_answers:
            raise InvalidRequest(
                f"the request asks for {num_answers} answers (prompts times n, or best_of); the limit is "
                f"{self._max_answers} (max_client_batch_size)",
                param=param,
            )
        if num_answers > self._max_sequences:
            raise InvalidRequest(
                f"the request asks for {num_answers} answers; the queue holds {self._max_sequences} "
                "(max_num_queued_reqs)",
                param=param,
            )
        if num_waiting + num_answers > self._max_sequences:
            raise QueueFull(
                f"the queue is full: {num_waiting} sequences are queued and the request adds {num_answers}; the limit "
                f"is {self._max_sequences} (max_num_queued_reqs). Please try again later.",
                retry_after_s=self.retry_after_s(num_waiting + num_answers - self._max_sequences, now_s),
            )

    def check_tokens(self, num_tokens: int, num_waiting_tokens: int, num_waiting: int, now_s: float) -> None:
        """Check the prompt tokens of a request, each prompt counted once for each of its answers.

        Raises InvalidRequest if they exceed an empty queue, and QueueFull if they exceed the room that is left.
        """
        if num_tokens > self._max_tokens:
            raise InvalidRequest(
                f"the request has {num_tokens} prompt tokens, each prompt counted once for each of its answers; the "
                f"queue holds {self._max_tokens} (max_num_queued_tokens)"
            )
        if num_waiting_tokens + num_tokens > self._max_tokens:
            raise QueueFull(
                f"the queue is full: {num_waiting_tokens} prompt tokens are queued and the request adds {num_tokens}; "
                f"the limit is {self._max_tokens} (max_num_queued_tokens). Please try again later.",
                retry_after_s=self.retry_after_s(num_waiting, now_s),
            )

    def retry_after_s(self, num_sequences: int, now_s: float) -> int:
        """Whole seconds until `num_sequences` sequences will have ended, at the recent rate."""
        while self._ended_s and self._ended_s[0] < now_s - RATE_WINDOW_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return DEFAULT_RETRY_AFTER_S
        rate = len(self._ended_s) / max(1.0, now_s - self._ended_s[0])
        return min(MAX_RETRY_AFTER_S, max(1, ceil(num_sequences / rate)))
