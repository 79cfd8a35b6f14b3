"""Decide how many replicas are needed: by the predicted wait when they are busy, otherwise by their load."""

from __future__ import annotations

from math import ceil

from msgspec import Struct

MAX_GROWTH = 2.0  # largest factor in one decision, because a prediction may be wrong
MAX_LOAD = 0.7  # highest load of each replica after one has been removed
# A wait below this share of the target is none: every sequence that comes during a step waits for its end.
NO_WAIT = 0.05


class Demand(Struct, frozen=True):
    """What the replicas have to do.

    The wait is that of the replica where it is shortest: a new request goes there, and the router keeps the waits of
    the others similar.
    """

    wait_s: float  # predicted for a request that comes now
    num_waiting: float  # sequences that wait at the replica where the fewest do
    load: float  # sum of the replicas' loads

    def has_wait(self, target_wait_s: float) -> bool:
        """Whether a request that comes now waits for more than the end of a step, as far as is known."""
        return self.num_waiting >= 1 or self.wait_s > NO_WAIT * target_wait_s


def replica_load(num_sequences: float, num_slots: int, kv_usage: float) -> float:
    """Return how busy one replica is; 1 is full.

    `num_sequences` counts running and waiting ones. `kv_usage` is the share of its KV blocks that are in use: with long
    sequences it is full long before the slots are.
    """
    return max(num_sequences / num_slots, kv_usage)


def desired_replicas(num_replicas: int, demand: Demand, target_wait_s: float) -> float:
    """Return how many replicas are needed: more in proportion to the wait, or at most one less.

    The wait falls in proportion to the number of replicas. One less is the most, because the load of those that are
    left is known only after the replica has gone. While requests wait, the caller removes none (`Demand.has_wait`).
    """
    if demand.wait_s > target_wait_s:
        return num_replicas * min(MAX_GROWTH, demand.wait_s / target_wait_s)
    return max(1, num_replicas - 1, min(num_replicas, ceil(demand.load / MAX_LOAD)))


class ReplicaScaler:
    """Changes the number of replicas when another one has been wanted for long enough."""

    def __init__(
        self, min_replicas: int, max_replicas: int, target_wait_s: float, up_delay_s: float, down_delay_s: float
    ) -> None:
        self.wants_more = False  # whether the last decision found that there are too few
        self._min, self._max = min_replicas, max_replicas
        self._target_wait_s = target_wait_s
        self._delays_s = {1: up_delay_s, -1: down_delay_s}
        self._direction = 0  # 1 if more replicas are wanted, -1 if fewer
        self._since_s = 0.0

    def decide(self, num_replicas: int, demand: Demand, now_s: float) -> int:
        """Return how many replicas there should be. There are `num_replicas` now."""
        desired = ceil(desired_replicas(num_replicas, demand, self._target_wait_s))
        desired = min(self._max, max(self._min, desired))
        direction = (desired > num_replicas) - (desired < num_replicas)
        self.wants_more = direction > 0
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        if not direction or now_s - self._since_s < self._delays_s[direction]:
            return num_replicas
        if direction < 0 and demand.has_wait(self._target_wait_s):
            # The delay does not begin again: at a moment's look, something often waits for the end of a step.
            return num_replicas
        self._direction = 0
        return desired
