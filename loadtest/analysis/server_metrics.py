"""The metrics that a server reported about itself during a run, under names that are the same for all servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from loadtest.analysis.statistics import Floats

Scrape = tuple[float, Mapping[str, float]]  # seconds since the start of the run, and the value of each sample by name

# The names that servers give to the same metric. The first one that is present is used.
SERVER_SERIES: dict[str, tuple[str, ...]] = {
    "batch_size": ("servekit_scheduler_batch_size", "vllm:num_requests_running"),
    "num_running": ("servekit_num_requests_running", "vllm:num_requests_running"),
    "num_waiting": ("servekit_num_requests_waiting", "vllm:num_requests_waiting"),
    "kv_cache_usage": ("servekit_kv_cache_usage_perc", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "num_preemptions": ("servekit_num_preemptions_total", "vllm:num_preemptions_total"),
    # In prompt tokens.
    "num_prefix_cache_queries": (
        "servekit_prefix_cache_queries_total",
        "vllm:prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
    "num_prefix_cache_hits": (
        "servekit_prefix_cache_hits_total",
        "vllm:prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits_total",
    ),
}
COUNTERS = ("num_preemptions", "num_prefix_cache_queries", "num_prefix_cache_hits")


def server_series(scrapes: Sequence[Scrape]) -> dict[str, tuple[Floats, Floats]]:
    """Return times and values by the names in SERVER_SERIES, for those metrics that the server reports.

    A sample's name may carry labels (`name{engine="0"}`). Counts are summed over labels, shares are averaged.
    """
    series = {}
    for meaning, names in SERVER_SERIES.items():
        for name in names:
            points = [(t_s, value) for t_s, values in scrapes if (value := _read(name, values)) is not None]
            if points:
                series[meaning] = (np.array([t for t, _ in points]), np.array([value for _, value in points]))
                break
    return series


def _read(name: str, values: Mapping[str, float]) -> float | None:
    found = [value for each, value in values.items() if each == name or each.startswith(f"{name}{{")]
    if not found:
        return None
    return sum(found) / (len(found) if name.endswith("_perc") else 1)
