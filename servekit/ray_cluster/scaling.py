"""The autoscaling policy of the Ray Serve application: by predicted waits, not by requests. Does not import Ray."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from servekit.routing.scaling import desired_replicas

# What each server reports.
WAIT = "predicted_wait_s"  # of a request that comes now
LOAD = "load"  # sequences, running and waiting, as a share of the slots


class PredictedWaitPolicy:
    """Ray Serve calls it, and adds the bounds and the delays."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, and no state. `context` is Ray Serve's AutoscalingContext."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits = list(metrics.get(WAIT, {}).values())
        if not waits or not context.current_num_replicas:  # none has reported yet
            return context.target_num_replicas, {}
        load = sum(metrics.get(LOAD, {}).values())
        return desired_replicas(context.current_num_replicas, min(waits), load, self._target_wait_s), {}


def report(metrics: str, num_slots: int) -> dict[str, float]:
    """Return what a server reports, from its metrics in Prometheus' text format.

    A request goes to the server's replica with the shortest wait. Of several models, the one with the longest counts.
    """
    waits: dict[str, float] = {}
    num_replicas = 0
    for model, wait_s in _samples(metrics, "servekit_predicted_wait_seconds"):
        num_replicas += 1
        waits[model] = min(wait_s, waits.get(model, wait_s))
    names = ("servekit_num_requests_running", "servekit_num_requests_waiting")
    num_sequences = sum(value for name in names for _, value in _samples(metrics, name))
    return {WAIT: max(waits.values(), default=0.0), LOAD: num_sequences / (num_slots * max(1, num_replicas))}


def _samples(metrics: str, name: str) -> Iterator[tuple[str, float]]:
    """Yield each sample of a metric: the model that it is of, and its value."""
    for line in re.findall(rf"^{name}[{{ ].*$", metrics, re.MULTILINE):
        model = re.search(r'model_name="((?:[^"\\]|\\.)*)"', line)
        yield (model[1] if model else ""), float(line.rpartition(" ")[2])
