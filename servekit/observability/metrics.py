"""Define the Prometheus metrics of one server, in groups. Each group has its metrics and the code that updates them.

To add a metric, declare it in the group of what it counts, and update it in one of the group's events. Names follow
vLLM's suffixes under `servekit_`, so dashboards convert by replacing the prefix. Labels are bounded: the model's name
and closed sets, never a request or a user. The table in docs/metrics.md is generated from this module.

Nothing here reads a clock: callers pass times. Children of labelled metrics are created once, because looking one up
costs more than counting with it. For this reason they are exported with value 0 before anything has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar, cast

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from servekit.config import ServeConfig
from servekit.observability.batch_histogram import BatchHistogram
from servekit.observability.cost import Cost
from servekit.observability.observer import Observer, StepSummary
from servekit.protocol.messages import StepResult
from servekit.scheduler.draft_length import DraftLengths
from servekit.scheduler.sequence import FinishReason, Sequence

disable_created_metrics()  # `_created` timestamps would double the number of series, and no dashboard uses them

# vLLM's buckets start at 10 ms between tokens, which is too coarse for small models.
# fmt: off
_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)
# fmt: on
_TOKEN_BUCKETS = tuple(float(2**exponent) for exponent in range(18))
_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_IPC_BUCKETS = (0.0001, 0.00025, *_STEP_BUCKETS)
_RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# Values of the label `cause` of servekit_worker_restarts_total.
RESTART_CAUSES = ("ended", "step_timeout", "silence", "garbage", "failed", "out_of_memory", "no_start", "left", "other")

# Values of the label `reason` of servekit_worker_joins_refused_total. The first nine are sent to the worker.
JOIN_REFUSALS = (
    "wrong_key",
    "other_version",
    "other_model",
    "other_size",
    "other_adapters",
    "invalid",
    "loading",
    "draining",
    "too_many",
    "timeout",
    "displaced",
    "load_failed",
)

# Settings that a dashboard shows next to its curves, as labels of servekit_config_info.
_EXPORTED_SETTINGS = (
    "dtype",
    "device",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_steps_in_flight",
    "enable_prefix_caching",
    "scheduling_policy",
    "itl_target_ms",
)

# The limit on values of a label that come from the code but from no closed set. Further values count as "other",
# and further adapters, which may have that name, as "(other)".
_MAX_LABEL_VALUES = 100


_Family = TypeVar("_Family", Gauge, Counter, Histogram)


class _MetricFactory:
    """Declares metrics with the prefix `servekit_` and the label `model_name`, and registers them.

    `of_replica` returns a factory of the metrics that each replica has: they have the label `replica`, too.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.label_values: tuple[str, ...] = (model_name,)  # of the labels that all metrics of this factory have
        self._label_names: tuple[str, ...] = ("model_name",)
        self._families: dict[str, Any] = {}  # what was declared for an earlier replica

    def of_replica(self, index: int) -> _MetricFactory:
        """The factory of one replica's metrics."""
        factory = _MetricFactory(self.registry, self.label_values[0])
        factory.label_values += (str(index),)
        factory._label_names += ("replica",)
        factory._families = self._families
        return factory

    def gauge(self, name: str, text: str) -> Gauge:
        return self.labelled_gauge(name, text).labels(*self.label_values)

    def labelled_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return self._declare(Gauge, name, text, *labels)

    def counter(self, name: str, text: str) -> Counter:
        return self.labelled_counter(name, text).labels(*self.label_values)

    def labelled_counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._declare(Counter, name, text, *labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
        return self._declare(Histogram, name, text, buckets=buckets).labels(*self.label_values)

    def batch_histogram(self, name: str, text: str) -> BatchHistogram:
        """Declare a histogram whose values come in batches."""
        names, values = self._label_names, self.label_values
        histogram = BatchHistogram(f"servekit_{name}", text, names, values, _LATENCY_BUCKETS)
        self.registry.register(histogram)
        return histogram

    def labelled_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return self._declare(Histogram, name, text, *labels, buckets=buckets)

    def _declare(self, kind: Callable[..., _Family], name: str, text: str, *labels: str, **options: Any) -> _Family:
        if name not in self._families:
            names = [*self._label_names, *labels]
            self._families[name] = kind(f"servekit_{name}", text, names, registry=self.registry, **options)
        family: _Family = self._families[name]
        return family


class RequestMetrics(Observer):
    """Sequences and their tokens: how many, how long, and how fast."""

    def __init__(self, metrics: _MetricFactory) -> None:
        self.num_tokens = 0  # of prompts and answers
        self._prompt_tokens = metrics.counter("prompt_tokens_total", "Prompt tokens of admitted sequences.")
        self._generation_tokens = metrics.counter("generation_tokens_total", "Tokens generated.")
        self._prompt_length = metrics.histogram("request_prompt_tokens", "Prompt length.", _TOKEN_BUCKETS)
        self._output_length = metrics.histogram("request_generation_tokens", "Output length.", _TOKEN_BUCKETS)
        ended = metrics.labelled_counter(
            "request_success_total",
            "Sequences that ended, by reason. Despite its name, which is vLLM's, it counts the reasons abort, deadline "
            "and error, too; only stop and length are successes.",
            "finished_reason",
        )
        self._ended = {reason: ended.labels(*metrics.label_values, str(reason)) for reason in FinishReason}
        self._time_to_first_token = metrics.histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token."
        )
        self._inter_token_latency = metrics.batch_histogram(
            "inter_token_latency_seconds", "Time between two consecutive tokens of a sequence."
        )
        self._time_per_output_token = metrics.histogram(
            "request_time_per_output_token_seconds", "Mean time between consecutive tokens, one value per sequence."
        )
        self._e2e_request_latency = metrics.histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end of a sequence, for any finish reason."
        )
        self._queue_time = metrics.histogram(
            "request_queue_time_seconds", "Time from arrival to the first step, including tokenization."
        )
        self._prefill_time = metrics.histogram(
            "request_prefill_time_seconds", "Time from the first step to the first token, for sequences with a token."
        )
        self._decode_time = metrics.histogram(
            "request_decode_time_seconds", "Time from the first token to the last token of a sequence."
        )

    def sequence_admitted(self, sequence: Sequence) -> None:
        """Count the prompt once for all forks of it; observe its length for each of them."""
        if sequence.leader is None:
            self._prompt_tokens.inc(sequence.prompt_length)
            self.num_tokens += sequence.prompt_length
        self._prompt_length.observe(sequence.prompt_length)

    def tokens_delivered(
        self, first_token_latencies_s: list[float], inter_token_latencies_s: list[float], now_s: float
    ) -> None:
        num_tokens = len(first_token_latencies_s) + len(inter_token_latencies_s)
        self._generation_tokens.inc(num_tokens)
        self.num_tokens += num_tokens
        for latency_s in first_token_latencies_s:
            self._time_to_first_token.observe(latency_s)
        self._inter_token_latency.observe_all(inter_token_latencies_s)

    def tokens_reported(self, num_tokens: int) -> None:
        """Count tokens of a remote model that came without pieces of their own."""
        self._generation_tokens.inc(num_tokens)
        self.num_tokens += num_tokens

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        self._ended[reason].inc()
        # A sequence that never ran has waited until now. Leaving it out would flatter the figures of a long queue.
        scheduled_s = now_s if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        self._queue_time.observe(scheduled_s - sequence.arrival_s)
        self._e2e_request_latency.observe(now_s - sequence.arrival_s)
        self._output_length.observe(num_tokens)
        if first_token_s is not None and last_token_s is not None:
            self._prefill_time.observe(first_token_s - scheduled_s)
            self._decode_time.observe(last_token_s - first_token_s)
            if num_tokens > 1:
                self._time_per_output_token.observe((last_token_s - first_token_s) / (num_tokens - 1))


class StepMetrics(Observer):
    """Steps: their size, their duration, and what the main loop adds to it."""

    def __init__(self, metrics: _MetricFactory) -> None:
        self._idle_before_s = 0.0  # total of idle periods that are over
        self._idle_since_s: float | None = None
        self._lone_step: tuple[int, int, float] | None = None  # (epoch, step_id, sent_s) of a step that was alone
        self._steps = metrics.counter("scheduler_steps_total", "Steps executed.")
        self._iteration_tokens = metrics.histogram("iteration_tokens", "Tokens computed in a step.", _TOKEN_BUCKETS)
        self._step_duration = metrics.histogram(
            "step_duration_seconds", "Execution time of a step in the worker.", _STEP_BUCKETS
        )
        self._step_overhead = metrics.histogram(
            "step_overhead_seconds",
            "Time of a main loop iteration minus the execution of its step: the overhead that overlap does not hide.",
            _STEP_BUCKETS,
        )
        self._ipc_roundtrip = metrics.histogram(
            "ipc_roundtrip_seconds",
            "Time from sending a step to receiving its result, minus its execution: the cost of two queues, of waking "
            "two processes, and of the event loop. Measured only for steps sent while no other step was in flight, so "
            "there are few values under steady load.",
            _IPC_BUCKETS,
        )
        self._batch_size = metrics.gauge(
            "scheduler_batch_size", "Sequences in the newest step; 0 while the server is idle."
        )
        tokens = metrics.labelled_gauge(
            "scheduler_batch_tokens",
            "Tokens in the newest step by phase: decode for sequences that compute a single position and sample from "
            "it, prefill for the others.",
            "phase",
        )
        self._batch_decode_tokens = tokens.labels(*metrics.label_values, "decode")
        self._batch_prefill_tokens = tokens.labels(*metrics.label_values, "prefill")

    def step_sent(self, step: StepSummary, is_alone: bool, now_s: float) -> None:
        self._iteration_tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self._batch_size.set(step.num_sequences)
        self._batch_decode_tokens.set(step.num_decode_tokens)
        self._batch_prefill_tokens.set(step.num_prefill_tokens)
        if is_alone:
            self._lone_step = step.epoch, step.step_id, now_s

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        self._steps.inc()
        self._step_duration.observe(result.step_time_s)
        self._step_overhead.observe(max(0.0, loop_time_s - result.step_time_s))
        if self._lone_step is not None:
            epoch, step_id, sent_s = self._lone_step
            if (epoch, step_id) == (result.epoch, result.step_id):
                self._ipc_roundtrip.observe(max(0.0, now_s - sent_s - result.step_time_s))
                self._lone_step = None

    def idle_began(self, now_s: float) -> None:
        self._idle_since_s = now_s
        for gauge in (self._batch_size, self._batch_decode_tokens, self._batch_prefill_tokens):
            gauge.set(0)

    def idle_ended(self, now_s: float) -> None:
        self._idle_before_s = self.idle_s(now_s)
        self._idle_since_s = None

    def idle_s(self, now_s: float) -> float:
        """Seconds of idle time since the server began, up to now."""
        return self._idle_before_s + (0.0 if self._idle_since_s is None else now_s - self._idle_since_s)


class WorkerMetrics(Observer):
    """Workers: how many are alive, why they were replaced, and what was wrong with their memory accounts."""

    def __init__(self, metrics: _MetricFactory) -> None:
        self._alive = metrics.gauge("workers_alive", "Workers that have loaded the model and respond.")
        restarts = metrics.labelled_counter(
            "worker_restarts_total", "Workers that had to be replaced, by cause.", "cause"
        )
        self._restarts = {cause: restarts.labels(*metrics.label_values, cause) for cause in RESTART_CAUSES}
        self._recovery = metrics.histogram(
            "worker_recovery_seconds",
            "Time from detecting the loss of a worker until its replacement has loaded the model.",
            _RECOVERY_BUCKETS,
        )
        self._accounting_errors = metrics.counter(
            "accounting_faults_total",
            "Times that KV blocks or slots were leaked or assigned twice. Any increase is a bug of servekit.",
        )

    def worker_ready(self, recovery_time_s: float | None, now_s: float) -> None:
        self._alive.set(1)
        if recovery_time_s is not None:
            self._recovery.observe(recovery_time_s)

    def worker_lost(self, cause: str) -> None:
        self._alive.set(0)
        self._restarts[cause if cause in self._restarts else "other"].inc()

    def worker_start_failed(self) -> None:
        self._restarts["no_start"].inc()

    def accounting_error(self) -> None:
        self._accounting_errors.inc()


class OffloadMetrics(Observer):
    """KV blocks that leave the KV cache of one replica, and come back."""

    def __init__(self, metrics: _MetricFactory) -> None:
        self._stored = metrics.counter(
            "kv_offload_stored_blocks_total", "KV blocks that left the KV cache and were kept in the host's memory."
        )
        loaded = metrics.labelled_counter(
            "kv_offload_loaded_blocks_total",
            "KV blocks that were loaded instead of computed, by tier: memory or disk.",
            "tier",
        )
        self._loaded = {tier: loaded.labels(*metrics.label_values, tier) for tier in ("memory", "disk")}
        self._failed = metrics.counter(
            "kv_offload_failed_loads_total",
            "KV blocks that could not be loaded, because they had just been dropped or their file was damaged; they "
            "were computed.",
        )
        self._unwritten = metrics.counter(
            "kv_offload_unwritten_blocks_total",
            "KV blocks that were not written to kv_offload_dir, because the disk was too slow or full.",
        )
        size = metrics.labelled_gauge(
            "kv_offload_bytes", "Bytes of offloaded KV blocks, by tier: memory or disk.", "tier"
        )
        self._bytes = {tier: size.labels(*metrics.label_values, tier) for tier in ("memory", "disk")}

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        transfers = result.transfers
        if transfers is None:
            return
        self._stored.inc(transfers.num_stored)
        self._loaded["memory"].inc(transfers.num_loaded_from_memory)
        self._loaded["disk"].inc(transfers.num_loaded_from_disk)
        self._failed.inc(len(transfers.failed_loads))
        self._unwritten.inc(transfers.num_unwritten)
        self._bytes["memory"].set(transfers.num_in_memory * transfers.block_bytes)
        self._bytes["disk"].set(transfers.num_on_disk * transfers.block_bytes)


class TransferMetrics(Observer):
    """KV blocks that prefill replicas hand over to decode replicas."""

    def __init__(self, metrics: _MetricFactory) -> None:
        self._sent = metrics.counter(
            "kv_transfer_sent_blocks_total", "KV blocks that a prefill replica made loadable for decode replicas."
        )
        self._loaded = metrics.counter(
            "kv_transfer_loaded_blocks_total", "KV blocks that a decode replica loaded instead of computing them."
        )
        self._failed = metrics.counter(
            "kv_transfer_failed_loads_total",
            "KV blocks that a decode replica could not load, and computed: they were gone, or their copy was wrong.",
        )
        self._failed_fetches = metrics.counter(
            "kv_transfer_failed_fetches_total",
            "Transfers from another machine that a decode replica did not get, or not wholly; it tries again.",
        )

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        transfers = result.transfers
        if transfers is None:
            return
        self._sent.inc(transfers.num_sent)
        self._loaded.inc(transfers.num_received)
        self._failed.inc(len(transfers.failed_loads))

    def fetch_failed(self) -> None:
        """Count a transfer from another machine that failed."""
        self._failed_fetches.inc()


class JoinMetrics:
    """Workers that join: why connections to `--listen-workers` were refused."""

    def __init__(self, metrics: _MetricFactory) -> None:
        refusals = metrics.labelled_counter(
            "worker_joins_refused_total",
            "Connections to the address in listen_workers that did not become workers, by reason.",
            "reason",
        )
        self._refusals = {reason: refusals.labels(*metrics.label_values, reason) for reason in JOIN_REFUSALS}

    def refused(self, reason: str) -> None:
        """A connection was refused for one of JOIN_REFUSALS."""
        self._refusals[reason].inc()


class HttpMetrics:
    """HTTP requests. The API and the HTTP protocol update them."""

    def __init__(self, metrics: _MetricFactory) -> None:
        (self._model_name,) = metrics.label_values
        self._refusals = metrics.labelled_counter(
            "admission_rejections_total", "Requests refused before they were queued, by error code.", "reason"
        )
        self._refusals_by_code: dict[str, Counter] = {}
        self._requests = metrics.labelled_counter(
            "http_requests_total",
            "HTTP requests by route, method and status. Status 499: the client disconnected before its response began.",
            "handler",
            "method",
            "status",
        )

    def request_refused(self, code: str) -> None:
        """A request was refused with this error code."""
        if code not in self._refusals_by_code and len(self._refusals_by_code) >= _MAX_LABEL_VALUES:
            code = "other"
        if code not in self._refusals_by_code:
            self._refusals_by_code[code] = self._refusals.labels(self._model_name, code)
        self._refusals_by_code[code].inc()

    def request_ended(self, handler: str, method: str, status: int) -> None:
        """An HTTP request ended. The caller must keep the numbers of handlers and methods small."""
        self._requests.labels(self._model_name, handler, method, str(status)).inc()


class EngineMetrics:
    """One engine: its state and its settings."""

    def __init__(self, metrics: _MetricFactory, config: ServeConfig) -> None:
        self.is_draining = False  # a plain field: a signal handler sets it, and must not wait for a metric's lock
        draining = metrics.gauge(
            "draining", "1 while the server drains: it exits when all admitted requests are answered."
        )
        draining.set_function(lambda: float(self.is_draining))
        max_requests = metrics.gauge("num_requests_waiting_limit", "The setting max_num_queued_reqs.")
        max_requests.set(config.max_num_queued_reqs)
        max_tokens = metrics.gauge("num_tokens_waiting_limit", "The setting max_num_queued_tokens.")
        max_tokens.set(config.max_num_queued_tokens)
        exported = {name: str(getattr(config, name)) for name in _EXPORTED_SETTINGS}
        settings = metrics.labelled_gauge("config_info", "Settings of the scheduler.", *exported)
        settings.labels(*metrics.label_values, *exported.values()).set(1)


class ServerMetrics:
    """The server process: its event loop and its version."""

    def __init__(self, metrics: _MetricFactory, version: str) -> None:
        self.event_loop_lag = metrics.histogram(
            "api_event_loop_lag_seconds", "How late a timer of the event loop fires.", _STEP_BUCKETS
        )
        self.event_loop_tasks = metrics.gauge("api_event_loop_tasks", "Tasks of the event loops, in any state.")
        build = Gauge("servekit_build_info", "The running version.", ["version"], registry=metrics.registry)
        build.labels(version=version).set(1)


# Values of the label `outcome` of servekit_prediction_items_total.
PREDICTION_OUTCOMES = ("computed", "aborted", "expired", "failed")


# Values of the label `result` of servekit_remote_requests_total, and of `state` of servekit_remote_breaker_state.
REMOTE_RESULTS = ("answered", "refused", "busy", "failed", "timeout", "unreachable", "aborted")
BREAKER_STATES = ("closed", "open", "half_open")


class RemoteMetrics:
    """Requests to the server of a remote model: how they end, how many are repeated, and whether any are sent."""

    def __init__(self, metrics: _MetricFactory) -> None:
        requests = metrics.labelled_counter(
            "remote_requests_total", "Requests to the server of a remote model, repeated ones too, by result.", "result"
        )
        self._requests = {result: requests.labels(*metrics.label_values, result) for result in REMOTE_RESULTS}
        self._retries = metrics.counter("remote_retries_total", "Requests to the server that repeated a failed one.")
        self._exhausted = metrics.counter(
            "remote_retry_budget_exhausted_total", "Failed requests that were not repeated, for lack of retry budget."
        )
        self._rejections = metrics.counter(
            "remote_breaker_rejections_total",
            "Requests that were not sent, because their tenant's circuit breaker was open.",
        )
        self._transitions = metrics.counter(
            "remote_breaker_opened_total", "Times that the circuit breaker of a tenant opened."
        )
        self._answer_start = metrics.histogram(
            "remote_answer_start_seconds", "Time from sending a request to the beginning of the server's response."
        )

    def request_ended(self, result: str) -> None:
        self._requests[result].inc()

    def answer_began(self, waited_s: float) -> None:
        self._answer_start.observe(waited_s)

    def retried(self) -> None:
        self._retries.inc()

    def retry_refused(self) -> None:
        self._exhausted.inc()

    def rejected(self) -> None:
        self._rejections.inc()

    def breaker_opened(self) -> None:
        self._transitions.inc()


class RemoteStats(Struct, frozen=True):
    """The state of the engine of a remote model at one moment."""

    breaker: str  # closed, open or half_open
    num_connections: int  # requests that are being answered, or repeated
    num_waiting: int  # requests that wait for a connection


class _RemoteCollector(Collector):
    """Reads the state of the engine of a remote model when Prometheus scrapes."""

    def __init__(self, model_name: str, read_stats: Callable[[], RemoteStats]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        gauges = {
            "num_connections": (stats.num_connections, "Requests that the server of a remote model is answering."),
            "num_waiting": (stats.num_waiting, "Requests that wait for a connection to the server of a remote model."),
        }
        for name, (value, text) in gauges.items():
            gauge = GaugeMetricFamily(f"servekit_remote_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        state = GaugeMetricFamily(
            "servekit_remote_breaker_state",
            "1 for the state of the circuit breaker that opened last, or whose tenant was answered since.",
            labels=["model_name", "state"],
        )
        for each in BREAKER_STATES:
            state.add_metric([self._model_name, each], float(each == stats.breaker))
        yield state


class PredictionMetrics:
    """Items of embedders, rerankers and classifiers: how many, how fast, and in which batches."""

    def __init__(self, metrics: _MetricFactory) -> None:
        items = metrics.labelled_counter(
            "prediction_items_total",
            "Inputs to an embedder, a reranker or a classifier that ended, by outcome.",
            "outcome",
        )
        self._items = {outcome: items.labels(*metrics.label_values, outcome) for outcome in PREDICTION_OUTCOMES}
        self._admitted = metrics.counter("prediction_items_admitted_total", "Inputs that were admitted.")
        self._tokens = metrics.counter("prediction_tokens_total", "Tokens of admitted inputs.")
        self._computed_tokens = metrics.counter(
            "prediction_computed_tokens_total",
            "Tokens that workers computed, those of padding and of repeats included.",
        )
        self._latency = metrics.histogram(
            "prediction_latency_seconds", "Time from the arrival of an input to its end, for any outcome."
        )
        self._queue_time = metrics.batch_histogram(
            "prediction_queue_time_seconds", "Time from the arrival of an input to its batch, tokenization included."
        )
        self._batch_items = metrics.histogram("prediction_batch_items", "Inputs of a batch.", _TOKEN_BUCKETS[:12])
        self._batch_duration = metrics.histogram(
            "prediction_batch_duration_seconds", "Execution time of a batch in the worker.", _STEP_BUCKETS
        )

    def admitted(self, num_items: int, num_tokens: int) -> None:
        self._admitted.inc(num_items)
        self._tokens.inc(num_tokens)

    def batch_sent(self, num_items: int, waited_s: list[float]) -> None:
        self._batch_items.observe(num_items)
        self._queue_time.observe_all(waited_s)

    def batch_done(self, duration_s: float, num_computed_tokens: int) -> None:
        self._batch_duration.observe(duration_s)
        self._computed_tokens.inc(num_computed_tokens)

    def ended(self, outcome: str, latency_s: float) -> None:
        """An input ended, with one of PREDICTION_OUTCOMES."""
        self._items[outcome].inc()
        self._latency.observe(latency_s)


class PredictorStats(Struct, frozen=True, kw_only=True):
    """The state of a dynamic batcher at one moment."""

    num_waiting: int
    num_waiting_tokens: int
    num_in_flight: int
    num_suspects: int
    num_stale_results: int


class _PredictorCollector(Collector):
    """Metrics of the dynamic batcher's state, read at each scrape."""

    def __init__(self, model_name: str, read_stats: Callable[[], PredictorStats]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        gauges = {
            "items_waiting": ("Inputs that wait for a batch.", stats.num_waiting),
            "tokens_waiting": ("Tokens of inputs that wait for a batch, with padding.", stats.num_waiting_tokens),
            "batches_in_flight": ("Batches that were sent to the worker and not returned.", stats.num_in_flight),
            "items_suspected": (
                "Inputs that are computed alone, because workers were lost while they computed them.",
                stats.num_suspects,
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"servekit_prediction_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        stale = CounterMetricFamily(
            "servekit_prediction_stale_results",
            "Results of batches that were dropped, because they were repeated or came from a lost worker.",
            labels=["model_name"],
        )
        stale.add_metric([self._model_name], stats.num_stale_results)
        yield stale


class SchedulerStats(Struct, frozen=True, kw_only=True):
    """The state of a workload manager at one moment, as far as metrics need it."""

    now_s: float
    num_running: int
    num_waiting: int
    num_followers: int  # the part of `num_waiting` that waits for its leader's prompt
    num_waiting_tokens: int
    num_preemptions: int
    num_share_preemptions: int
    num_stale_results: int
    num_deferrals: int
    num_blocks: int
    num_free_blocks: int  # includes cached blocks: they are evicted when a sequence needs them
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_limit: int
    step_token_limit: int
    num_quarantined: int
    predicted_wait_s: float  # of a sequence that comes now
    step_time_error: float  # mean relative error of the predicted times of recent steps
    num_predicted_first_tokens: int
    num_first_tokens_in_band: int  # of these
    first_token_error: float  # median relative error of recent ones
    end_error: float  # the same of last tokens


class _SchedulerCollector(Collector):
    """Metrics of the scheduler's state, read at each scrape, so that steps spend nothing on gauges."""

    def __init__(
        self,
        model_name: str,
        block_size: int,
        read_stats: Callable[[], list[SchedulerStats]],
        idle_s: Callable[[int, float], float],
    ) -> None:
        """`read_stats` gives the state of each replica, `idle_s` how long one was idle until now."""
        self._model_name = model_name
        self._block_size = block_size
        self._read_stats = read_stats
        self._idle_s = idle_s
        self._labels = [model_name, ""]  # of the replica that is exported

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        replicas = self._read_stats()
        for replica, stats in enumerate(replicas):
            self._labels = [self._model_name, str(replica)]
            for family in self._collect_one(stats, self._idle_s(replica, stats.now_s)):
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()
        yield from self._collect_all(replicas)

    def _collect_all(self, replicas: list[SchedulerStats]) -> Iterator[Metric]:
        """Yield what the model-server protocol of the Gateway API inference extension asks for.

        An endpoint picker reads one sample of each metric, so these are of all replicas together.
        """
        num_blocks = sum(stats.num_blocks for stats in replicas)
        num_free = sum(stats.num_free_blocks for stats in replicas)
        for name, text, value in (
            (
                "total_queued_requests",
                "Sequences in the waiting queues of all replicas, for endpoint pickers.",
                sum(stats.num_waiting for stats in replicas),
            ),
            (
                "total_running_requests",
                "Sequences that run in all replicas, for endpoint pickers.",
                sum(stats.num_running for stats in replicas),
            ),
            (
                "kv_cache_utilization",
                "Fraction of the KV blocks of all replicas in use, 0 to 1, for endpoint pickers.",
                1.0 - num_free / num_blocks if num_blocks else 0.0,
            ),
        ):
            family = GaugeMetricFamily(f"servekit_{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family
        cache = GaugeMetricFamily(
            "servekit_cache_config_info",
            "The KV cache of all replicas, with vLLM's labels, for endpoint pickers.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        cache.add_metric([self._model_name, str(self._block_size), str(num_blocks)], 1)
        yield cache

    def _collect_one(self, stats: SchedulerStats, idle_s: float) -> Iterator[Metric]:
        """Yield the metrics of one replica."""
        yield from self._collect_sequences(stats)
        yield from self._collect_memory(stats)
        yield from self._collect_limits(stats)
        yield from self._collect_predictions(stats)
        yield from self._collect_counts(stats)
        yield self._counter("scheduler_idle_seconds", "Seconds in which the main loop had nothing to do.", idle_s)

    def _collect_sequences(self, stats: SchedulerStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Sequences that hold a slot and KV blocks.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Sequences in the waiting queue.", stats.num_waiting)
        reasons = GaugeMetricFamily(
            "servekit_num_requests_waiting_by_reason",
            "Waiting sequences by what they wait for: a slot or KV memory (capacity), or the prompt that another "
            "answer to the same request still has to compute (deferred).",
            labels=["model_name", "replica", "reason"],
        )
        reasons.add_metric([*self._labels, "capacity"], stats.num_waiting - stats.num_followers)
        reasons.add_metric([*self._labels, "deferred"], stats.num_followers)
        yield reasons
        yield self._gauge(
            "num_tokens_waiting", "Prompt tokens of sequences that wait for their first step.", stats.num_waiting_tokens
        )

    def _collect_memory(self, stats: SchedulerStats) -> Iterator[Metric]:
        used = 1.0 - stats.num_free_blocks / stats.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1.", used)
        yield self._gauge("kv_blocks_total", "KV blocks in the pool.", stats.num_blocks)
        yield self._gauge(
            "kv_blocks_free", "KV blocks that can be allocated, cached ones included.", stats.num_free_blocks
        )

    def _collect_limits(self, stats: SchedulerStats) -> Iterator[Metric]:
        yield self._gauge("prefill_limit_tokens", "Prefill tokens that the next step may compute.", stats.prefill_limit)
        yield self._gauge(
            "step_token_limit",
            "Tokens that a step may compute. It falls below max_num_batched_tokens after an out-of-memory step.",
            stats.step_token_limit,
        )
        yield self._gauge(
            "num_requests_suspected",
            "Quarantined sequences: they run one at a time, because workers crashed while they ran.",
            stats.num_quarantined,
        )

    def _collect_predictions(self, stats: SchedulerStats) -> Iterator[Metric]:
        yield self._gauge(
            "predicted_wait_seconds",
            "Predicted seconds that a request which comes now waits before it starts; the limit is max_predicted_wait.",
            stats.predicted_wait_s,
        )
        yield self._gauge(
            "step_time_error_ratio",
            "Mean relative error with which the times of recent steps were predicted.",
            stats.step_time_error,
        )
        yield self._counter(
            "predicted_first_tokens",
            "First tokens that came after they had been predicted. One request is predicted at a time.",
            stats.num_predicted_first_tokens,
        )
        yield self._counter(
            "predicted_first_tokens_in_band",
            "The part of predicted_first_tokens that came within the band in which 80 % are expected.",
            stats.num_first_tokens_in_band,
        )
        yield self._gauge(
            "first_token_prediction_error_ratio",
            "Median relative error of the predicted time to the first token, over the last 256 predictions.",
            stats.first_token_error,
        )
        yield self._gauge(
            "end_prediction_error_ratio",
            "Median relative error of the predicted time to the last token, over the last 256 predictions.",
            stats.end_error,
        )

    def _collect_counts(self, stats: SchedulerStats) -> Iterator[Metric]:
        yield self._counter(
            "num_preemptions", "Times that a running sequence lost its slot and its KV blocks.", stats.num_preemptions
        )
        yield self._counter(
            "num_share_preemptions",
            "Preemptions for another tenant's share of slots or KV blocks (policy fair); part of num_preemptions.",
            stats.num_share_preemptions,
        )
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.num_prompt_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens)
        yield self._counter(
            "prompt_tokens_cached",
            "Deprecated alias of servekit_prefix_cache_hits_total; it has the same value.",
            stats.num_cached_tokens,
        )
        yield self._counter(
            "stale_results",
            "Worker results dropped because they were repeated, or belong to a step of a lost worker.",
            stats.num_stale_results,
        )
        yield self._counter(
            "deferred_tokens",
            "Times that a worker sampled no token for a sequence, because its grammar's mask was not ready, and left "
            "that to a later step.",
            stats.num_deferrals,
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"servekit_{name}", text, labels=["model_name", "replica"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"servekit_{name}", text, labels=["model_name", "replica"])
        family.add_metric(self._labels, value)
        return family


class _DraftCollector(Collector):
    """What speculative decoding has drafted, read at each scrape. A server without it does not export these metrics."""

    def __init__(self, model_name: str, drafter: str, read_counts: Callable[[], list[DraftLengths]]) -> None:
        """`read_counts` gives the counts of each replica."""
        self._model_name = model_name
        self._drafter = drafter
        self._read_counts = read_counts

    def collect(self) -> Iterator[Metric]:
        drafts = self._counter(
            "spec_decode_num_drafts",
            "Times that a step verified drafts of a sequence. Each gave a token, and one more for each accepted draft.",
        )
        draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafts that were verified.")
        accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Drafts that were accepted.")
        drafts_at = self._counter(
            "spec_decode_num_draft_tokens_per_pos",
            "Drafts that were verified, by position: 0 is the first.",
            "position",
        )
        accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts that were accepted, by position.", "position"
        )
        for replica, counts in enumerate(self._read_counts()):
            labels = [self._model_name, str(replica), self._drafter]
            drafts.add_metric(labels, counts.num_spans)
            draft_tokens.add_metric(labels, sum(counts.num_drafted))
            accepted_tokens.add_metric(labels, sum(counts.num_accepted))
            for position, num_drafted in enumerate(counts.num_drafted):
                drafts_at.add_metric([*labels, str(position)], num_drafted)
                accepted_at.add_metric([*labels, str(position)], counts.num_accepted[position])
        yield from (drafts, draft_tokens, accepted_tokens, drafts_at, accepted_at)

    @staticmethod
    def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"servekit_{name}", text, labels=["model_name", "replica", "drafter", *labels])


class AdapterUsage(NamedTuple):
    """The LoRA adapters that requests may name, and those that have requests."""

    num_adapters: int
    num_waiting: int  # requests that wait for a place for their adapter
    in_use: dict[str, int]  # requests of each adapter that has some, by its name
    waiting: tuple[str, ...] = ()  # the adapters of those that wait


class AdapterMetrics(Observer):
    """Sequences and tokens of LoRA adapters, and what workers read."""

    def __init__(self, metrics: _MetricFactory) -> None:
        self._families = (
            metrics.labelled_counter("lora_requests_total", "Sequences of a LoRA adapter that ended.", "adapter"),
            metrics.labelled_counter(
                "lora_prompt_tokens_total", "Prompt tokens of sequences of a LoRA adapter.", "adapter"
            ),
            metrics.labelled_counter(
                "lora_generation_tokens_total", "Tokens generated for sequences of a LoRA adapter.", "adapter"
            ),
        )
        self._reads = metrics.counter("lora_reads_total", "LoRA adapters that a worker read into its memory.")
        self._evictions = metrics.counter(
            "lora_evictions_total", "LoRA adapters that were evicted from a worker's memory for another one."
        )
        self._label_values = metrics.label_values
        self._of_adapters: dict[str, tuple[Counter, Counter, Counter]] = {}

    def sequence_ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        num_tokens: int,
        first_token_s: float | None,
        last_token_s: float | None,
        now_s: float,
    ) -> None:
        if sequence.adapter is None:
            return
        requests, prompt_tokens, generation_tokens = self.label(sequence.adapter.name)
        requests.inc()
        generation_tokens.inc(num_tokens)
        if sequence.leader is None:
            prompt_tokens.inc(sequence.prompt_length)

    def step_done(self, result: StepResult, num_tokens: int, loop_time_s: float, now_s: float) -> None:
        self._reads.inc(result.num_adapter_reads)
        self._evictions.inc(result.num_adapter_evictions)

    def label(self, name: str) -> tuple[Counter, Counter, Counter]:
        """Return the counters of an adapter. There may be thousands, so those after the first ones share some."""
        if name not in self._of_adapters and len(self._of_adapters) >= _MAX_LABEL_VALUES:
            name = "(other)"  # no adapter can have this name
        if name not in self._of_adapters:
            requests, prompt_tokens, generation_tokens = (
                family.labels(*self._label_values, name) for family in self._families
            )
            self._of_adapters[name] = requests, prompt_tokens, generation_tokens
        return self._of_adapters[name]


class _AdapterCollector(Collector):
    """The loaded LoRA adapters, read at each scrape. A server without them does not export these metrics."""

    def __init__(
        self, model_name: str, max_loras: int, read_usage: Callable[[], AdapterUsage], now_s: Callable[[], float]
    ) -> None:
        self._model_name = model_name
        self._max_loras = max_loras
        self._read_usage = read_usage
        self._now_s = now_s

    def collect(self) -> Iterator[Metric]:
        usage = self._read_usage()
        info = GaugeMetricFamily(
            "servekit_lora_requests_info",
            "The LoRA adapters that have requests, and those for which requests wait, with vLLM's labels, for endpoint "
            "pickers. The value is the time of the scrape.",
            labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = (",".join(sorted(each)) for each in (usage.in_use, usage.waiting))
        info.add_metric([self._model_name, str(self._max_loras), *names], self._now_s())
        yield info
        for name, text, value in (
            ("lora_adapters", "LoRA adapters that requests may name.", usage.num_adapters),
            ("lora_adapters_in_use", "LoRA adapters that have requests.", len(usage.in_use)),
            ("lora_requests_waiting", "Requests that wait for a place for their adapter.", usage.num_waiting),
        ):
            family = GaugeMetricFamily(f"servekit_{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family


class QueueUsage(NamedTuple):
    """How much of the waiting queue is used, 0 to 1."""

    sequences: float
    tokens: float


class _QueueCollector(Collector):
    """How full the waiting queue is, read at each scrape."""

    def __init__(self, model_name: str, read_usage: Callable[[], QueueUsage]) -> None:
        self._model_name = model_name
        self._read_usage = read_usage

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "servekit_queue_usage_perc",
            "Fraction of the waiting queue in use, 0 to 1: of its places (sequences) and of its prompt tokens, with "
            "requests in preparation. With scheduling_policy fair: the fraction of its share that the fullest tenant "
            "uses. At 1, requests are refused.",
            labels=["model_name", "resource"],
        )
        for resource, value in self._read_usage()._asdict().items():
            family.add_metric([self._model_name, resource], value)
        yield family


class _CostCollector(Collector):
    """What the devices cost, read at each scrape. A server without a price does not export these metrics."""

    def __init__(self, model_name: str, read_cost: Callable[[], Cost]) -> None:
        self._model_name = model_name
        self._read_cost = read_cost

    def collect(self) -> Iterator[Metric]:
        cost = self._read_cost()
        total = CounterMetricFamily(
            "servekit_cost", "What the devices have cost, in the currency of price_per_hour.", labels=["model_name"]
        )
        total.add_metric([self._model_name], cost.total)
        yield total
        for name, text, value in (
            ("cost_per_hour", "What the devices that are in use cost in an hour.", cost.per_hour),
            (
                "cost_per_million_tokens",
                "What a million tokens of prompts and answers cost, as the mean of the last hour. Missing without "
                "tokens.",
                cost.per_million_tokens,
            ),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"servekit_{name}", text, labels=["model_name"])
                gauge.add_metric([self._model_name], value)
                yield gauge


class _LogCollector(Collector):
    """The log's only metric, read at each scrape: a log call must not wait for a metric's lock."""

    def __init__(self, model_name: str, num_dropped_lines: Callable[[], int]) -> None:
        self._model_name = model_name
        self._num_dropped_lines = num_dropped_lines

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "servekit_log_lines_dropped",
            "Log lines of the server's own processes that were dropped, because standard error was not read or could "
            "not be written.",
            labels=["model_name"],
        )
        family.add_metric([self._model_name], self._num_dropped_lines())
        yield family


class ModelMetrics:
    """All metrics of one model, by group. They outlive the model's engine: counts go on when it is loaded again."""

    def __init__(self, config: ServeConfig) -> None:
        self.registry = CollectorRegistry()
        self._config = config
        self._model_name = config.model_name
        metrics = _MetricFactory(self.registry, config.model_name)
        self._factory = metrics
        self._watched: list[Collector] = []  # what reads the state of an engine
        self.requests = RequestMetrics(metrics)
        self._replicas: list[tuple[StepMetrics, WorkerMetrics]] = []
        self._offloading: list[OffloadMetrics] = []  # of the replicas
        self._transfers: list[TransferMetrics] = []  # of the replicas
        self.steps, self.workers = self.of_replica(0)
        self.joins = JoinMetrics(metrics)
        self.http = HttpMetrics(metrics)
        self.engine = EngineMetrics(metrics, config)

    def of_replica(self, index: int) -> tuple[StepMetrics, WorkerMetrics]:
        """The groups that the events of one replica update."""
        while len(self._replicas) <= index:
            factory = self._factory.of_replica(len(self._replicas))
            self._replicas.append((StepMetrics(factory), WorkerMetrics(factory)))
        return self._replicas[index]

    def transfers(self, index: int) -> TransferMetrics:
        """The metrics of the blocks that a replica sends and loads; a server whose replicas do both has none."""
        while len(self._transfers) <= index:
            self._transfers.append(TransferMetrics(self._factory.of_replica(len(self._transfers))))
        return self._transfers[index]

    def offloading(self, index: int) -> OffloadMetrics:
        """The metrics of a replica's offloaded blocks; a server without any does not export them."""
        while len(self._offloading) <= index:
            self._offloading.append(OffloadMetrics(self._factory.of_replica(len(self._offloading))))
        return self._offloading[index]

    def watch(self, collector: Collector) -> None:
        """Export what `collector` reads of an engine at each scrape, until `forget_engine`."""
        self._watched.append(collector)
        self.registry.register(collector)

    def forget_engine(self) -> None:
        """Read the engine's state no more: it has ended."""
        while self._watched:
            self.registry.unregister(self._watched.pop())

    def watch_scheduler(self, read_stats: Callable[[], list[SchedulerStats]]) -> None:
        """Export what `read_stats` returns for each replica at each scrape."""
        collector = _SchedulerCollector(
            self._model_name,
            self._config.block_size,
            read_stats,
            lambda replica, now_s: self.of_replica(replica)[0].idle_s(now_s),
        )
        self.watch(collector)

    def watch_predictor(self, read_stats: Callable[[], PredictorStats]) -> None:
        """Export what `read_stats` returns at each scrape."""
        self.watch(_PredictorCollector(self._model_name, read_stats))

    @cached_property
    def predictions(self) -> PredictionMetrics:
        """The metrics of a predictor; a server without one does not export them."""
        return PredictionMetrics(self._factory)

    @cached_property
    def adapters(self) -> AdapterMetrics:
        """The metrics of LoRA adapters; a server without any does not export them."""
        return AdapterMetrics(self._factory)

    def watch_adapters(self, read_usage: Callable[[], AdapterUsage], now_s: Callable[[], float]) -> None:
        """Export what `read_usage` returns at each scrape. `now_s` returns seconds since 1970."""
        self.watch(_AdapterCollector(self._model_name, self._config.max_loras, read_usage, now_s))

    @cached_property
    def remote(self) -> RemoteMetrics:
        """The metrics of a remote model; a server without one does not export them."""
        return RemoteMetrics(self._factory)

    def watch_remote(self, read_stats: Callable[[], RemoteStats]) -> None:
        """Export what `read_stats` returns at each scrape."""
        self.watch(_RemoteCollector(self._model_name, read_stats))

    def watch_drafts(self, drafter: str, read_counts: Callable[[], list[DraftLengths]]) -> None:
        """Export what `read_counts` returns for each replica at each scrape. `drafter` is who makes the drafts."""
        self.watch(_DraftCollector(self._model_name, drafter, read_counts))

    def watch_cost(self, read_cost: Callable[[], Cost]) -> None:
        """Export what `read_cost` returns at each scrape."""
        self.watch(_CostCollector(self._model_name, read_cost))

    def watch_queue(self, read_usage: Callable[[], QueueUsage]) -> None:
        """Export what `read_usage` returns at each scrape."""
        self.watch(_QueueCollector(self._model_name, read_usage))


class Metrics(ModelMetrics):
    """All metrics of a server with one model, by group."""

    def __init__(self, config: ServeConfig, version: str) -> None:
        super().__init__(config)
        self.server = ServerMetrics(self._factory, version)

    def watch_log(self, num_dropped_lines: Callable[[], int]) -> None:
        """Export what `num_dropped_lines` returns at each scrape."""
        self.registry.register(_LogCollector(self._model_name, num_dropped_lines))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _AllRegistries:
    """The metrics of several registries, each family once, with the samples of all."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                if families.setdefault(family.name, family) is not family:
                    families[family.name].samples += family.samples
        yield from families.values()


_LOAD_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)

# Values of the label `start` of servekit_model_wait_seconds, and of `state` of servekit_model_state.
WAITS = ("hot", "warm", "cold")
COPIES = ("answered", "failed", "dropped")
MODEL_STATES = ("cold", "waiting", "loading", "ready", "unloading", "failed")


def _is(read_state: Callable[[], str], state: str) -> float:
    return float(read_state() == state)


class LoadMetrics:
    """Loading and unloading of one model of several."""

    def __init__(
        self,
        metrics: ModelMetrics,
        read_state: Callable[[], str],
        read_uses: Callable[[], int],
        read_memory: Callable[[], int],
    ) -> None:
        """The functions are called at each scrape."""
        factory = metrics._factory
        self._load = factory.histogram("model_load_seconds", "Time to load the model.", _LOAD_BUCKETS)
        loads = factory.labelled_counter("model_loads_total", "Times that the model was loaded, by result.", "result")
        self._loads = {each: loads.labels(*factory.label_values, each) for each in ("loaded", "failed")}
        self._unloads = factory.counter("model_unloads_total", "Times that the model was unloaded.")
        self._refusals = factory.counter(
            "model_load_refusals_total", "Requests refused because the model would not have been loaded soon enough."
        )
        waits = factory.labelled_histogram(
            "model_wait_seconds",
            "Time that a request waited for its model. hot: it was loaded; warm: another request had begun to load it; "
            "cold: this request made it wait for its turn to be loaded.",
            _LOAD_BUCKETS,
            "start",
        )
        self._waits = {each: waits.labels(*factory.label_values, each) for each in WAITS}
        states = factory.labelled_gauge("model_state", "1 for the state that the model is in.", "state")
        for each in MODEL_STATES:
            states.labels(*factory.label_values, each).set_function(partial(_is, read_state, each))
        uses = factory.gauge("model_uses", "Requests that use the model; while there are any, it stays loaded.")
        uses.set_function(lambda: float(read_uses()))
        memory = factory.gauge(
            "model_memory_bytes", "Memory that is counted for the loaded model, on all devices together."
        )
        memory.set_function(lambda: float(read_memory()))

        copies = factory.labelled_counter(
            "mirrored_requests_total",
            "Copies of requests that an alias sends to the model, by result. dropped: requests waited, "
            "the model was not loaded, or too many were in flight.",
            "result",
        )
        self._copies = {each: copies.labels(*factory.label_values, each) for each in COPIES}

    def mirrored(self, result: str) -> None:
        """A copy of a request has ended; one of COPIES."""
        self._copies[result].inc()

    def loaded(self, duration_s: float) -> None:
        """The model was loaded."""
        self._load.observe(duration_s)
        self._loads["loaded"].inc()

    def load_failed(self) -> None:
        """The model could not be loaded."""
        self._loads["failed"].inc()

    def unloaded(self) -> None:
        """The model was unloaded."""
        self._unloads.inc()

    def refused(self) -> None:
        """A request was refused because it would have waited too long."""
        self._refusals.inc()

    def waited(self, start: str, duration_s: float) -> None:
        """A request uses the model after a wait; one of WAITS."""
        self._waits[start].observe(duration_s)


class SeveralModelsMetrics:
    """The metrics of a server with several models: its own, which have an empty model_name, and those of each model."""

    def __init__(self, version: str, read_models: Callable[[], Iterable[ModelMetrics]]) -> None:
        """`read_models` is called at each scrape."""
        self.registry = CollectorRegistry()
        self._read_models = read_models
        factory = _MetricFactory(self.registry, "")
        self.server = ServerMetrics(factory, version)
        self.http = HttpMetrics(factory)

    def watch_log(self, num_dropped_lines: Callable[[], int]) -> None:
        """Export what `num_dropped_lines` returns at each scrape."""
        self.registry.register(_LogCollector("", num_dropped_lines))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        registries = [self.registry, *(each.registry for each in self._read_models())]
        return generate_latest(cast(CollectorRegistry, _AllRegistries(registries)))
