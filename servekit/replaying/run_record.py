"""Record a run: when its requests got their tokens, and the state of the scheduler from step to step.

A `RunRecord` watches a workload manager. It is the same whether that is replayed from a journal or plays with other
settings, so both are summarised and drawn by the same code. It keeps a few numbers for each step and each request: a
journal may have millions of tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise

from msgspec import Struct

from servekit.laboratory.summary import percentile
from servekit.protocol.messages import StepPlan
from servekit.scheduler.recording import ReplayWatcher
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.step import SequenceToken
from servekit.scheduler.workload_manager import WorkloadManager

MOVED = "moved"  # how a request ended here that continued on another replica
CUT = "cut"  # how one ended that had not ended at the end of the journal


class RequestTimes(Struct):
    """When things happened to one request, in seconds on the clock of its manager."""

    arrival_s: float
    is_continued: bool = False  # it had begun before this record did
    started_s: float | None = None  # when its first step was planned
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    ended_s: float = 0.0
    ended_by: str = ""  # a FinishReason, MOVED or CUT


class Sample(Struct, frozen=True, gc=False):
    """The state after one step."""

    at_s: float
    num_running: int
    num_waiting: int
    kv_share: float  # of the KV blocks: held by sequences
    num_tokens: int  # that were sampled until then


class Figures(Struct, frozen=True, kw_only=True):
    """The figures of one run. Times are in seconds, shares from 0 to 1."""

    num_requests: int
    num_output_tokens: int
    duration_s: float  # from the first arrival to the last token
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    waiting_p50_s: float  # from the arrival to the first step
    waiting_p99_s: float
    mean_waiting: float  # how many requests waited, on average over the duration
    num_preemptions: int
    cached_prompt_share: float  # of the prompts' tokens
    peak_kv_share: float  # of the KV blocks
    num_steps: int
    num_past_deadline: int
    num_refused: int  # that can never fit into these settings


class RunRecord(ReplayWatcher):
    """Watches one workload manager."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestTimes] = {}
        self.samples: list[Sample] = []
        self.gaps_s = array("d")  # between two tokens of one request
        self.num_refused = 0
        self._num_tokens = self._num_steps = 0
        self._before = (0, 0, 0)  # counts of the manager when this began to watch it
        self._counts = (0, 0, 0)  # its preemptions, prompt tokens and cached ones

    def restored(self, manager: WorkloadManager) -> None:
        self._before = self._counts = _counts(manager)

    def added(self, manager: WorkloadManager, sequence: Sequence) -> None:
        is_continued = sequence.first_scheduled_s is not None
        self.requests[sequence.sequence_id] = RequestTimes(sequence.arrival_s, is_continued)

    def planned(self, manager: WorkloadManager, plan: StepPlan, now_s: float) -> None:
        self._counts = _counts(manager)
        self._num_steps += 1

    def committed(self, manager: WorkloadManager, tokens: list[SequenceToken], now_s: float) -> None:
        for token in tokens:
            request = self.requests.get(token.sequence.sequence_id)
            if request is None:
                continue
            if token.failure is None:
                self._note_token(request, now_s)
            if token.finish_reason is not None:
                self.ended(token.sequence, token.finish_reason, now_s)
        pool = manager.kv_cache.pool
        self.samples.append(
            Sample(now_s, manager.num_running, manager.num_waiting, pool.num_leased / pool.num_blocks, self._num_tokens)
        )

    def _note_token(self, request: RequestTimes, now_s: float) -> None:
        if request.first_token_s is None:
            request.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - request.last_token_s)
        request.last_token_s = now_s
        request.num_tokens += 1
        self._num_tokens += 1

    def ended(self, sequence: Sequence, reason: str, now_s: float) -> None:
        """Note the end of a request: by a token, or by anything else."""
        request = self.requests[sequence.sequence_id]
        request.started_s = sequence.first_scheduled_s
        request.ended_s, request.ended_by = now_s, reason

    @property
    def began_s(self) -> float:
        """When the first request arrived, of those that begin here."""
        arrivals_s = [request.arrival_s for request in self.requests.values() if not request.is_continued]
        return min(arrivals_s, default=self.samples[0].at_s if self.samples else 0.0)

    def figures(self) -> Figures:
        """Summarise the run. It must have a request."""
        requests, began_s = list(self.requests.values()), self.began_s
        last_s = max([request.last_token_s for request in requests if request.num_tokens], default=began_s)
        duration_s = last_s - began_s
        new = [each for each in requests if not each.is_continued]
        ttft_s = [each.first_token_s - each.arrival_s for each in new if each.first_token_s is not None]
        waiting_s = [(each.started_s or each.ended_s) - each.arrival_s for each in new]
        counts = [after - before for after, before in zip(self._counts, self._before, strict=True)]
        num_preemptions, num_prompt_tokens, num_cached_tokens = counts
        gaps_s = sorted(self.gaps_s)
        return Figures(
            num_requests=len(requests),
            num_output_tokens=self._num_tokens,
            duration_s=duration_s,
            tokens_per_s=self._num_tokens / duration_s if duration_s else 0.0,
            ttft_p50_s=percentile(ttft_s, 0.5),
            ttft_p99_s=percentile(ttft_s, 0.99),
            itl_p50_s=percentile(gaps_s, 0.5),
            itl_p99_s=percentile(gaps_s, 0.99),
            waiting_p50_s=percentile(waiting_s, 0.5),
            waiting_p99_s=percentile(waiting_s, 0.99),
            mean_waiting=self._mean_waiting(),
            num_preemptions=num_preemptions,
            cached_prompt_share=num_cached_tokens / num_prompt_tokens if num_prompt_tokens else 0.0,
            peak_kv_share=max([sample.kv_share for sample in self.samples], default=0.0),
            num_steps=self._num_steps,
            num_past_deadline=self.num_ended_by()[FinishReason.DEADLINE],
            num_refused=self.num_refused,
        )

    def num_ended_by(self) -> Counter[str]:
        """How many requests ended by each reason."""
        return Counter(request.ended_by for request in self.requests.values())

    def _mean_waiting(self) -> float:
        waiting = sum(one.num_waiting * (other.at_s - one.at_s) for one, other in pairwise(self.samples))
        duration_s = self.samples[-1].at_s - self.samples[0].at_s if self.samples else 0.0
        return waiting / duration_s if duration_s else 0.0


def _counts(manager: WorkloadManager) -> tuple[int, int, int]:
    return manager.num_preemptions, manager.num_prompt_tokens, manager.num_cached_tokens
