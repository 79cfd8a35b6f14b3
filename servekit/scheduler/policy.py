"""Order the waiting queue: one class for each scheduling policy.

A policy decides over KV memory: which waiting sequence is admitted next, in which order the running ones are served
(`rank`; preemption starts at its other end), how much of a step's prefill may overtake that order (`short_share`), and
which running sequence gives its slot and blocks to a waiting one (`find_victim`).

Each policy keeps a promise that the simulation checks after every step:

- `fcfs`: no sequence is admitted before one that arrived earlier.
- `priority`: no sequence is admitted before one with a lower `arrival_s + priority * PRIORITY_LEVEL_S`. A priority
  level counts as that much waiting and no more, so every sequence is first at some time. This is ageing without a
  clock.
- `shortest`: the sequence with the fewest tokens to compute is admitted next (cached tokens do not count), but only
  until the tokens that overtook the oldest one are SHORT_SHARE / (1 - SHORT_SHARE) times its own; then the oldest one
  is next.
- `fair`: the next sequence is of the waiting tenant that has been served least. While two tenants both wait, what is
  computed for one exceeds what is computed for the other by at most `Fair.max_lag`. A tenant that has been served less
  and holds less than the others does not wait until one of their sequences ends: `Fair.find_victim`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import Protocol

from servekit.scheduler.lazy_heap import LazyHeap
from servekit.scheduler.sequence import Sequence, Status

PRIORITY_LEVEL_S = 10.0
SHORT_SHARE = 0.8


class WaitingQueue(Protocol):
    """Waiting sequences in the order of a policy. A sequence leaves the queue by its status: it runs or has ended."""

    short_share: float
    """How much of a step's prefill may go to prompts that are shorter than what the first one has left."""

    has_shares: bool
    """Whether each tenant has a share: `charge`, `charge_elsewhere` and `find_victim` have an effect."""

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """A sequence's place among the running ones, fixed for life: lower is served first and preempted last."""

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that arrived or was preempted."""

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        """The sequence to admit next.

        If `shorter_than` is given, only a sequence with fewer tokens to compute than that is returned.
        """

    def admitted(self, sequence: Sequence) -> None:
        """Note that a sequence from `first` was admitted: it runs."""

    def discard(self, sequence: Sequence) -> None:
        """Note that a sequence ended while it was waiting."""

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that `num_tokens` positions are being computed for a sequence."""

    def charge_elsewhere(self, num_tokens: Mapping[str, int], max_lead: int) -> None:
        """Note that positions were computed on other replicas: so many for each of these tenants.

        No tenant comes more than `max_lead` ahead of those that wait here.
        """

    def num_served(self, tenant: str) -> int:
        """The counter of a tenant, in tokens, if tenants have shares: the one with the lowest is next."""

    def num_computed_tokens(self) -> dict[str, int]:
        """How many positions were computed here for each tenant, if tenants have shares."""

    def find_victim(
        self, tenant: str, size: int, running: list[Sequence], size_of: Callable[[Sequence], int]
    ) -> Sequence | None:
        """Return the running sequence to preempt for a waiting one of `tenant`, or None. `running` is sorted by rank.

        `size` is what the waiting sequence needs of slots or of blocks, and `size_of` returns what a running one has.
        """


def _is_waiting(sequence: Sequence, incarnation: int) -> bool:
    return sequence.status is Status.WAITING and sequence.incarnation == incarnation


class _KeyedQueue:
    """Waiting sequences by a key of each, then by arrival."""

    def __init__(self, key: Callable[[Sequence], float]) -> None:
        self._key = key
        # A preempted sequence comes back in its next incarnation, which makes its old entries invalid.
        self.heap = LazyHeap(_is_waiting)

    def push(self, sequence: Sequence) -> None:
        self.heap.push(self._key(sequence), sequence, sequence.incarnation)

    def first(self) -> Sequence | None:
        return self.heap.first()

    def discard(self) -> None:
        self.heap.discard()


class _ByArrival:
    """The default of most policies: rank by arrival, charge nothing."""

    short_share = 0.0
    has_shares = False

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return 0.0, sequence.sequence_id

    def admitted(self, sequence: Sequence) -> None:
        pass

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def charge_elsewhere(self, num_tokens: Mapping[str, int], max_lead: int) -> None:
        pass

    def num_served(self, tenant: str) -> int:
        return 0

    def num_computed_tokens(self) -> dict[str, int]:
        return {}

    def find_victim(
        self, tenant: str, size: int, running: list[Sequence], size_of: Callable[[Sequence], int]
    ) -> Sequence | None:
        return None


class FirstComeFirstServed(_ByArrival):
    """In order of arrival, strictly: a step's prefill goes to the first prompt until that is done."""

    def __init__(self) -> None:
        self._queue = _KeyedQueue(lambda sequence: self.rank(sequence)[0])

    def push(self, sequence: Sequence) -> None:
        self._queue.push(sequence)

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        assert shorter_than is None, "a policy without a share for short prompts is not asked for short ones"
        return self._queue.first()

    def discard(self, sequence: Sequence) -> None:
        self._queue.discard()


class Priority(FirstComeFirstServed):
    """By priority, lower first, where each level is worth PRIORITY_LEVEL_S of waiting."""

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        return sequence.arrival_s + sequence.priority * PRIORITY_LEVEL_S, sequence.sequence_id


class Shortest(_ByArrival):
    """Shortest prompt first, with a share for the oldest: a long prompt neither delays short ones nor starves."""

    short_share = SHORT_SHARE

    def __init__(self) -> None:
        self._by_age = _KeyedQueue(lambda sequence: sequence.sequence_id)
        self._by_length = _KeyedQueue(lambda sequence: sequence.num_missing)
        # Lengths within a power of two count as equal, and go in order of arrival. If single tokens decided, then under
        # overload the longest of many similar prompts would wait until its client gives up.
        self._by_size_class = _KeyedQueue(lambda sequence: sequence.num_missing.bit_length())
        self._queues = (self._by_age, self._by_length, self._by_size_class)
        self._oldest: Sequence | None = None
        self._num_overtaking_tokens = 0  # admitted before the oldest, since it became the oldest

    def push(self, sequence: Sequence) -> None:
        for queue in self._queues:
            queue.push(sequence)

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        shortest, small, oldest = self._by_length.first(), self._by_size_class.first(), self._by_age.first()
        if shortest is None or small is None or oldest is None:
            return None
        limit = inf if shorter_than is None else shorter_than
        # An overdue sequence that is too long for the share does not close the share to others: it waits until the
        # first running prompt is done. That one has less left to compute than the overdue one, and keeps its own part
        # of each step. So the overdue one can be overtaken by at most as many tokens once more.
        if self.is_overdue(oldest) and oldest.num_missing < limit:
            return oldest
        if small.num_missing < limit:
            return small
        return shortest if shortest.num_missing < limit else None

    def is_overdue(self, oldest: Sequence) -> bool:
        """Whether the oldest waiting sequence has been overtaken by as many tokens as it may be."""
        num_tokens = self._num_overtaking_tokens if oldest is self._oldest else 0
        return num_tokens >= self.max_overtaking_tokens(oldest)

    @staticmethod
    def max_overtaking_tokens(oldest: Sequence) -> float:
        """How many tokens may overtake it."""
        return oldest.num_missing * SHORT_SHARE / (1 - SHORT_SHARE)

    def admitted(self, sequence: Sequence) -> None:
        # It surfaced in one heap only; its entries in the others are invalid from now on.
        self.discard(sequence)
        # `sequence` runs by now, so the heap shows the oldest of those it overtook.
        oldest = self._by_age.first()
        if oldest is not self._oldest:
            self._oldest, self._num_overtaking_tokens = oldest, 0
        if oldest is not None and oldest.sequence_id < sequence.sequence_id:
            self._num_overtaking_tokens += sequence.num_missing

    def discard(self, sequence: Sequence) -> None:
        for queue in self._queues:
            queue.discard()


class Fair(_ByArrival):
    """By virtual token counters: the tenant that has been served least is next, first come first served within it.

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4 (VTC), with one unit for every
    position that is computed, be it prompt, output or a recompute; what comes from the prefix cache costs nothing.

    Each replica has its own counters. What the other replicas computed for a tenant is added to them from time to time
    (`charge_elsewhere`), so they compare what the whole server computed for each tenant.
    """

    short_share = SHORT_SHARE
    has_shares = True

    def __init__(self) -> None:
        self.num_served_tokens: dict[str, int] = {}  # by tenant: its virtual counter
        self._queues: dict[str, _KeyedQueue] = {}  # only tenants with waiting sequences
        # A heap of (counter when it was last looked at, tenant), with one entry for each queue.
        self._turns: list[tuple[int, str]] = []
        self._last_left = 0  # the counter of the tenant that was the last to have no sequence waiting any more
        self._num_raised_tokens: dict[str, int] = {}  # by tenant: what its counter has that was not computed here

    @staticmethod
    def max_lag(max_num_seqs: int, max_total_tokens: int) -> int:
        """The proven bound, in tokens, for any span of time in which both tenants have a sequence waiting.

        A tenant's sequence is admitted only while the tenant's counter is the lowest. After that the counter can rise
        by what the tenant's running sequences still compute, at most `max_num_seqs * max_total_tokens`, before another
        one is lower. Hence no two counters of waiting tenants are ever farther apart, and their difference changes by
        at most twice that. What running sequences compute again because the worker deferred their tokens comes on top:
        it is charged like everything else that a step computes. So does what a sequence computes that runs alone
        after a crash, whatever the order.

        A preempted sequence computes some positions again, but it runs again only after its tenant's counter was the
        lowest, like any other. So the preemptions of `find_victim` do not change the bound.
        """
        return 2 * max_num_seqs * max_total_tokens

    def push(self, sequence: Sequence) -> None:
        tenant = sequence.tenant
        first = self.first()  # also drops the queues that became empty
        if tenant not in self._queues:
            # Unused service is not saved: a tenant that was idle starts with the counter of those that waited.
            floor = self._last_left if first is None else self.num_served_tokens[first.tenant]
            self._raise(tenant, max(0, floor - self.num_served_tokens.get(tenant, 0)))
            self._queues[tenant] = self.new_queue()
            heappush(self._turns, (self.num_served_tokens[tenant], tenant))
        self._queues[tenant].push(sequence)

    @staticmethod
    def new_queue() -> _KeyedQueue:
        return _KeyedQueue(lambda sequence: sequence.sequence_id)

    def first(self, shorter_than: int | None = None) -> Sequence | None:
        while self._turns:
            num_served_tokens, tenant = self._turns[0]
            sequence = self._queues[tenant].first()
            if sequence is None:
                heappop(self._turns)
                del self._queues[tenant]
                self._last_left = max(self._last_left, self.num_served_tokens[tenant])
            elif num_served_tokens < self.num_served_tokens[tenant]:
                # Counters only rise, so it is enough to correct the entry that seems to be the lowest.
                heapreplace(self._turns, (self.num_served_tokens[tenant], tenant))
            elif shorter_than is None or sequence.num_missing < shorter_than:
                return sequence
            else:
                return None
        return None

    def discard(self, sequence: Sequence) -> None:
        if sequence.tenant in self._queues:
            self._queues[sequence.tenant].discard()

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        # A suspect of a crash may run without ever having been in this queue.
        self.num_served_tokens[sequence.tenant] = self.num_served_tokens.get(sequence.tenant, 0) + num_tokens

    def charge_elsewhere(self, num_tokens: Mapping[str, int], max_lead: int) -> None:
        first = self.first()
        floor = self._last_left if first is None else self.num_served_tokens[first.tenant]
        for tenant, number in num_tokens.items():
            # Tenants that wait here may be unable to use their share of the other replicas. Their credit has a bound:
            # otherwise a tenant that was served alone on the others for an hour would wait here for an hour.
            room = floor + max_lead - self.num_served_tokens.get(tenant, 0)
            self._raise(tenant, max(0, min(number, room)))
        if first is None and num_tokens:
            # The next tenant that waits here starts level with those that are served elsewhere meanwhile.
            self._last_left = max(self._last_left, min(map(self.num_served_tokens.__getitem__, num_tokens)))

    def num_served(self, tenant: str) -> int:
        return self.num_served_tokens.get(tenant, 0)

    def num_computed_tokens(self) -> dict[str, int]:
        raised = self._num_raised_tokens
        return {tenant: number - raised.get(tenant, 0) for tenant, number in self.num_served_tokens.items()}

    def _raise(self, tenant: str, num_tokens: int) -> None:
        """Raise a counter by what was not computed here."""
        self.num_served_tokens[tenant] = self.num_served_tokens.get(tenant, 0) + num_tokens
        if num_tokens:
            self._num_raised_tokens[tenant] = self._num_raised_tokens.get(tenant, 0) + num_tokens

    def find_victim(
        self, tenant: str, size: int, running: list[Sequence], size_of: Callable[[Sequence], int]
    ) -> Sequence | None:
        """Return the last-ranked sequence of the tenant that holds most, if this tenant may take from it; else None.

        Three conditions hold for every victim:

        - Its tenant has been served more than the waiting one.
        - Its tenant still holds at least as much after it as the waiting tenant does then. So no two tenants take from
          each other in turn: max-min fairness, Bertsekas and Gallager, "Data Networks", section 6.5. It follows that no
          tenant has fewer than max_num_seqs / (tenants with work) slots, rounded down, while others have more.
        - It is not the first-ranked of its tenant. So each tenant's first-ranked sequence runs to its end, and then the
          next one is the first: no sequence starves, however many requests the other tenants send.
        """
        if len(self.num_served_tokens) == 1:
            return None
        held: defaultdict[str, int] = defaultdict(int)
        firsts: dict[str, Sequence] = {}
        for sequence in running:
            held[sequence.tenant] += size_of(sequence)
            firsts.setdefault(sequence.tenant, sequence)
        least = held[tenant] + size
        num_served_tokens = self.num_served_tokens[tenant]
        victims = (
            sequence
            for sequence in reversed(running)
            if held[sequence.tenant] - size_of(sequence) >= least
            and sequence is not firsts[sequence.tenant]
            and self.num_served_tokens[sequence.tenant] > num_served_tokens
        )
        return max(victims, key=lambda victim: held[victim.tenant], default=None)


POLICIES: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "shortest": Shortest,
    "fair": Fair,
}
