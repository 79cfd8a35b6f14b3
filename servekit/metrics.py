"""What operators watch, as Prometheus metrics.

Names follow vLLM's suffixes under `servekit_`, so dashboards convert by replacing the prefix. Labels are bounded: a
model's name and closed sets, never a request or a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from servekit.sequence import FinishReason

# vLLM's buckets start at 10 ms between tokens, too coarse for small models.
_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS = tuple(float(2**exponent) for exponent in range(18))
_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Snapshot(Struct, frozen=True):
    """What the workload manager holds at this moment."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_stale_results: int
    num_blocks: int
    num_free_blocks: int  # cached ones included: they hold nothing that somebody needs
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_limit: int


class _SnapshotCollector(Collector):
    """Reads the manager when somebody asks, so that a step spends nothing on gauges."""

    def __init__(self, model_name: str, take: Callable[[], Snapshot]) -> None:
        self._model_name = model_name
        self._take = take

    def collect(self) -> Iterator[Metric]:
        now = self._take()
        used = 1.0 - now.num_free_blocks / now.num_blocks
        yield self._gauge("num_requests_running", "Sequences that hold KV blocks.", now.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for their turn.", now.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        yield self._gauge("kv_blocks_total", "KV blocks in the pool.", now.num_blocks)
        yield self._gauge("kv_blocks_free", "KV blocks that a sequence can have.", now.num_free_blocks)
        yield self._gauge("prefill_limit_tokens", "Prefill that the next step may carry.", now.prefill_limit)
        yield self._counter("num_preemptions", "Times a sequence lost its blocks to an older one.", now.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", now.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", now.num_cached_tokens)
        yield self._counter("stale_results", "Worker results that nobody awaited, dropped.", now.num_stale_results)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"servekit_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"servekit_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class Metrics:
    """All metrics of one server. Only the engine writes them."""

    def __init__(self, model_name: str, version: str) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model_name}

        def counter(name: str, text: str) -> Counter:
            return Counter(f"servekit_{name}", text, list(labels), registry=self.registry).labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"servekit_{name}", text, list(labels), registry=self.registry, buckets=buckets).labels(
                **labels
            )

        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted sequences.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated.")
        self.scheduler_steps = counter("scheduler_steps_total", "Steps executed.")
        self._finished = Counter(
            "servekit_request_success_total",
            "Sequences that ended, by reason.",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "servekit_admission_rejections_total",
            "Requests refused at the door, by error code.",
            [*labels, "reason"],
            registry=self.registry,
        )

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _LATENCY_BUCKETS
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_BUCKETS
        )
        self.request_queue_time = histogram(
            "request_queue_time_seconds", "From arrival to the first step.", _LATENCY_BUCKETS
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt length.", _TOKEN_BUCKETS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Output length.", _TOKEN_BUCKETS)
        self.iteration_tokens = histogram("iteration_tokens", "Tokens computed in a step.", _TOKEN_BUCKETS)
        self.step_duration = histogram("step_duration_seconds", "Execution of a step in the worker.", _STEP_BUCKETS)
        self.step_overhead = histogram(
            "step_overhead_seconds", "A turn of the main loop less the step: what overlap does not hide.", _STEP_BUCKETS
        )
        self._model_name = model_name
        build = Gauge("servekit_build_info", "The running version.", ["version"], registry=self.registry)
        build.labels(version=version).set(1)

    def watch(self, take: Callable[[], Snapshot]) -> None:
        """Report what `take` returns at each scrape."""
        self.registry.register(_SnapshotCollector(self._model_name, take))

    def finished(self, reason: FinishReason) -> None:
        self._finished.labels(model_name=self._model_name, finished_reason=str(reason)).inc()

    def refused(self, code: str) -> None:
        self._refused.labels(model_name=self._model_name, reason=code).inc()

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
