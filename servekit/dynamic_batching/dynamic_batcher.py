"""Plan batches for one worker, and commit their results. It has the same methods as the workload manager.

A batch is planned when the worker is idle and either the batch is full, or the first item has waited for the maximum
delay. While a batch runs, another one is planned after it only if that one is full: a batch that could still grow is
better planned when the worker is free.

An item takes as many tokens of a batch as its padded length, and an image as many pixels as its file has. A batch takes
items in the order of their turns, and ends before the first one that does not fit. Letting shorter ones overtake it
would fill batches better by half an item on average, but it would need a rule that bounds the wait of the overtaken
item.

When a worker is lost, the items that it had are computed again. An item that was with two lost workers is a suspect: it
is computed alone. If a third worker is lost, only this item fails.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import inf

from msgspec import Struct

from servekit.dynamic_batching.fair_queue import FairQueue
from servekit.dynamic_batching.item import NEVER, Item, ItemStatus

CRASHES_TO_SUSPECT = 2
CRASHES_TO_FAIL = 3


class BatchLimits(Struct, frozen=True):
    """What bounds a batch."""

    max_batch_size: int  # items
    max_batch_tokens: int  # with padding; an item that alone exceeds this gets a batch of its own
    max_delay_s: float = 0.0  # how long the first item may wait for others, while the worker is idle
    max_batch_bytes: int = 2**22  # of image files; a larger one gets a batch of its own
    max_batch_pixels: int = 2**25  # of images; they are decoded one after the other, before the model computes any
    max_in_flight: int = 2  # batches that are sent to the worker before it returns the first of them


class Batch(Struct, frozen=True):
    """Items that are computed together."""

    epoch: int  # identifies the worker that it is for
    batch_id: int
    items: tuple[Item, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all items, with their padding."""
        return sum(item.cost for item in self.items)

    @property
    def work(self) -> int:
        """What its time depends on: its tokens, and what it takes to decode its images."""
        return sum(item.work for item in self.items)


class DynamicBatcher:
    """The waiting items and the batches in flight of one worker. Times are seconds on the caller's clock."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.epoch = 0
        self.num_waiting = 0  # including suspects
        self.num_waiting_tokens = 0
        self.num_stale_results = 0  # results that were repeated, or came from a worker that was lost before
        self._queue = FairQueue()
        self._suspects: deque[Item] = deque()
        self._in_flight: dict[int, Batch] = {}  # by batch id, the oldest first
        self._next_batch_id = 0
        self._waiting_since_s = inf  # when the delay began; -inf if it is over
        self._deadlines: list[tuple[float, int, Item]] = []  # a heap; items that have ended are removed later
        self._num_ended_deadlines = 0

    @property
    def num_in_flight(self) -> int:
        """Batches that were planned and are not committed or lost yet."""
        return len(self._in_flight)

    @property
    def num_suspects(self) -> int:
        """Items that wait to be computed alone, because workers that had them were lost."""
        return sum(item.is_alive for item in self._suspects)

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self.num_in_flight > 0

    def num_served(self, tenant: str) -> int:
        """Tokens of batches that were planned for a tenant, raised to those of others where it had nothing waiting.

        A suspect comes before its turn and is not counted again, because it was counted for each worker that was lost.
        """
        return self._queue.num_served(tenant)

    # -- commands -----------------------------------------------------------------------------------------------------

    def add(self, item: Item) -> None:
        """Add a waiting item."""
        assert item.status is ItemStatus.WAITING
        self._queue.push(item)
        self._count_waiting(item)
        self._waiting_since_s = min(self._waiting_since_s, item.arrival_s)
        if item.deadline_s != NEVER:
            heappush(self._deadlines, (item.deadline_s, item.item_id, item))

    def plan(self, now_s: float) -> Batch | None:
        """Return the next batch for the worker; None if there is none yet: see `next_plan_s`."""
        if not self._may_plan(now_s):
            return None
        suspect = self._take_suspect()
        items = self._fill() if suspect is None else [suspect]
        for item in items:
            item.status = ItemStatus.IN_FLIGHT
            self._uncount_waiting(item)
        batch = Batch(self.epoch, self._next_batch_id, tuple(items))
        self._in_flight[batch.batch_id] = batch
        self._next_batch_id += 1
        self._waiting_since_s = -inf if self.num_waiting else inf  # the remaining items have waited long enough
        return batch

    def next_plan_s(self) -> float:
        """When `plan` may return a batch if nothing else happens; NEVER if it will not."""
        if self._in_flight or not self.num_waiting:
            return NEVER
        return self._waiting_since_s + self.limits.max_delay_s

    def commit(self, epoch: int, batch_id: int) -> list[tuple[int, Item]]:
        """End a batch whose results have come; return its items that have not ended, with their place in it.

        A repeated result, or one from a worker that was lost before, is ignored.
        """
        batch = self._in_flight.pop(batch_id, None) if epoch == self.epoch else None
        if batch is None:
            self.num_stale_results += 1
            return []
        alive = [(index, item) for index, item in enumerate(batch.items) if item.is_alive]
        for _, item in alive:
            self._end(item)
        return alive

    def finish(self, item: Item) -> None:
        """End an item without an answer: its client has left, or it failed. Idempotent."""
        if not item.is_alive:
            return
        was_waiting = item.status is ItemStatus.WAITING
        if was_waiting:
            self._uncount_waiting(item)
        self._end(item)
        if was_waiting and item.num_crashes < CRASHES_TO_SUSPECT:
            self._queue.discard(item)

    def next_deadline_s(self) -> float:
        """The next deadline of an item that has not ended; NEVER if there is none."""
        while self._deadlines and not self._deadlines[0][2].is_alive:
            heappop(self._deadlines)
            self._num_ended_deadlines -= 1
        return self._deadlines[0][0] if self._deadlines else NEVER

    def expire(self, now_s: float) -> list[Item]:
        """End the items whose deadline has passed, waiting or in flight, and return them."""
        expired = []
        while self.next_deadline_s() <= now_s:
            expired.append(self._deadlines[0][2])
            self.finish(expired[-1])
        return expired

    def restart(self) -> list[Item]:
        """Handle the loss of the worker: its items wait again. Returns the items that must fail; they have ended."""
        self.epoch += 1
        failed = []
        for batch in self._in_flight.values():
            for item in batch.items:
                if not item.is_alive:
                    continue
                item.num_crashes += 1
                if item.num_crashes >= CRASHES_TO_FAIL:
                    self._end(item)
                    failed.append(item)
                    continue
                item.status = ItemStatus.WAITING
                self._count_waiting(item)
                if item.num_crashes >= CRASHES_TO_SUSPECT:
                    self._suspects.append(item)
                else:
                    self._queue.push(item)
                self._waiting_since_s = -inf
        self._in_flight.clear()
        return failed

    # -- parts --------------------------------------------------------------------------------------------------------

    def _may_plan(self, now_s: float) -> bool:
        """Return whether the worker should get a batch now."""
        if not self.num_waiting:
            return False
        if self._first_suspect() is not None:
            return not self._in_flight
        if self._runs_suspect() or len(self._in_flight) >= self.limits.max_in_flight:
            return False
        limits = self.limits
        is_full = self.num_waiting >= limits.max_batch_size or self.num_waiting_tokens >= limits.max_batch_tokens
        return is_full or (not self._in_flight and now_s >= self._waiting_since_s + limits.max_delay_s)

    def _runs_suspect(self) -> bool:
        """Return whether a suspect has the worker for itself."""
        return any(batch.items[0].num_crashes >= CRASHES_TO_SUSPECT for batch in self._in_flight.values())

    def _first_suspect(self) -> Item | None:
        while self._suspects and not self._suspects[0].is_alive:
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

    def _take_suspect(self) -> Item | None:
        return None if self._first_suspect() is None else self._suspects.popleft()

    def _fill(self) -> list[Item]:
        """Take the items of the next batch from the queue."""
        items: list[Item] = []
        num_tokens, num_bytes, num_pixels, limits = 0, 0, 0, self.limits
        while len(items) < limits.max_batch_size:
            item = self._queue.first()
            if item is None:
                break
            num_tokens += item.cost
            num_bytes += item.num_bytes
            num_pixels += item.num_pixels
            if items and (
                num_tokens > limits.max_batch_tokens
                or num_bytes > limits.max_batch_bytes
                or num_pixels > limits.max_batch_pixels
            ):
                break
            self._queue.pop(item)
            self._queue.charge(item)  # charged now, so that tenants take turns within the batch, too
            items.append(item)
        return items

    def _end(self, item: Item) -> None:
        item.status = ItemStatus.DONE
        if item.deadline_s != NEVER:
            self._num_ended_deadlines += 1
            if self._num_ended_deadlines > len(self._deadlines) // 2:
                self._deadlines = [entry for entry in self._deadlines if entry[2].is_alive]
                heapify(self._deadlines)
                self._num_ended_deadlines = 0

    def _count_waiting(self, item: Item) -> None:
        self.num_waiting += 1
        self.num_waiting_tokens += item.cost

    def _uncount_waiting(self, item: Item) -> None:
        self.num_waiting -= 1
        self.num_waiting_tokens -= item.cost
        if not self.num_waiting:
            self._waiting_since_s = inf
