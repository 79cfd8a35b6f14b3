"""Decide how many replicas are needed: by the predicted wait when they are busy, otherwise by their load."""

from __future__ import annotations

from math import ceil

MAX_GROWTH = 2.0  # largest factor in one decision, because a prediction may be wrong
MAX_LOAD = 0.7  # highest load of each replica after some have been removed


def desired_replicas(num_replicas: int, wait_s: float, load: float, target_wait_s: float) -> float:
    """Return how many replicas are needed.

    `wait_s` is the shortest of the replicas' predicted waits: a new request goes to this replica, and the router keeps
    the waits of the others similar. The wait falls in proportion to the number of replicas. `load` is the sum of the
    replicas' loads. The load of a replica is its sequences, running and waiting, as a share of its slots.
    """
    if wait_s > target_wait_s:
        return num_replicas * min(MAX_GROWTH, wait_s / target_wait_s)
    return min(num_replicas, max(1, ceil(load / MAX_LOAD)))


class ReplicaScaler:
    """Changes the number of replicas when another one has been wanted for long enough."""

    def __init__(
        self, min_replicas: int, max_replicas: int, target_wait_s: float, up_delay_s: float, down_delay_s: float
    ) -> None:
        self._min, self._max = min_replicas, max_replicas
        self._target_wait_s = target_wait_s
        self._delays_s = {1: up_delay_s, -1: down_delay_s}
        self._direction = 0  # 1 if more replicas are wanted, -1 if fewer
        self._since_s = 0.0

    def decide(self, num_replicas: int, wait_s: float, load: float, now_s: float) -> int:
        """Return how many replicas there should be. There are `num_replicas` now."""
        desired = ceil(desired_replicas(num_replicas, wait_s, load, self._target_wait_s))
        desired = min(self._max, max(self._min, desired))
        direction = (desired > num_replicas) - (desired < num_replicas)
        if direction != self._direction:
            self._direction, self._since_s = direction, now_s
        if not direction or now_s - self._since_s < self._delays_s[direction]:
            return num_replicas
        self._direction = 0
        return desired
