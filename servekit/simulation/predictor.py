"""Simulate a predictor in virtual time: the real dynamic batcher, a simulated worker, clients and faults.

A `PredictorScenario` is a value. `PredictorSimulation` plays it, deterministically, and raises a `Violation` as soon as
the batcher breaks a promise:

- Each item ends exactly once: with an answer, by its client or its deadline, or because workers are lost over it.
- A batch has at most the items and the padded tokens of the limits; a longer item is alone.
- While the worker is idle, no item waits longer than the maximum delay.
- While two tenants both wait, their service drifts apart by at most twice the longest item.
"""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import combinations
from math import inf

from msgspec import Struct

from servekit.dynamic_batching.dynamic_batcher import (
    CRASHES_TO_FAIL,
    CRASHES_TO_SUSPECT,
    Batch,
    BatchLimits,
    DynamicBatcher,
)
from servekit.dynamic_batching.item import NEVER, Item, ItemStatus
from servekit.simulation.worker import Violation

ROUNDING_S = 1e-9


class ItemArrival(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An item, when it comes, and how it ends if it is not answered before."""

    at_s: float
    length: int
    tenant: str = ""
    priority: int = 0
    deadline_s: float | None = None  # after its arrival
    leaves_s: float | None = None  # its client leaves then, after its arrival
    is_deadly: bool = False  # a worker that computes it is lost


class PredictorFault(Struct, frozen=True, kw_only=True):
    """One fault, and when it happens."""

    at_s: float
    kind: str  # kill: the worker is lost; duplicate: the next result comes twice; stale: one of a lost worker comes


class PredictorScenario(Struct, frozen=True, kw_only=True):
    """Everything that a simulation depends on. A batch takes `batch_s`, and `token_s` for each padded token."""

    limits: BatchLimits
    arrivals: tuple[ItemArrival, ...]
    faults: tuple[PredictorFault, ...] = ()
    batch_s: float = 1e-3
    token_s: float = 1e-5
    recovery_s: float = 0.01  # until there is a worker again


class ItemOutcome(Struct):
    """What became of an item."""

    arrival: ItemArrival
    item: Item
    end: str = ""  # answered, left, expired or failed
    ended_s: float = inf
    batch_size: int = 0  # of the batch that answered it


class PredictorSimulation:
    """Plays one scenario. After `run`, `outcomes` says what became of each item, in order of arrival."""

    def __init__(self, scenario: PredictorScenario, batcher: DynamicBatcher | None = None) -> None:
        self.scenario = scenario
        self.batcher = batcher or DynamicBatcher(scenario.limits)
        self.now_s = 0.0
        self.outcomes: list[ItemOutcome] = []
        self.num_batches = 0
        self.num_losses = 0
        self.num_padded_tokens = 0
        events: list[ItemArrival | PredictorFault] = [*scenario.arrivals, *scenario.faults]
        self._events = deque(sorted(events, key=lambda event: event.at_s))
        self._by_id: dict[int, ItemOutcome] = {}  # that have not ended
        self._in_flight: deque[tuple[Batch, float]] = deque()  # with the time of its result
        self._last_done: Batch | None = None
        self._ready_s = 0.0  # there is no worker before
        self._idle_since_s = 0.0  # the worker, while it has no batch
        self._runs_suspect = False
        self._duplicates_next = False
        self._spans: dict[tuple[str, str], int] = {}  # two tenants that both wait: their difference when that began
        self._service: defaultdict[str, int] = defaultdict(int)
        self._longest = max((each.length for each in scenario.arrivals), default=0)

    def run(self) -> None:
        """Play the scenario to its end. Raises Violation."""
        num_rounds = 0
        while self._events or self._by_id or self._in_flight:
            self._plan_all()
            self.now_s = self._next_s()
            self._play_events()
            self._deliver()
            self._end_all(self.batcher.expire(self.now_s), "expired")
            num_rounds += 1
            if num_rounds > 100 + 20 * len(self.scenario.arrivals) + 10 * len(self.scenario.faults):
                raise Violation(f"no end after {num_rounds} rounds; alive: {list(self._by_id)}")
        if self.batcher.has_work or self.batcher.num_waiting_tokens or self.batcher.next_deadline_s() != NEVER:
            raise Violation("the batcher still has work at the end")

    # -- one round ----------------------------------------------------------------------------------------------------

    def _plan_all(self) -> None:
        """Send the worker what it may get now, and check each batch."""
        if self.now_s < self._ready_s:
            return
        if not self._in_flight:
            waited_s = self.now_s - min((each.item.arrival_s for each in self._waiting()), default=self.now_s)
            idle_s = min(waited_s, self.now_s - self._idle_since_s)
            if idle_s > self.scenario.limits.max_delay_s + ROUNDING_S:
                raise Violation(f"an item has waited for {idle_s} s while the worker was idle")
        while (batch := self.batcher.plan(self.now_s)) is not None:
            self._check_batch(batch)
            begin_s = self._in_flight[-1][1] if self._in_flight else self.now_s
            duration_s = self.scenario.batch_s + self.scenario.token_s * batch.num_tokens
            self._in_flight.append((batch, begin_s + duration_s))
            self.num_batches += 1
            self.num_padded_tokens += batch.num_tokens

    def _next_s(self) -> float:
        """The time at which something happens next."""
        times_s = [self.batcher.next_deadline_s(), max(self._ready_s, self.batcher.next_plan_s())]
        times_s += [self._events[0].at_s] if self._events else []
        times_s += [self._in_flight[0][1]] if self._in_flight else []
        times_s += [self._leave_s(each) for each in self._by_id.values()]
        if min(times_s, default=inf) == inf:
            raise Violation(f"nothing happens any more, and items {list(self._by_id)} have not ended")
        return max(self.now_s, min(times_s))

    def _play_events(self) -> None:
        while self._events and self._events[0].at_s <= self.now_s:
            event = self._events.popleft()
            if isinstance(event, ItemArrival):
                self._add(event)
            elif event.kind == "kill":
                self._lose_worker()
            elif event.kind == "duplicate":
                self._duplicates_next = True
            elif self._last_done is not None:
                self._commit(self._last_done)  # again
        for outcome in [each for each in self._by_id.values() if self._leave_s(each) <= self.now_s]:
            self.batcher.finish(outcome.item)
            self.batcher.finish(outcome.item)  # a client may leave twice
            self._end_all([outcome.item], "left")

    def _add(self, arrival: ItemArrival) -> None:
        deadline_s = NEVER if arrival.deadline_s is None else arrival.at_s + arrival.deadline_s
        item = Item(len(self.outcomes), arrival.length, arrival.at_s, arrival.tenant, arrival.priority, deadline_s)
        self.outcomes.append(ItemOutcome(arrival, item))
        self._by_id[item.item_id] = self.outcomes[-1]
        self.batcher.add(item)

    def _deliver(self) -> None:
        """Let the worker return what it has computed by now."""
        while self._in_flight and self._in_flight[0][1] <= self.now_s:
            batch = self._in_flight[0][0]
            if any(self.outcomes[item.item_id].arrival.is_deadly for item in batch.items):
                self._lose_worker()
                return
            self._in_flight.popleft()
            self._idle_since_s, self._runs_suspect = self.now_s, False
            self._last_done = batch
            self._commit(batch)
            if self._duplicates_next:
                self._duplicates_next = False
                self._commit(batch)

    def _commit(self, batch: Batch) -> None:
        for index, item in self.batcher.commit(batch.epoch, batch.batch_id):
            if batch.items[index] is not item:
                raise Violation(f"item {item.item_id} got the result of item {batch.items[index].item_id}")
            self.outcomes[item.item_id].batch_size = len(batch.items)
            self._end_all([item], "answered")

    def _lose_worker(self) -> None:
        self.num_losses += 1
        self._in_flight.clear()
        failed = self.batcher.restart()
        for item in failed:
            if item.num_crashes < CRASHES_TO_FAIL:
                raise Violation(f"item {item.item_id} failed after {item.num_crashes} lost workers")
        self._end_all(failed, "failed")
        self._ready_s = self._idle_since_s = self.now_s + self.scenario.recovery_s
        self._runs_suspect = False

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_batch(self, batch: Batch) -> None:
        limits, items = self.scenario.limits, batch.items
        if len(items) > limits.max_batch_size or (len(items) > 1 and batch.num_tokens > limits.max_batch_tokens):
            raise Violation(f"a batch of {len(items)} items and {batch.num_tokens} tokens exceeds {limits}")
        if len(self._in_flight) >= limits.max_in_flight:
            raise Violation(f"{len(self._in_flight) + 1} batches are in flight; the limit is {limits.max_in_flight}")
        for item in items:
            if item.status is not ItemStatus.IN_FLIGHT or self._by_id.get(item.item_id) is None:
                raise Violation(f"item {item.item_id} is in a batch after its end")
        has_suspect = any(item.num_crashes >= CRASHES_TO_SUSPECT for item in items)
        if (has_suspect and (len(items) > 1 or self._in_flight)) or self._runs_suspect:
            raise Violation("a suspect is not computed alone")
        self._runs_suspect = has_suspect
        if not has_suspect:  # which comes before its turn
            for item in items:
                self._service[item.tenant] += item.cost
            self._observe_lag()

    def _observe_lag(self) -> None:
        """Check how far the service of two tenants has drifted apart since both wait."""
        waiting, spans = {each.item.tenant for each in self._waiting()}, {}
        bound = 2 * Item(0, self._longest, 0.0).cost
        for pair in combinations(sorted(waiting), 2):
            apart = self._service[pair[0]] - self._service[pair[1]]
            spans[pair] = self._spans.get(pair, apart)
            if abs(apart - spans[pair]) > bound:
                raise Violation(f"the service of tenants {pair} drifted apart by {apart - spans[pair]} tokens")
        self._spans = spans

    def _waiting(self) -> list[ItemOutcome]:
        return [each for each in self._by_id.values() if each.item.status is ItemStatus.WAITING]

    @staticmethod
    def _leave_s(outcome: ItemOutcome) -> float:
        leaves_s = outcome.arrival.leaves_s
        return NEVER if leaves_s is None else outcome.arrival.at_s + leaves_s

    def _end_all(self, items: list[Item], end: str) -> None:
        for item in items:
            outcome = self._by_id.pop(item.item_id, None)
            if outcome is None or item.status is not ItemStatus.DONE:
                raise Violation(f"item {item.item_id} ended twice, or has not ended: {end}")
            outcome.end, outcome.ended_s = end, self.now_s
        waiting = {each.item.tenant for each in self._waiting()}
        self._spans = {pair: apart for pair, apart in self._spans.items() if waiting.issuperset(pair)}
