"""The autoscaling policy of the Ray Serve application: by predicted waits, not by requests. Does not import Ray."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from servekit.routing.scaling import Demand, desired_replicas, replica_load

# What each server reports.
WAIT = "predicted_wait_s"  # of a request that comes now
WAITING = "num_waiting"  # sequences that wait at the replica where the fewest do
LOAD = "load"  # mean of its replicas' loads

Pair = tuple[str, str]  # a model, and the number of one of its replicas


class PredictedWaitPolicy:
    """Ray Serve calls it, and adds the bounds and the delays."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, and no state. `context` is Ray Serve's AutoscalingContext."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits, waiting, loads = ([*metrics.get(name, {}).values()] for name in (WAIT, WAITING, LOAD))
        current = context.current_num_replicas
        if not waits or not current:  # none has reported yet
            return context.target_num_replicas, {}
        demand = Demand(min(waits), min(waiting, default=0.0), sum(loads))
        desired = desired_replicas(current, demand, self._target_wait_s)
        if desired < current and demand.has_wait(self._target_wait_s):
            desired = current
        return desired, {}


def report(metrics: str, num_slots: int) -> dict[str, float]:
    """Return what a server reports, from its metrics in Prometheus' text format; nothing while it has no live worker.

    Replicas without a live worker are left out. A request goes to the replica with the shortest wait. Of several
    models, the one with the most to do counts.
    """
    alive = {pair for pair, value in _samples(metrics, "servekit_workers_alive") if value == 1}
    waits, running, waiting, kv_usage = (
        {pair: value for pair, value in _samples(metrics, name) if pair in alive}
        for name in (
            "servekit_predicted_wait_seconds",
            "servekit_num_requests_running",
            "servekit_num_requests_waiting",
            "servekit_kv_cache_usage_perc",
        )
    )
    if not waits:
        return {}
    loads = {
        pair: replica_load(running.get(pair, 0.0) + waiting.get(pair, 0.0), num_slots, kv_usage.get(pair, 0.0))
        for pair in waits
    }
    by_model = [[pair for pair in waits if pair[0] == model] for model in {model for model, _ in waits}]
    return {
        WAIT: max(min(waits[pair] for pair in pairs) for pairs in by_model),
        WAITING: max(min(waiting.get(pair, 0.0) for pair in pairs) for pairs in by_model),
        LOAD: max(_mean(loads[pair] for pair in pairs) for pairs in by_model),
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _samples(metrics: str, name: str) -> Iterator[tuple[Pair, float]]:
    """Yield each sample of a metric: what it is of, and its value."""
    for line in re.findall(rf"^{name}[{{ ].*$", metrics, re.MULTILINE):
        labels: dict[str, str] = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
        yield (labels.get("model_name", ""), labels.get("replica", "")), float(line.rpartition(" ")[2])
