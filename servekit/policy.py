"""Who is seated next: the waiting line, one class for each order it can be in.

A policy decides over seats, that is over KV memory: who gets the next one, in which order those who have one are served
(`rank`; preemption is from its other end), and how much of a step's prefill may overtake that order (`short_share`).

Each order keeps a promise that the simulation checks after every step:

- `fcfs`: nobody is seated before somebody who arrived earlier.
- `priority`: nobody is seated before somebody with a lower `arrival_s + priority * PRIORITY_LEVEL_S`. A level is worth
  that much waiting and no more, so whoever waits long enough is next: ageing, without looking at a clock.
- `shortest`: who has the fewest tokens to compute is seated next (what is in the prefix cache does not count), but only
  until what passed the oldest in line is SHORT_SHARE / (1 - SHORT_SHARE) times the oldest's own; then that one is next.
- `fair`: the tenant seated next has been served least of those that wait. While two tenants both have somebody waiting,
  what is computed for one exceeds what is computed for the other by at most `Fair.max_lag`.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Protocol

from servekit.sequence import Sequence, Status

PRIORITY_LEVEL_S = 10.0
SHORT_SHARE = 0.8


class WaitingLine(Protocol):
    """An order of waiting sequences. Whoever is seated or finished leaves it by its status."""

    short_share: float
    """How much of a step's prefill may go to prompts that are shorter than what the first one has left."""

    keeps_accounts: bool
    """Whether `charge` does anything."""

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Its place among the running: fixed for life; lower is served first and preempted last."""

    def push(self, sequence: Sequence) -> None:
        """It waits: it arrived, or lost its seat."""

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        """Who is seated next; only somebody with fewer tokens to compute than `shorter_than`, if that is given."""

    def seated(self, sequence: Sequence) -> None:
        """What `first` proposed was done."""

    def discard(self, sequence: Sequence) -> None:
        """It finished while it was waiting."""

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """`num_tokens` positions are being computed for it."""


class _Queue:
    """A heap of sequences. Who waits no longer is skipped on surfacing, or swept out when that is half of it."""

    def __init__(self, key: Callable[[Sequence], float]) -> None:
        self._key = key
        # A sequence that lost its seat comes back in its next incarnation, so entries are never equal.
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._num_discarded = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        heappush(self._heap, (self._key(sequence), sequence.sequence_id, sequence.incarnation, sequence))

    def first(self) -> Sequence | None:
        while self._heap:
            if self._is_waiting(self._heap[0]):
                return self._heap[0][-1]
            heappop(self._heap)
        return None

    def note_discarded(self) -> None:
        """One of them left. Without the sweep, a line whose head is stuck would keep all who gave up behind it."""
        self._num_discarded += 1
        if self._num_discarded > len(self._heap) // 2:
            self._num_discarded = 0
            self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
            heapify(self._heap)

    @staticmethod
    def _is_waiting(entry: tuple[float, int, int, Sequence]) -> bool:
        _, _, incarnation, sequence = entry
        return sequence.status is Status.WAITING and sequence.incarnation == incarnation


class _Line:
    """What most lines do: rank by arrival, keep no accounts."""

    short_share = 0.0
    keeps_accounts = False

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return 0.0, sequence.sequence_id

    def seated(self, sequence: Sequence) -> None:
        pass

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        pass


class FirstComeFirstServed(_Line):
    """In order of arrival, strictly: a step's prefill goes to the first until it is done."""

    def __init__(self) -> None:
        self._queue = _Queue(lambda sequence: self.rank(sequence)[0])

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        assert shorter_than is None, "without a share for the short, nobody asks"
        return self._queue.first()

    def discard(self, sequence: Sequence) -> None:
        self._queue.note_discarded()


class Priority(FirstComeFirstServed):
    """By priority, lower first, where each level is worth PRIORITY_LEVEL_S of waiting."""

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return sequence.arrival_s + sequence.priority * PRIORITY_LEVEL_S, sequence.sequence_id


class Shortest(_Line):
    """Shortest prompt first, with a share for the oldest: a long prompt neither stalls the short ones nor starves."""

    short_share = SHORT_SHARE

    def __init__(self) -> None:
        self._by_age = _Queue(lambda sequence: sequence.sequence_id)
        self._by_length = _Queue(lambda sequence: sequence.num_missing)
        # Lengths within a power of two are alike, and go in order of arrival. Were a token to decide, the longest of
        # many much alike would wait until their clients leave, whenever more come than can be served.
        self._by_size = _Queue(lambda sequence: sequence.num_missing.bit_length())
        self._queues = (self._by_age, self._by_length, self._by_size)
        self._oldest: Sequence | None = None
        self._num_tokens_passed = 0  # seated before the oldest, since it is that

    def push(self, sequence: Sequence) -> None:
        for queue in self._queues:
            queue.push(sequence)

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        shortest, small, oldest = self._by_length.first(), self._by_size.first(), self._by_age.first()
        if shortest is None or small is None or oldest is None:
            return None
        limit = inf if shorter_than is None else shorter_than
        # An overdue one that is too long for the share does not close it: it waits for the first to be done. That one
        # has less left than the overdue one is long, and keeps its part of each step, so its patience passes once more.
        if self.is_overdue(oldest) and oldest.num_missing < limit:
            return oldest
        if small.num_missing < limit:
            return small
        return shortest if shortest.num_missing < limit else None

    def is_overdue(self, oldest: Sequence) -> bool:
        """Whether enough has passed the oldest in line."""
        num_passed = self._num_tokens_passed if oldest is self._oldest else 0
        return num_passed >= self.patience(oldest)

    @staticmethod
    def patience(oldest: Sequence) -> float:
        """How many tokens may pass it."""
        return oldest.num_missing * SHORT_SHARE / (1 - SHORT_SHARE)

    def seated(self, sequence: Sequence) -> None:
        # It surfaces in one queue only; in the others it is dead weight from now on.
        self.discard(sequence)
        # `sequence` runs by now, so the queue shows who is passed over.
        oldest = self._by_age.first()
        if oldest is not self._oldest:
            self._oldest, self._num_tokens_passed = oldest, 0
        if oldest is not None and oldest.sequence_id < sequence.sequence_id:
            self._num_tokens_passed += sequence.num_missing

    def discard(self, sequence: Sequence) -> None:
        for queue in self._queues:
            queue.note_discarded()


class Fair(_Line):
    """By virtual token counters: the tenant that has been served least goes next, first come first served within it.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4 (VTC), with one unit for every
    position that is computed, be it prompt, output or a recompute; what comes from the prefix cache costs nothing.
    """

    short_share = SHORT_SHARE
    keeps_accounts = True

    def __init__(self) -> None:
        self.served: dict[str, int] = {}  # by tenant: its virtual counter, in tokens
        self._queues: dict[str, _Queue] = {}  # of tenants who wait
        self._turns: list[tuple[int, str]] = []  # a heap of (counter when last looked at, tenant), one for each queue
        self._last_left = 0  # the counter of the tenant that was the last to leave the line

    @staticmethod
    def max_lag(max_num_seqs: int, max_total_tokens: int) -> int:
        """The proven bound, in tokens, for any span of time in which both tenants have somebody waiting.

        A tenant is given a seat only while its counter is the lowest; after that it can rise by what its seated
        sequences still compute, at most `max_num_seqs * max_total_tokens`, before somebody else is lower. Hence no
        two counters of waiting tenants are ever farther apart, and their difference changes by at most twice that.
        """
        return 2 * max_num_seqs * max_total_tokens

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        first = self.first()  # also drops the tenants whose last one left
        if tenant not in self._queues:
            # Credit does not outlive the need for it: whoever was idle starts level with those that waited.
            floor = self._last_left if first is None else self.served[first.tenant]
            self.served[tenant] = max(self.served.get(tenant, 0), floor)
            self._queues[tenant] = _Queue(lambda sequence: sequence.sequence_id)
            heappush(self._turns, (self.served[tenant], tenant))
        self._queues[tenant].push(sequence)

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        while self._turns:
            served, tenant = self._turns[0]
            sequence = self._queues[tenant].first()
            if sequence is None:
                heappop(self._turns)
                del self._queues[tenant]
                self._last_left = max(self._last_left, self.served[tenant])
            elif served < self.served[tenant]:
                heapreplace(self._turns, (self.served[tenant], tenant))  # counters only rise, so one look is enough
            elif shorter_than is None or sequence.num_missing < shorter_than:
                return sequence
            else:
                return None
        return None

    def discard(self, sequence: Sequence) -> None:
        if sequence.tenant in self._queues:
            self._queues[sequence.tenant].note_discarded()

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        self.served[sequence.tenant] += num_tokens


POLICIES: dict[str, Callable[[], WaitingLine]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "shortest": Shortest,
    "fair": Fair,
}
