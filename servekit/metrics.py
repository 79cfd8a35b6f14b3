"""What operators watch, as Prometheus metrics.

Names follow vLLM's suffixes under `servekit_`, so dashboards convert by replacing the prefix. Labels are bounded: a
model's name and closed sets, never a request or a user. docs/operations.md has a table of all of them, made from here.

Who observes says when: nothing here reads a clock. Children of labelled metrics are bound once, because looking one up
costs more than counting with it; and so they are there, with 0, before anything happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from servekit.config import ServeConfig
from servekit.live_view import LiveStep
from servekit.messages import StepResult
from servekit.sequence import FinishReason, Sequence

disable_created_metrics()  # the time at which each of them was made: as many series again, of which nobody asks

# vLLM's buckets start at 10 ms between tokens, too coarse for small models.
_LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_TOKEN_BUCKETS = tuple(float(2**exponent) for exponent in range(18))
_STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_IPC_BUCKETS = (0.0001, 0.00025, *_STEP_BUCKETS)
_RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# Why a worker was replaced.
RESTART_CAUSES = ("ended", "step_timeout", "silence", "garbage", "failed", "no_start", "other")

# Settings that a dashboard wants beside its curves.
_TOLD_SETTINGS = (
    *("dtype", "device", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight"),
    *("enable_prefix_caching", "scheduling_policy", "itl_target_ms"),
)

_MOST_VALUES = 100  # of a label whose values come from the code, but from no closed set


class Snapshot(Struct, frozen=True, kw_only=True):
    """What the workload manager holds at this moment."""

    now_s: float
    num_running: int
    num_waiting: int
    num_deferred: int  # of those who wait: for their leader's prompt
    num_waiting_tokens: int
    num_preemptions: int
    num_stale_results: int
    num_blocks: int
    num_free_blocks: int  # cached ones included: they hold nothing that somebody needs
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_limit: int


class _SnapshotCollector(Collector):
    """Reads the manager when somebody asks, so that a step spends nothing on gauges."""

    def __init__(self, model_name: str, take: Callable[[], Snapshot], idle_s: Callable[[float], float]) -> None:
        self._model_name = model_name
        self._take = take
        self._idle_s = idle_s

    def collect(self) -> Iterator[Metric]:
        now = self._take()
        used = 1.0 - now.num_free_blocks / now.num_blocks
        yield self._gauge("num_requests_running", "Sequences that hold KV blocks.", now.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait for their turn.", now.num_waiting)
        reasons = GaugeMetricFamily(
            "servekit_num_requests_waiting_by_reason",
            "The same by what they wait for: a seat or memory (capacity), or the prompt that they share with another "
            "answer to the same request, which has yet to compute it (deferred).",
            labels=["model_name", "reason"],
        )
        reasons.add_metric([self._model_name, "capacity"], now.num_waiting - now.num_deferred)
        reasons.add_metric([self._model_name, "deferred"], now.num_deferred)
        yield reasons
        yield self._gauge(
            "num_tokens_waiting", "Prompt tokens of sequences that wait for their first step.", now.num_waiting_tokens
        )
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used)
        yield self._gauge("kv_blocks_total", "KV blocks in the pool.", now.num_blocks)
        yield self._gauge("kv_blocks_free", "KV blocks that a sequence can have.", now.num_free_blocks)
        yield self._gauge("prefill_limit_tokens", "Prefill that the next step may carry.", now.prefill_limit)
        yield self._counter("num_preemptions", "Times a sequence lost its blocks to an older one.", now.num_preemptions)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", now.num_prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", now.num_cached_tokens)
        yield self._counter(
            "prompt_tokens_cached", "Prompt tokens that were not computed; the same figure.", now.num_cached_tokens
        )
        yield self._counter("stale_results", "Worker results that nobody awaited, dropped.", now.num_stale_results)
        yield self._counter(
            "scheduler_idle_seconds", "Seconds in which there was nothing to do.", self._idle_s(now.now_s)
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"servekit_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"servekit_{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class Metrics:
    """All metrics of one server. The engine writes them, and beside it who counts HTTP requests and measures lag."""

    def __init__(self, config: ServeConfig, version: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = config.model_name
        self._idle_before_s = 0.0  # in periods that are over
        self._idle_since_s: float | None = None
        self._lone_step: tuple[int, int, float] | None = None  # (epoch, step_id, sent): no other was with the worker

        # -- requests and tokens
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of admitted sequences.")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens generated.")
        finished = self._labelled_counter(
            "request_success_total",
            "Sequences that ended, by reason: aborts, deadlines and errors, too.",
            "finished_reason",
        )
        self._finished = {reason: finished.labels(self._model_name, str(reason)) for reason in FinishReason}
        self._refused = self._labelled_counter(
            "admission_rejections_total", "Requests refused at the door, by error code.", "reason"
        )
        self._refusals: dict[str, Counter] = {}
        self._http_requests = self._labelled_counter(
            "http_requests_total",
            "Requests by route, method and status; 499 is a client that left before its answer began.",
            *("handler", "method", "status"),
        )
        self._time_to_first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._inter_token_latency = self._histogram("inter_token_latency_seconds", "Between two tokens of a sequence.")
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "A sequence's mean time between two of its tokens."
        )
        self._e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end, whatever it was."
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the first step, with the making ready of the prompt."
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token, of those that got one."
        )
        self._decode_time = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt length.", _TOKEN_BUCKETS)
        self._output_length = self._histogram("request_generation_tokens", "Output length.", _TOKEN_BUCKETS)

        # -- steps
        self._steps = self._counter("scheduler_steps_total", "Steps executed.")
        self._iteration_tokens = self._histogram("iteration_tokens", "Tokens computed in a step.", _TOKEN_BUCKETS)
        self._step_duration = self._histogram(
            "step_duration_seconds", "Execution of a step in the worker.", _STEP_BUCKETS
        )
        self._step_overhead = self._histogram(
            "step_overhead_seconds", "A turn of the main loop less the step: what overlap does not hide.", _STEP_BUCKETS
        )
        self._ipc_roundtrip = self._histogram(
            "ipc_roundtrip_seconds",
            "From sending a step to taking in its result, less its execution: what two queues, two processes' waking "
            "up and the event loop cost. Only of steps sent while the worker had no other, so few under steady load.",
            _IPC_BUCKETS,
        )
        self._batch_size = self._gauge(
            "scheduler_batch_size", "Sequences in the newest step; 0 while there is nothing to do."
        )
        tokens = Gauge(
            "servekit_scheduler_batch_tokens",
            "Tokens in the newest step: of sequences that compute a single position and sample from it (decode), and "
            "of the others (prefill).",
            ["model_name", "phase"],
            registry=self.registry,
        )
        self._batch_decodes = tokens.labels(self._model_name, "decode")
        self._batch_prefill = tokens.labels(self._model_name, "prefill")

        # -- workers
        self.workers_alive = self._gauge("workers_alive", "Workers that have the model loaded and answer.")
        restarts = self._labelled_counter(
            "worker_restarts_total", "Workers that had to be replaced, by cause.", "cause"
        )
        self._restarts = {cause: restarts.labels(self._model_name, cause) for cause in RESTART_CAUSES}
        self.worker_recovery = self._histogram(
            "worker_recovery_seconds",
            "From noticing that a worker is gone until another has the model loaded.",
            _RECOVERY_BUCKETS,
        )
        self.suspects = self._gauge("num_requests_suspected", "Sequences that run alone: workers were lost over them.")
        self.accounting_faults = self._counter(
            "accounting_faults_total", "Times that blocks or slots were nobody's, or twice somebody's: our bug."
        )
        self.step_token_limit = self._gauge(
            "step_token_limit",
            "Tokens that a step may carry; fewer than max_num_batched_tokens after memory ran out.",
        )
        self.step_token_limit.set(config.max_num_batched_tokens)

        # -- the server
        self.is_draining = False  # set by a signal's handler, which must not wait for a metric's lock
        draining = self._gauge("draining", "1 while the server ends and takes no new requests.")
        draining.set_function(lambda: float(self.is_draining))
        self.event_loop_lag = self._histogram(
            "api_event_loop_lag_seconds", "How late a timer of the event loop is.", _STEP_BUCKETS
        )
        self.event_loop_tasks = self._gauge("api_event_loop_tasks", "Tasks of the event loop, whatever they wait for.")
        self._gauge("num_requests_waiting_limit", "max_num_queued_reqs.").set(config.max_num_queued_reqs)
        self._gauge("num_tokens_waiting_limit", "max_num_queued_tokens.").set(config.max_num_queued_tokens)
        build = Gauge("servekit_build_info", "The running version.", ["version"], registry=self.registry)
        build.labels(version=version).set(1)
        told = {name: str(getattr(config, name)) for name in _TOLD_SETTINGS}
        settings = Gauge(
            "servekit_config_info", "Settings of the scheduler.", ["model_name", *told], registry=self.registry
        )
        settings.labels(self._model_name, *told.values()).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"servekit_{name}", text, ["model_name"], registry=self.registry).labels(self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled_counter(name, text).labels(self._model_name)

    def _labelled_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"servekit_{name}", text, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _LATENCY_BUCKETS) -> Histogram:
        metric = Histogram(f"servekit_{name}", text, ["model_name"], registry=self.registry, buckets=buckets)
        return metric.labels(self._model_name)

    # -- sequences ----------------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        """A prompt counts once, however many answers fork from it; its length does for each of them."""
        if sequence.leader is None:
            self.prompt_tokens.inc(sequence.prompt_length)
        self._prompt_length.observe(sequence.prompt_length)

    def first_token(self, latency_s: float) -> None:
        """A sequence got its first token, so long after it arrived."""
        self.generation_tokens.inc()
        self._time_to_first_token.observe(latency_s)

    def next_token(self, latency_s: float) -> None:
        """A sequence got another token, so long after the one before."""
        self.generation_tokens.inc()
        self._inter_token_latency.observe(latency_s)

    def ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        first_token_s: float | None = None,
        last_token_s: float | None = None,
    ) -> None:
        """A sequence ended, with or without a token."""
        self._finished[reason].inc()
        # Who never had a seat waited until now; leaving them out would flatter a long line.
        seated_s = now if sequence.first_scheduled_s is None else sequence.first_scheduled_s
        self._queue_time.observe(seated_s - sequence.arrival_s)
        self._e2e_request_latency.observe(now - sequence.arrival_s)
        self._output_length.observe(sequence.num_output_tokens)
        if first_token_s is not None and last_token_s is not None:
            self._prefill_time.observe(first_token_s - seated_s)
            self._decode_time.observe(last_token_s - first_token_s)
            if sequence.num_output_tokens > 1:
                self._time_per_output_token.observe((last_token_s - first_token_s) / (sequence.num_output_tokens - 1))

    def refused(self, code: str) -> None:
        """A request was refused with this error code."""
        if code not in self._refusals and len(self._refusals) >= _MOST_VALUES:
            code = "other"
        if code not in self._refusals:
            self._refusals[code] = self._refused.labels(self._model_name, code)
        self._refusals[code].inc()

    def http_request(self, handler: str, method: str, status: int) -> None:
        """An HTTP request ended; who calls sees to it that there are few handlers and methods."""
        self._http_requests.labels(self._model_name, handler, method, str(status)).inc()

    # -- steps --------------------------------------------------------------------------------------------------------

    def step_sent(self, step: LiveStep, epoch: int, is_alone: bool) -> None:
        """A step was handed to the worker of this epoch; `is_alone` if it has no other."""
        self._iteration_tokens.observe(step.num_prefill_tokens + step.num_decode_tokens)
        self._batch_size.set(step.num_sequences)
        self._batch_decodes.set(step.num_decode_tokens)
        self._batch_prefill.set(step.num_prefill_tokens)
        if is_alone:
            self._lone_step = epoch, step.step_id, step.sent_s

    def step_done(self, result: StepResult, now: float, turn_s: float) -> None:
        """Its result came at `now`, in a turn of the main loop that took `turn_s`."""
        self._steps.inc()
        self._step_duration.observe(result.step_time_s)
        self._step_overhead.observe(max(0.0, turn_s - result.step_time_s))
        if self._lone_step is not None:
            epoch, step_id, sent_s = self._lone_step
            if (epoch, step_id) == (result.epoch, result.step_id):
                self._ipc_roundtrip.observe(max(0.0, now - sent_s - result.step_time_s))
                self._lone_step = None

    def idle_began(self, now: float) -> None:
        """There is nothing to do."""
        self._idle_since_s = now
        for gauge in (self._batch_size, self._batch_decodes, self._batch_prefill):
            gauge.set(0)

    def idle_ended(self, now: float) -> None:
        """There is something to do again."""
        self._idle_before_s = self._idle_s(now)
        self._idle_since_s = None

    def _idle_s(self, now: float) -> float:
        return self._idle_before_s + (0.0 if self._idle_since_s is None else now - self._idle_since_s)

    # -- workers ------------------------------------------------------------------------------------------------------

    def worker_restarted(self, cause: str) -> None:
        """A worker has to be replaced for one of RESTART_CAUSES; whatever else is said counts as `other`."""
        self._restarts[cause if cause in self._restarts else "other"].inc()

    # -- for those who ask --------------------------------------------------------------------------------------------

    def watch(self, take: Callable[[], Snapshot]) -> None:
        """Report what `take` returns at each scrape."""
        self.registry.register(_SnapshotCollector(self._model_name, take, self._idle_s))

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
