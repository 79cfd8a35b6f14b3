"""How much may wait, and when to come back if it is full.

Requests count, and so do the tokens of their prompts: a hundred long ones can be more work than thousands of short.
"""

from __future__ import annotations

from collections import deque
from math import ceil

from servekit.config import ServeConfig
from servekit.errors import InvalidRequest, QueueFull
from servekit.generation_request import GenerationRequest

WINDOW_S = 30.0  # how far back the rate is looked at
MOST_S = 60  # that anybody is told to wait
UNKNOWN_S = 10  # where nobody has left lately


class WaitingRoom:
    """The bounds on what waits. It is told who leaves, and so knows how long the line takes."""

    NUM_REMEMBERED = 4096

    def __init__(self, config: ServeConfig) -> None:
        self._max_answers = config.max_client_batch_size
        self._max_waiting = config.max_num_queued_reqs
        self._max_waiting_tokens = config.max_num_queued_tokens
        self._left_s: deque[float] = deque(maxlen=self.NUM_REMEMBERED)

    def left(self, now: float) -> None:
        """A sequence ended."""
        self._left_s.append(now)

    def check_answers(self, request: GenerationRequest, num_waiting: int, now: float) -> None:
        """Raise InvalidRequest for what asks for more than may ever wait, and QueueFull for what would now."""
        num_answers, most = request.num_sequences, self._max_waiting
        param = (
            "n" if request.n > 1 else "best_of" if request.best_of > 1 else request.prompts[0].param.partition("[")[0]
        )
        if num_answers > self._max_answers:
            raise InvalidRequest(
                f"{num_answers} answers to one request (prompts times n, or best_of); at most {self._max_answers} are "
                "computed (max_client_batch_size)",
                param=param,
            )
        if num_answers > most:
            raise InvalidRequest(
                f"{num_answers} answers to one request; at most {most} may wait (max_num_queued_reqs)", param=param
            )
        if num_waiting + num_answers > most:
            raise QueueFull(
                f"{num_waiting} sequences are waiting and {num_answers} more came; at most {most} may wait. "
                "Please try again later.",
                retry_after_s=self.retry_after_s(num_waiting + num_answers - most, now),
            )

    def check_tokens(self, num_tokens: int, num_waiting_tokens: int, num_waiting: int, now: float) -> None:
        """The same for the prompt tokens of a request, each prompt once for each of its answers."""
        most = self._max_waiting_tokens
        if num_tokens > most:
            raise InvalidRequest(
                f"{num_tokens} prompt tokens in one request, each prompt once for each of its answers; at most {most} "
                "may wait (max_num_queued_tokens)"
            )
        if num_waiting_tokens + num_tokens > most:
            raise QueueFull(
                f"prompts of {num_waiting_tokens} tokens are waiting and {num_tokens} more came; at most {most} may "
                "wait. Please try again later.",
                retry_after_s=self.retry_after_s(num_waiting, now),
            )

    def retry_after_s(self, num_sequences: int, now: float) -> int:
        """Whole seconds until so many sequences will have left, at the rate of late."""
        while self._left_s and self._left_s[0] < now - WINDOW_S:
            self._left_s.popleft()
        if not self._left_s:
            return UNKNOWN_S
        rate = len(self._left_s) / max(1.0, now - self._left_s[0])
        return min(MOST_S, max(1, ceil(num_sequences / rate)))
