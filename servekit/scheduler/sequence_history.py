"""Record where a sequence spent its time on a workload manager: spans with causes, from the manager's events.

Nothing is recorded for each token, or for each sequence in each step. A sequence that computes a token in every step
has one open span, and two readings of counters that all sequences share. The reason why the queue does not move is
recorded once for all waiting sequences, when it changes. A span is added when something else happens to a sequence: a
chunk of its prompt, a preemption, a step that left it out. Spans follow each other without gaps.

Commands such as Finish and Restart have no time. What they do is dated with the last known one: that of the newest plan
or commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from msgspec import Struct

from servekit.requests.time_causes import TimeCause

MAX_SPANS = 1024  # maximum for one sequence; above it, neighbours are joined
MAX_QUEUE_STATES = 2**12  # maximum for one queue; explaining a wait with this many takes a few milliseconds


class StepCounts(Struct, frozen=True, gc=False):
    """Counters of the steps that were committed, which all sequences share."""

    num_steps: int = 0
    num_sequences: int = 0  # summed over the steps
    num_prefill_tokens: int = 0


class QueueState(Struct, frozen=True, gc=False):
    """Why the queue does not move since some time."""

    since_s: float
    cause: TimeCause
    rule: str  # the setting that decides
    first_id: int | None  # the sequence that was next when this began, if it is known


class ManagerLog:
    """What the sequences of one workload manager have in common: the time, counters of steps, what holds the queue up.

    The first in the queue waits for something, and all others wait behind it, so that is their cause, too. `policy` is
    the rule of their order.
    """

    def __init__(self, policy: str = "") -> None:
        self.policy = policy
        self.now_s = 0.0  # the last known time
        self.counts = StepCounts()
        self._states: list[QueueState] = []  # up to twice MAX_QUEUE_STATES: the older half is removed at once

    def is_held_by(self, cause: TimeCause, rule: str) -> bool:
        """Whether this is the noted reason why the queue does not move."""
        if not self._states:
            return False
        last = self._states[-1]
        return last.cause is cause and last.rule == rule

    def note(self, cause: TimeCause, rule: str, first_id: int | None = None) -> None:
        """Note why the queue does not move from now on."""
        self._states.append(QueueState(self.now_s, cause, rule, first_id))
        if len(self._states) >= 2 * MAX_QUEUE_STATES:
            del self._states[:MAX_QUEUE_STATES]

    def count(self, num_sequences: int, num_prefill_tokens: int) -> StepCounts:
        """Count a step that was committed. Returns the counts before it."""
        before = self.counts
        self.counts = StepCounts(
            before.num_steps + 1,
            before.num_sequences + num_sequences,
            before.num_prefill_tokens + num_prefill_tokens,
        )
        return before

    def between(self, start_s: float, end_s: float) -> Iterator[tuple[QueueState | None, float]]:
        """Yield (state, until when) of the parts of a span of time. The state is None for what is not known."""
        states = self._states
        following = bisect_right(states, start_s, key=lambda state: state.since_s)
        state = states[following - 1] if following else None
        while following < len(states) and states[following].since_s < end_s:
            yield state, states[following].since_s
            state = states[following]
            following += 1
        yield state, end_s


class Span:
    """A part of a sequence's time with one cause."""

    __slots__ = (
        "behind_id",
        "cause",
        "end_s",
        "num_others",
        "num_prefill_tokens",
        "num_steps",
        "num_tokens",
        "queue",
        "rule",
        "start_s",
    )

    def __init__(
        self, cause: TimeCause, start_s: float, end_s: float, rule: str = "", queue: ManagerLog | None = None
    ) -> None:
        self.cause = cause
        self.start_s = start_s
        self.end_s = end_s
        self.rule = rule
        self.queue = queue  # log of the manager in whose queue it waited, with the reasons
        self.behind_id: int | None = None  # the sequence for which it was preempted
        self.num_steps = 0  # steps that computed a part of the sequence
        self.num_tokens = 0  # tokens of its prompt, or lost ones, that they computed
        self.num_others = 0  # other sequences in these steps, summed over the steps
        self.num_prefill_tokens = 0  # tokens of others' prompts, in steps in which it decoded

    def absorb(self, other: Span) -> None:
        """Join the span that follows this one. The cause is that of the longer one."""
        if other.end_s - other.start_s > self.end_s - self.start_s:
            self.cause, self.rule, self.queue, self.behind_id = other.cause, other.rule, other.queue, other.behind_id
        self.end_s = other.end_s
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.num_others += other.num_others
        self.num_prefill_tokens += other.num_prefill_tokens


class SequenceHistory:
    """The spans of one sequence. The last one is open: it lasts until something happens, or the sequence ends."""

    __slots__ = (
        "_behind_id",
        "_counts",
        "_end_counts",
        "_log",
        "_num_reached",
        "_open",
        "_rule",
        "_since_s",
        "_spans",
    )

    def __init__(self, arrival_s: float, log: ManagerLog) -> None:
        """`log` is that of the manager that the sequence is added to."""
        self._log = log
        self._spans: list[Span] = []
        self._since_s = arrival_s  # when the open span began
        self._begin(TimeCause.QUEUE)
        self._counts = StepCounts()  # when it began, if it is of decodes
        self._end_counts: StepCounts | None = None  # when the sequence ended
        self._num_reached = 0  # positions that were computed before the computation was set back

    # -- what the manager reports --------------------------------------------------------------------------------------

    def admitted(self) -> None:
        """Note that it has a slot, and is in the step that is planned now."""
        self._close(self._log.now_s)
        self._begin(TimeCause.NEXT_STEP, "max_steps_in_flight")

    def waited_for_prompt(self) -> None:
        """Until now it waited for another answer to compute their prompt, and now it enters the queue."""
        self._open = TimeCause.SHARED_PROMPT
        self._close(self._log.now_s)
        self._begin(TimeCause.QUEUE)

    def prefilled(self, start_s: float, first: int, num_tokens: int, num_others: int) -> None:
        """A step that is done now computed positions of its prompt, or of what was lost, from `first` on."""
        self._close(start_s)
        cause = TimeCause.RECOMPUTE if first < self._num_reached else TimeCause.PREFILL
        self._begin(cause)
        if (span := self._close(self._log.now_s)) is not None:
            span.num_steps += 1
            span.num_tokens += num_tokens
            span.num_others += num_others

    def decodes(self) -> None:
        """From now on, each step computes a token of it."""
        self._num_reached = 0
        self._begin(TimeCause.DECODE)
        self._counts = self._log.counts

    def left_out(self, start_s: float, cause: TimeCause, rule: str, before: StepCounts) -> None:
        """A step that is done now computed nothing of it, although it has a slot. `before` are the counts before it."""
        was_open = self._open
        self._close(start_s, before)
        self._begin(cause, rule)
        self._close(self._log.now_s)
        self._begin(was_open)
        self._counts = self._log.counts

    def set_back(
        self,
        num_computed: int,
        cause: TimeCause,
        rule: str,
        behind_id: int | None = None,
        lost_since_s: float | None = None,
    ) -> None:
        """Note that it has lost its slot and blocks, and waits for `cause` until it is admitted or queued.

        What was computed since `lost_since_s` is lost, too: that time is for `cause`.
        """
        if self._open is not TimeCause.QUEUE:
            self._num_reached = max(self._num_reached, num_computed)
        self._close(self._log.now_s if lost_since_s is None else lost_since_s)
        self._begin(cause, rule, behind_id)

    def queued(self) -> None:
        """Note that it waits in the queue from now on, like one that was never admitted."""
        self._close(self._log.now_s)
        self._begin(TimeCause.QUEUE)

    def moved(self, log: ManagerLog) -> None:
        """Note that it continues on another manager."""
        self._log, self._end_counts = log, None
        self.queued()

    def ended(self) -> None:
        """Note that it has ended, or leaves this manager."""
        self._end_counts = self._log.counts

    # -- what is read --------------------------------------------------------------------------------------------------

    @property
    def num_spans(self) -> int:
        """How many spans are kept, without the open one."""
        return len(self._spans)

    @property
    def has_events(self) -> bool:
        """Whether the manager has reported anything."""
        return bool(self._spans)

    def spans(self, end_s: float) -> list[Span]:
        """All spans until `end_s`, the open one included."""
        spans = [span for span in self._spans if span.start_s < end_s]
        if end_s > self._since_s:
            spans.append(self._make_span(end_s, self._end_counts or self._log.counts))
        return spans

    # -- spans ---------------------------------------------------------------------------------------------------------

    def _begin(self, cause: TimeCause, rule: str = "", behind_id: int | None = None) -> None:
        self._open, self._rule, self._behind_id = cause, rule, behind_id

    def _make_span(self, end_s: float, counts: StepCounts) -> Span:
        queue = self._log if self._open is TimeCause.QUEUE else None
        span = Span(self._open, self._since_s, end_s, self._rule, queue)
        span.behind_id = self._behind_id
        if self._open is TimeCause.DECODE:
            before = self._counts
            span.num_steps = counts.num_steps - before.num_steps
            span.num_others = counts.num_sequences - before.num_sequences - span.num_steps
            span.num_prefill_tokens = counts.num_prefill_tokens - before.num_prefill_tokens
        return span

    def _close(self, at_s: float, counts: StepCounts | None = None) -> Span | None:
        """End the open span. Return the span that it is a part of; None if it has no length."""
        if at_s <= self._since_s:
            return None
        span, spans = self._make_span(at_s, counts or self._log.counts), self._spans
        self._since_s = at_s
        if spans and spans[-1].cause is span.cause and spans[-1].rule == span.rule and spans[-1].queue is span.queue:
            spans[-1].absorb(span)
            return spans[-1]
        spans.append(span)
        if len(spans) > MAX_SPANS:
            for first, second in zip(spans[::2], spans[1::2], strict=False):
                first.absorb(second)
            self._spans = spans[::2]
        return self._spans[-1]
