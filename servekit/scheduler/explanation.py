"""Explain the wall time of a request: intervals, each with one cause, that follow each other from its head to its end.

The stages outside the scheduler come from `RequestTimes`, the others from the history of a sequence. Whatever times
they report, and in whatever order, the intervals have no gap and no overlap: each begins where the one before it ended,
and what is before that is dropped (`_IntervalList`).
"""

from __future__ import annotations

from itertools import pairwise

from msgspec import Struct

from servekit.requests.time_causes import RequestTimes, TimeCause
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.sequence_history import SequenceHistory, Span

MAX_INTERVALS = 1024  # above that, neighbours are joined; encoding so many takes about a millisecond


class Interval(Struct, omit_defaults=True, gc=False):
    """A part of a request's time. Times are seconds since the request's beginning."""

    cause: TimeCause
    start_s: float
    end_s: float
    rule: str = ""  # the setting that decides; of preemption, what was lacking
    behind_sequence_id: int | None = None  # the first of the queue at its beginning, or the one that took its blocks
    scheduling_policy: str = ""  # the policy that orders the queue
    steps: int = 0  # steps that computed a part of the sequence
    tokens: int = 0  # tokens of its prompt, or lost ones, that these steps computed
    mean_other_sequences: float = 0.0  # mean number in these steps
    other_prefill_tokens: int = 0  # prompt tokens of others in decode steps, which take longer with them

    def continues(self, other: Interval) -> bool:
        """Whether both have the same cause and rule, and no steps, so that they are one interval."""
        return (
            not (self.steps or other.steps)
            and self.cause is other.cause
            and self.rule == other.rule
            and self.behind_sequence_id == other.behind_sequence_id
            and self.scheduling_policy == other.scheduling_policy
        )

    def absorb(self, other: Interval) -> None:
        """Join the interval that follows this one. What cannot be added is that of the longer one."""
        if other.end_s - other.start_s > self.end_s - self.start_s:
            self.cause, self.rule, self.scheduling_policy = other.cause, other.rule, other.scheduling_policy
            self.behind_sequence_id = other.behind_sequence_id
        self.end_s = other.end_s
        num_others = self.mean_other_sequences * self.steps + other.mean_other_sequences * other.steps
        self.steps += other.steps
        self.tokens += other.tokens
        self.mean_other_sequences = round(num_others / self.steps, 2) if self.steps else 0.0
        self.other_prefill_tokens += other.other_prefill_tokens


class Explanation(Struct):
    """Where the wall time of a request went. The causes sum to it; the intervals follow each other without gaps."""

    request_id: str
    sequence_id: int  # the answer that ended last; its number in the journal
    is_finished: bool
    finish_reason: FinishReason | None
    wall_time_s: float
    causes: dict[TimeCause, float]  # seconds, in the order in which they began
    intervals: list[Interval]
    blocked_s: float  # time in which writes waited for the client, also before the last token


class SequenceEnd(Struct, frozen=True):
    """What an explanation needs of a sequence."""

    sequence_id: int
    history: SequenceHistory
    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    ended_s: float | None  # None for one that has not ended
    finish_reason: FinishReason | None

    def spans(self, until_s: float) -> list[Span]:
        """What the workload manager has recorded; in an API process of several, what the engine process has told."""
        if self.history.has_events or self.first_scheduled_s is None:
            return self.history.spans(until_s)
        times = [
            (TimeCause.QUEUE, self.arrival_s),
            (TimeCause.PREFILL, self.first_scheduled_s),
            (TimeCause.DECODE, self.first_token_s or until_s),
        ]
        ends = [start_s for _, start_s in times[1:]] + [until_s]
        return [Span(cause, start_s, end_s) for (cause, start_s), end_s in zip(times, ends, strict=True)]


def explain(request_id: str, times: RequestTimes, last: SequenceEnd, end_s: float, is_finished: bool) -> Explanation:
    """Explain a request until `end_s`, when it ended, or until now. `last` is its sequence that ended last."""
    intervals = _IntervalList(times.started_s, end_s)
    for cause, until_s in times.marks:
        intervals.add(Interval(cause, 0.0, until_s))
    engine_end_s = end_s if last.ended_s is None else last.ended_s
    for span in last.spans(engine_end_s):
        _add_span(intervals, span, last.sequence_id)
    _add_writing(intervals, times, end_s)
    return Explanation(
        request_id,
        last.sequence_id,
        is_finished,
        last.finish_reason,
        end_s - times.started_s,
        intervals.causes,
        intervals.finish(),
        times.blocked_s,
    )


def _add_span(intervals: _IntervalList, span: Span, own_id: int) -> None:
    """Add a span. One in the queue is divided by why the queue did not move."""
    if span.queue is not None:
        for state, until_s in span.queue.between(span.start_s, span.end_s):
            interval = Interval(TimeCause.QUEUE, 0.0, until_s, scheduling_policy=span.queue.policy)
            if state is not None:
                interval.cause, interval.rule = state.cause, state.rule
                if state.first_id != own_id:
                    interval.behind_sequence_id = state.first_id
            intervals.add(interval)
        return
    intervals.add(
        Interval(
            span.cause,
            0.0,
            span.end_s,
            span.rule,
            span.behind_id,
            steps=span.num_steps,
            tokens=span.num_tokens,
            mean_other_sequences=round(span.num_others / span.num_steps, 2) if span.num_steps else 0.0,
            other_prefill_tokens=span.num_prefill_tokens,
        )
    )


def _add_writing(intervals: _IntervalList, times: RequestTimes, end_s: float) -> None:
    """Add what came after the last token: writes that waited for the client, and the time between them."""
    answered_s = times.answered_s

    def add_own_work(until_s: float) -> None:
        if answered_s is not None:
            intervals.add(Interval(TimeCause.DETOKENIZING, 0.0, min(answered_s, until_s)))
        intervals.add(Interval(TimeCause.WRITING, 0.0, until_s))

    for began_s, blocked_until_s in times.blocked:
        add_own_work(began_s)
        intervals.add(Interval(TimeCause.CLIENT_NOT_READING, 0.0, blocked_until_s))
    add_own_work(end_s)


class _IntervalList:
    """Intervals that cover a span of time without gaps and overlaps."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self._origin_s = start_s
        self._end_s = end_s
        self._reached_s = start_s
        self._intervals: list[Interval] = []
        self.causes: dict[TimeCause, float] = {}  # seconds; exact, also where intervals are joined

    def add(self, interval: Interval) -> None:
        """Add an interval from where the last one ended. Only its end is read, on the engine's clock."""
        until_s = min(interval.end_s, self._end_s)
        if until_s <= self._reached_s:
            return
        interval.start_s, interval.end_s = self._reached_s - self._origin_s, until_s - self._origin_s
        self._reached_s = until_s
        self.causes[interval.cause] = self.causes.get(interval.cause, 0.0) + interval.end_s - interval.start_s
        intervals = self._intervals
        if intervals and intervals[-1].continues(interval):
            intervals[-1].end_s = interval.end_s
            return
        intervals.append(interval)
        if len(intervals) > MAX_INTERVALS:
            for first, second in zip(intervals[::2], intervals[1::2], strict=False):
                first.absorb(second)
            self._intervals = intervals[::2]

    def finish(self) -> list[Interval]:
        """Return all intervals. They reach the end: what comes last is added with it."""
        assert all(one.end_s == other.start_s for one, other in pairwise(self._intervals))
        return self._intervals
