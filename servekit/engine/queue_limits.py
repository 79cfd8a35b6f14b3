"""Limit the sequences that wait for their first step, and compute when a refused request should be sent again.

Sequences and their prompt tokens are both limited: a hundred long prompts can be more work than thousands of short
ones. A request takes its places when it arrives, before anything is computed for it. So a request that cannot be
admitted costs nothing, and a request that has its places is not refused for a full queue after it was prepared.

Prompt tokens are known when the prompts are encoded. Until then each answer holds one: so while all tokens are in use,
no prompt is prepared. Then the request reserves all its tokens, or is refused. When its sequences enter the queue, they
are counted there, and released here.

Under the policy `fair` tenants share both limits (`SharedBudget`); under others the first comer takes what is free.
"""

from __future__ import annotations

from collections import deque
from math import ceil

from servekit.config import ServeConfig
from servekit.errors import InvalidRequest, QueueFull
from servekit.observability.metrics import QueueUsage
from servekit.observability.observer import Observer
from servekit.requests.generation import GenerationRequest
from servekit.scheduler.queued_work import QueuedCounts
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.shared_budget import SharedBudget

RATE_WINDOW_S = 30.0  # the rate of ended sequences is measured over this time
MAX_RETRY_AFTER_S = 60
DEFAULT_RETRY_AFTER_S = 10  # if no sequence has ended recently


class QueuePlaces:
    """The places and the prompt tokens that a request holds until its sequences are in the queue."""

    __slots__ = ("_limits", "arrival_s", "num_sequences", "num_tokens", "tenant")

    def __init__(self, limits: QueueLimits, tenant: str, num_sequences: int, arrival_s: float) -> None:
        self._limits = limits
        self.tenant = tenant
        self.num_sequences = num_sequences
        self.num_tokens = num_sequences
        self.arrival_s = arrival_s

    def release(self, num_sequences: int | None = None, num_tokens: int = 0) -> None:
        """Give back this much, or all that is left: the sequences are in the queue, or were refused. Idempotent."""
        if num_sequences is None:
            num_sequences, num_tokens = self.num_sequences, self.num_tokens
        self._limits.sequences.release(self.tenant, num_sequences)
        self._limits.tokens.release(self.tenant, num_tokens)
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens


class QueueLimits(Observer):
    """Checks requests against the limits of the queue, and measures how fast sequences end."""

    NUM_ENDS_KEPT = 4096

    def __init__(self, config: ServeConfig) -> None:
        self._max_answers = config.max_client_batch_size
        is_shared = config.scheduling_policy == "fair"
        # What requests hold that are being prepared. What is in the queue is counted by the workload manager.
        self.sequences = SharedBudget(config.max_num_queued_reqs, is_shared)
        self.tokens = SharedBudget(config.max_num_queued_tokens, is_shared)
        self._ended_s: deque[float] = deque(maxlen=self.NUM_ENDS_KEPT)

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        self._ended_s.append(now_s)

    def reserve(
        self, request: GenerationRequest, tenant: str, num_waiting: int, queued: QueuedCounts, now_s: float
    ) -> QueuePlaces:
        """Take a place for each answer that a request asks for. The caller releases them.

        `num_waiting` counts all waiting sequences, those that were preempted too. Raises InvalidRequest if the answers
        exceed an empty queue, and QueueFull if they exceed the room that is left, or left for this tenant.
        """
        num_answers, budget = request.num_sequences, self.sequences
        self.check_size(request, tenant)
        own = queued.of(tenant).num_sequences
        num_missing = budget.num_missing(tenant, num_answers, own, num_waiting)
        if num_missing:
            total = budget.total + num_waiting
            raise QueueFull(
                f"the queue is full{_for_tenant(budget, tenant, own, num_waiting, 'sequences')}: {total} sequences are "
                f"queued and the request adds {num_answers}; the limit is {budget.limit} (max_num_queued_reqs). Please "
                "try again later.",
                retry_after_s=self.retry_after_s(num_missing, now_s),
            )
        self._check_tokens(tenant, num_answers, num_waiting, queued, now_s)
        budget.take(tenant, num_answers)
        self.tokens.take(tenant, num_answers)
        return QueuePlaces(self, tenant, num_answers, now_s)

    def reserve_tokens(
        self, places: QueuePlaces, num_tokens: int, num_waiting: int, queued: QueuedCounts, now_s: float
    ) -> None:
        """Let a request hold its prompt tokens, each prompt counted once for each of its answers.

        Raises InvalidRequest if they exceed an empty queue, and QueueFull if they exceed the room that is left, or left
        for this tenant. Then the request holds no tokens.
        """
        places.release(0, places.num_tokens)
        self._check_tokens(places.tenant, num_tokens, num_waiting, queued, now_s)
        self.tokens.take(places.tenant, num_tokens)
        places.num_tokens = num_tokens

    def _check_tokens(self, tenant: str, num_tokens: int, num_waiting: int, queued: QueuedCounts, now_s: float) -> None:
        budget = self.tokens
        most = budget.max_share(tenant)
        if num_tokens > most:
            raise InvalidRequest(
                f"the request has {num_tokens} prompt tokens, each prompt counted once for each of its answers; the "
                f"queue holds {most} {_of_one_tenant(budget, tenant)}(max_num_queued_tokens); send fewer or shorter "
                "prompts, or ask for fewer answers"
            )
        own, in_queue = queued.of(tenant).num_tokens, queued.total.num_tokens
        if budget.num_missing(tenant, num_tokens, own, in_queue):
            total = budget.total + in_queue
            raise QueueFull(
                f"the queue is full{_for_tenant(budget, tenant, own, in_queue, 'prompt tokens')}: {total} prompt "
                f"tokens are queued and the request adds {num_tokens}; the limit is {budget.limit} "
                "(max_num_queued_tokens). Please try again later.",
                retry_after_s=self.retry_after_s(num_waiting, now_s),
            )

    def usage(self, num_waiting: int, queued: QueuedCounts) -> QueueUsage:
        """Return how much of the queue is used, as `SharedBudget.usage` says."""
        by_tenant = queued.by_tenant()
        return QueueUsage(
            self.sequences.usage({name: count.num_sequences for name, count in by_tenant.items()}, num_waiting),
            self.tokens.usage({name: count.num_tokens for name, count in by_tenant.items()}, queued.total.num_tokens),
        )

    def check_size(self, request: GenerationRequest, tenant: str) -> None:
        """Raise InvalidRequest if a request has more answers than an empty queue would take."""
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
        most = self.sequences.max_share(tenant)
        if num_answers > most:
            raise InvalidRequest(
                f"the request asks for {num_answers} answers; the queue holds {most} "
                f"{_of_one_tenant(self.sequences, tenant)}(max_num_queued_reqs); ask for fewer in one request",
                param=param,
            )

    def retry_after_s(self, num_sequences: int, now_s: float) -> int:
        """Whole seconds until `num_sequences` sequences will have ended, at the recent rate."""
        while self._ended_s and self._ended_s[0] < now_s - RATE_WINDOW_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return DEFAULT_RETRY_AFTER_S
        rate = len(self._ended_s) / max(1.0, now_s - self._ended_s[0])
        return min(MAX_RETRY_AFTER_S, max(1, ceil(num_sequences / rate)))


def _of_one_tenant(budget: SharedBudget, tenant: str) -> str:
    return "of one tenant, half of the limit with scheduling_policy fair " if budget.is_shared_with(tenant) else ""


def _for_tenant(budget: SharedBudget, tenant: str, own: int, in_queue: int, unit: str) -> str:
    """Return the part of a refusal that gives the tenant's share; empty if the queue is full for all tenants."""
    if not budget.is_shared_with(tenant) or budget.total + in_queue >= budget.limit:
        return ""
    held = budget.held(tenant) + own
    return f" for your tenant, which has {held} {unit} in it and may have as many as stay free"
