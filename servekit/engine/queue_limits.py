"""Limit how much may wait for its first step, and compute when a refused request should come back.

Sequences and their prompt tokens are both limited: a hundred long prompts can be more work than thousands of short
ones. A request takes its places when it arrives, before anything is computed for it. So a request that cannot be
admitted costs nothing, and a request that has its places is not refused for a full queue after it was prepared.

Under the policy `fair` a tenant may hold as much of a limit as stays free for the others, and a single place if any is
free. One tenant alone fills half of the queue; if T tenants flood it, each comes to 1 / (T + 1) of it, and as much
stays free for the next one. Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking 6(2), 1998, with alpha = 1; docs/design/fairness.md has the alternatives.
"""

from __future__ import annotations

from collections import Counter, deque
from math import ceil

from servekit.config import ServeConfig
from servekit.errors import InvalidRequest, QueueFull
from servekit.observability.observer import Observer
from servekit.request import GenerationRequest
from servekit.scheduler.queued_work import QueuedWork
from servekit.scheduler.sequence import FinishReason, Sequence

RATE_WINDOW_S = 30.0  # the rate of ended sequences is measured over this time
MAX_RETRY_AFTER_S = 60
DEFAULT_RETRY_AFTER_S = 10  # if no sequence has ended recently


class QueuePlaces:
    """The places in the queue that a request holds while its prompts are prepared; `release` gives them back."""

    __slots__ = ("_limits", "arrival_s", "num_sequences", "tenant")

    def __init__(self, limits: QueueLimits, tenant: str, num_sequences: int, arrival_s: float) -> None:
        self._limits = limits
        self.tenant = tenant
        self.num_sequences = num_sequences
        self.arrival_s = arrival_s

    def release(self, num_sequences: int | None = None) -> None:
        """Give back this many places, or all that are left: the sequences are in the queue, or were refused."""
        num = self.num_sequences if num_sequences is None else min(num_sequences, self.num_sequences)
        self.num_sequences -= num
        reserved = self._limits.reserved
        reserved[self.tenant] -= num
        if not reserved[self.tenant]:
            del reserved[self.tenant]


class QueueLimits(Observer):
    """Checks requests against the limits of the queue, and measures how fast sequences end."""

    NUM_ENDS_KEPT = 4096

    def __init__(self, config: ServeConfig) -> None:
        self._max_answers = config.max_client_batch_size
        self._max_sequences = config.max_num_queued_reqs
        self._max_tokens = config.max_num_queued_tokens
        self._is_shared = config.scheduling_policy == "fair"
        self.reserved: Counter[str] = Counter()  # places of requests that are being prepared, by tenant
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

    def reserve(
        self, request: GenerationRequest, tenant: str, num_waiting: int, queued: QueuedWork, now_s: float
    ) -> QueuePlaces:
        """Take a place for each answer that a request asks for. The caller releases them.

        `num_waiting` counts all waiting sequences, those that were preempted too. Raises InvalidRequest if the answers
        exceed an empty queue, and QueueFull if they exceed the room that is left, or left for this tenant.
        """
        num_answers = request.num_sequences
        self._check_size(request, num_answers)
        total = num_waiting + self.reserved.total()
        own = queued.of(tenant).num_sequences + self.reserved[tenant]
        num_missing = self._num_missing(num_answers, own, total, self._max_sequences)
        if num_missing:
            raise QueueFull(
                f"the queue is full{self._for_tenant(own, total, self._max_sequences, 'sequences')}: {total} sequences "
                f"are queued and the request adds {num_answers}; the limit is {self._max_sequences} "
                "(max_num_queued_reqs). Please try again later.",
                retry_after_s=self.retry_after_s(num_missing, now_s),
            )
        # Each answer has one prompt token at least. So while all tokens are in use, no prompt is prepared.
        self.check_tokens(num_answers, tenant, num_waiting, queued, now_s)
        self.reserved[tenant] += num_answers
        return QueuePlaces(self, tenant, num_answers, now_s)

    def _check_size(self, request: GenerationRequest, num_answers: int) -> None:
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
        if num_answers > self._share(self._max_sequences):
            raise InvalidRequest(
                f"the request asks for {num_answers} answers; the queue holds {self._share(self._max_sequences)} "
                f"{self._of_one_tenant}(max_num_queued_reqs)",
                param=param,
            )

    def check_tokens(self, num_tokens: int, tenant: str, num_waiting: int, queued: QueuedWork, now_s: float) -> None:
        """Check the prompt tokens of a request, each prompt counted once for each of its answers.

        Raises InvalidRequest if they exceed an empty queue, and QueueFull if they exceed the room that is left, or left
        for this tenant.
        """
        limit, total, own = self._max_tokens, queued.total.num_tokens, queued.of(tenant).num_tokens
        if num_tokens > self._share(limit):
            raise InvalidRequest(
                f"the request has {num_tokens} prompt tokens, each prompt counted once for each of its answers; the "
                f"queue holds {self._share(limit)} {self._of_one_tenant}(max_num_queued_tokens)"
            )
        if self._num_missing(num_tokens, own, total, limit):
            raise QueueFull(
                f"the queue is full{self._for_tenant(own, total, limit, 'prompt tokens')}: {total} prompt tokens are "
                f"queued and the request adds {num_tokens}; the limit is {limit} (max_num_queued_tokens). "
                "Please try again later.",
                retry_after_s=self.retry_after_s(num_waiting, now_s),
            )

    def _num_missing(self, num_added: int, own: int, total: int, limit: int) -> int:
        """Return how much must leave the queue before a tenant with `own` of `total` may add this; 0 if it may."""
        num_free = limit - total - num_added  # afterwards
        if num_free < 0:
            return -num_free
        return max(0, own + num_added - max(1, num_free)) if self._is_shared else 0

    def _share(self, limit: int) -> int:
        """How much of an empty queue one request may take."""
        return max(1, limit // 2) if self._is_shared else limit

    @property
    def _of_one_tenant(self) -> str:
        return "of one tenant, half of the limit with scheduling_policy fair " if self._is_shared else ""

    def _for_tenant(self, own: int, total: int, limit: int, unit: str) -> str:
        """Return the part of a refusal that gives the tenant's share; empty if the queue is full for all tenants."""
        if not self._is_shared or total >= limit:
            return ""
        return f" for your tenant, which has {own} {unit} in it and may have as many as stay free"

    def retry_after_s(self, num_sequences: int, now_s: float) -> int:
        """Whole seconds until `num_sequences` sequences will have ended, at the recent rate."""
        while self._ended_s and self._ended_s[0] < now_s - RATE_WINDOW_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return DEFAULT_RETRY_AFTER_S
        rate = len(self._ended_s) / max(1.0, now_s - self._ended_s[0])
        return min(MAX_RETRY_AFTER_S, max(1, ceil(num_sequences / rate)))
