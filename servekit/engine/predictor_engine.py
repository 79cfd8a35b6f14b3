"""Serve one model that embeds, reranks or classifies: admit requests, batch their items, and deliver the results.

The verbs are those of the engine of a language model: `start`, `submit`, `abort`, `stats`, `drain`, `stop`. Everything
runs on the event loop's thread. Results of a lost worker are computed again by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from math import ceil
from pathlib import Path
from typing import Any

from servekit import __version__
from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.config import ServeConfig
from servekit.dynamic_batching.dynamic_batcher import CRASHES_TO_FAIL, Batch, BatchLimits, DynamicBatcher
from servekit.dynamic_batching.image_header import beginning_of, pixels_in_header
from servekit.dynamic_batching.item import NEVER, Item
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.engine_core import RETRY_AFTER_S
from servekit.engine.live_view import LiveView
from servekit.engine.model_files import find_model
from servekit.engine.one_model import OneModel
from servekit.engine.prediction_state import BatchedPrediction
from servekit.engine.predictor_tokenizer import PredictorTokenizer, load_predictor_tokenizer
from servekit.engine.readiness_probe import ReadinessProbe
from servekit.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    RequestCrashesWorker,
    ServekitError,
    WorkerError,
    WorkerNotReady,
    shutting_down,
)
from servekit.executor.predictor_executor import FLOAT_BYTES, PredictorExecutor
from servekit.observability.live_frames import LiveState, LiveWorker
from servekit.observability.metrics import HttpMetrics, Metrics, ModelMetrics, PredictorStats
from servekit.protocol.prediction import (
    BatchResult,
    ImageItem,
    LoadPredictor,
    Modality,
    PredictBatch,
    PredictorInfo,
    PredictorKind,
    PredictorReady,
    TextItem,
)
from servekit.requests.prediction import ImageInput, PredictionRequest
from servekit.shared_budget import SharedBudget

log = logging.getLogger("servekit")

RATE_WINDOW_S = 30.0  # the rate of ended items is measured over this time
MAX_RETRY_AFTER_S = 60
MAX_REQUEST_IMAGES = 4  # of the largest size, or more of smaller ones: what a request may cost the worker
MAX_QUEUED_IMAGES = 32  # the same for all requests that have not ended; a tenant may have as much as it leaves free
HEADER_BYTES = (2**14, 2**19)  # of an image file in which its size is searched; photos have thumbnails before it
PROBE_CALLER = Caller(request_id="servekit-probe")
PROBE_PRIORITY = -(2**20)


class PredictorEngine(OneModel):
    """Serves one model. Call `start`, then `submit` any number of requests, then `stop`."""

    def __init__(
        self,
        config: ServeConfig,
        kind: PredictorKind,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
    ) -> None:
        """`metrics` are given where the server has several models. Raises ConfigError for settings of other kinds."""
        check_settings(config, kind)
        self.config = config
        self.kind: str = kind
        self.metrics = metrics or Metrics(config, __version__)
        self.failure: ServekitError | None = None  # why the main loop ended, if it did
        self.model_path: Path | None = None  # known when the engine has started
        self.batcher = DynamicBatcher(
            BatchLimits(
                max_batch_size=config.max_num_seqs,
                max_batch_tokens=config.batched_tokens(""),
                max_delay_s=config.max_batch_delay_ms / 1e3,
                max_batch_pixels=config.max_image_pixels,
                max_in_flight=config.max_steps_in_flight,
            )
        )
        self._clock = clock
        self._executor = PredictorExecutor(config)
        self._tokenizer: PredictorTokenizer | None = None
        self._item_ids = itertools.count()
        self._unfinished: dict[
            int, tuple[BatchedPrediction, int, TextItem | ImageItem]
        ] = {}  # by item id; int: its index
        self._places = SharedBudget(config.max_num_queued_reqs)  # places of items that are admitted and have not ended
        self._tokens = SharedBudget(config.max_num_queued_tokens)
        self._pixels = SharedBudget(MAX_QUEUED_IMAGES * config.max_image_pixels)
        self._ended_s: deque[float] = deque(maxlen=4096)  # times at which items ended
        self._probe = ReadinessProbe(self._predict_probe, clock)
        self._main_loop: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = None  # of the next `_pump`
        self._is_pump_due = False  # whether that is as soon as possible, and not at a time
        self._outage: ServekitError | None = None  # while there has been no worker for worker_restart_timeout
        self._is_draining = False
        self._rejects_requests = False

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, draining, failed."""
        if self.failure is not None:
            return "failed"
        if self._is_draining:
            return "draining"
        if self._main_loop is None:
            return "loading"
        return "ready" if self._executor.is_ready else "recovering"

    @property
    def stage(self) -> str:
        """What a server that is not ready is doing, as text for people."""
        return "serving" if self._executor.is_ready else self._executor.stage

    @property
    def is_healthy(self) -> bool:
        """False if only a new process can help."""
        return self.failure is None

    @property
    def has_free_slots(self) -> bool:
        """Whether a batch would have room if all waiting items were in it."""
        return self.batcher.num_waiting < self.batcher.limits.max_batch_size

    @property
    def worker(self) -> PredictorReady | None:
        """What the first worker reported; None until it is ready."""
        return self._executor.ready

    @property
    def model(self) -> PredictorInfo:
        """What is known of the loaded model. Raises WorkerNotReady while it loads."""
        if self._executor.ready is None or self._main_loop is None:
            raise self._not_ready()
        return self._executor.ready.model

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest input. Raises WorkerNotReady."""
        return self.model.max_model_len

    @property
    def worker_pids(self) -> list[int | None]:
        return [self._executor.pid]

    @property
    def workers(self) -> list[tuple[dict[str, str], int | None]]:
        """The labels and the process id of the worker, for metrics."""
        return [({"replica": "0"}, self._executor.pid)]

    @property
    def server_metrics(self) -> Metrics:
        """The metrics of the server, which has this model only."""
        assert isinstance(self.metrics, Metrics)
        return self.metrics

    @property
    def http_counters(self) -> HttpMetrics:
        return self.metrics.http

    def now(self) -> float:
        """The time on the clock that all times of the engine are measured with."""
        return self._clock()

    def stats(self) -> PredictorStats:
        """The state of the batcher at this moment."""
        batcher = self.batcher
        return PredictorStats(
            num_waiting=batcher.num_waiting,
            num_waiting_tokens=batcher.num_waiting_tokens,
            num_in_flight=batcher.num_in_flight,
            num_suspects=batcher.num_suspects,
            num_stale_results=batcher.num_stale_results,
        )

    async def live_view(self) -> LiveView:
        """One frame of the live view, without sequences and blocks."""
        ready, worker = self.worker, LiveWorker(self.stage)
        if ready is not None:
            worker = LiveWorker(self.stage, ready.device, ready.dtype)
        name, now_s = self.config.model_name, self.now()
        num_waiting = self.batcher.num_waiting
        return LiveView(
            LiveState(
                now_s, self.state, self.stage, name, __version__, [worker], kind=self.kind, num_waiting=num_waiting
            )
        )

    async def describe(self) -> dict[str, Any]:
        """What /info says of the running engine. Raises WorkerNotReady until the model is loaded."""
        return {"replicas": [{"replica": 0, "state": self.stage, "predictor": self.model}]}

    async def probe_readiness(self) -> bool:
        """Whether the engine computes: a batch was computed recently, or one item is for this call."""
        return self.state == "ready" and await self._probe.check() and self.state == "ready"

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.server_metrics.render()

    def _not_ready(self) -> ServekitError:
        message = f"the model is not ready to serve: {self.stage}"
        return self.failure or WorkerNotReady(message, retry_after_s=RETRY_AFTER_S)

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError or WorkerError."""
        config = self.config
        self.model_path = path = await run_in_daemon_thread(_find_files, config)
        load = LoadPredictor(
            model_path=str(path),
            kind=PredictorKind(self.kind),
            dtype=config.dtype,
            device=config.device if config.devices is None else config.devices,
            max_model_len=config.max_model_len,
            max_image_pixels=config.max_image_pixels,
        )
        ready = await self._executor.start(load)
        if ready.model.modality is Modality.TEXT:
            self._tokenizer = await run_in_daemon_thread(self._load_tokenizer, path)
        self.metrics.workers.worker_ready(None, self._clock())
        self._probe.prove(self._clock())
        self.metrics.watch_predictor(self.stats)
        self._main_loop = asyncio.create_task(self._serve(), name="servekit predictor")

    def _load_tokenizer(self, path: Path) -> PredictorTokenizer:
        assert self._executor.ready is not None
        return load_predictor_tokenizer(path, self._executor.ready.model)

    async def stop(self, graceful: bool = True) -> None:
        """Stop the main loop and the worker, and fail the requests that still run."""
        if self._main_loop is not None:
            self._main_loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._main_loop
        self._probe.stop()
        self.fail_all(shutting_down())
        self._cancel_pump()
        await self._executor.stop(graceful)
        if self._tokenizer is not None:
            self._tokenizer.close()

    def drain(self, admits_requests: bool = False) -> None:
        """Begin to drain: admitted requests continue, and new ones are rejected unless `admits_requests` is set."""
        self._is_draining = True
        self._rejects_requests = not admits_requests
        self.metrics.engine.is_draining = True

    async def wait_until_failed(self) -> None:
        """Return when the main loop has ended by itself, which it does only on failure."""
        if self._main_loop is not None:
            await asyncio.wait([self._main_loop])

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests that were admitted."""
        states = self._states()
        if states:
            log.warning("failing %d requests: %s", len(states), error.message)
        for state in states:
            self._fail(state, error)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, request: PredictionRequest, caller: Caller = ANONYMOUS) -> BatchedPrediction:
        """Admit all inputs of a request, or none. Raises RequestError or WorkerError."""
        arrival_s, num_items, tenant = self._clock(), len(request.inputs), caller.tenant
        self._check_admission(request, caller)
        self._places.take(tenant, num_items)
        try:
            deadline_s = NEVER if request.deadline_ms is None else arrival_s + request.deadline_ms / 1e3
            items = await self._prepare(request, caller, deadline_s)
            num_tokens = sum(map(self._length, items))
            self._check_tokens(request, caller, num_tokens)
            self._check_pixels(request, caller, sum(map(_num_pixels, items)))
        except BaseException:
            self._places.release(tenant, num_items)
            raise
        priority = max(request.priority, caller.min_priority)
        entries = [
            Item(
                next(self._item_ids),
                self._length(item),
                arrival_s,
                tenant,
                priority,
                deadline_s,
                _num_bytes(item),
                _num_pixels(item),
            )
            for item in items
        ]
        state = BatchedPrediction(caller, entries, self._abort)
        for index, (entry, item) in enumerate(zip(entries, items, strict=True)):
            self._unfinished[entry.item_id] = state, index, item
            self._tokens.take(tenant, entry.length)
            self._pixels.take(tenant, entry.num_pixels)
            self.batcher.add(entry)
        self.metrics.predictions.admitted(num_items, num_tokens if self._tokenizer is not None else 0)
        self._pump_soon()
        return state

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End the unfinished items of a tenant's requests with this id; return how many there were."""
        num_aborted = 0
        for state in self._states():
            if (state.caller.tenant, state.caller.request_id) == (tenant, request_id):
                num_aborted += sum(item.is_alive for item in state.items)
                self._fail(state, InvalidRequest("the request was aborted by POST /abort_request", code="aborted"))
        return num_aborted

    def _check_admission(self, request: PredictionRequest, caller: Caller) -> None:
        """Raise an error for a request that cannot be admitted, before anything is done for it."""
        if self._rejects_requests:
            raise shutting_down()
        if self._outage is not None:
            raise self._outage
        model, num_items = self.model, len(request.inputs)
        if self.failure is not None:
            raise self.failure
        has_images = isinstance(request.inputs[0], ImageInput)
        if has_images != (model.modality is Modality.IMAGE):
            raise InvalidRequest(
                f"the model {self.config.model_name!r} takes {model.modality}s, and {request.param} has "
                f"{Modality.IMAGE if has_images else Modality.TEXT}s",
                param=request.param,
            )
        if request.dimensions is not None and request.dimensions > model.dimensions:
            raise InvalidRequest(
                f"dimensions = {request.dimensions}; the model's embeddings have {model.dimensions}", param="dimensions"
            )
        most = self.config.max_client_batch_size if caller.max_answers is None else caller.max_answers
        if num_items > most:
            raise InvalidRequest(
                f"the request has {num_items} inputs; the limit is {most} (max_client_batch_size)", param=request.param
            )
        if num_items > self._places.max_share(caller.tenant):
            raise InvalidRequest(
                f"the request has {num_items} inputs; the queue holds {self._places.max_share(caller.tenant)} of one "
                "tenant (max_num_queued_reqs); send fewer in one request",
                param=request.param,
            )
        self._check_room(self._places, "max_num_queued_reqs", "inputs", caller.tenant, num_items)

    def _check_tokens(self, request: PredictionRequest, caller: Caller, num_tokens: int) -> None:
        if num_tokens > self._tokens.max_share(caller.tenant):
            raise InvalidRequest(
                f"the request has {num_tokens} tokens; the queue holds {self._tokens.max_share(caller.tenant)} of one "
                "tenant (max_num_queued_tokens); send fewer or shorter inputs",
                param=request.param,
            )
        self._check_room(self._tokens, "max_num_queued_tokens", "tokens", caller.tenant, num_tokens)

    def _check_pixels(self, request: PredictionRequest, caller: Caller, num_pixels: int) -> None:
        limit = MAX_REQUEST_IMAGES * self.config.max_image_pixels
        if num_pixels > limit:
            raise InvalidRequest(
                f"the images have {num_pixels} pixels in all, and a file without a known size counts as the largest; "
                f"the limit is {limit}, {MAX_REQUEST_IMAGES} times max_image_pixels; send fewer or smaller ones in one "
                "request",
                param=request.param,
            )
        setting = f"{MAX_QUEUED_IMAGES} times max_image_pixels"
        self._check_room(self._pixels, setting, "pixels of images", caller.tenant, num_pixels)

    def _check_room(self, budget: SharedBudget, setting: str, unit: str, tenant: str, amount: int) -> None:
        if not budget.has_room(tenant, amount):
            raise QueueFull(
                f"the queue is full: {budget.total} {unit} are queued{budget.describe_share(tenant)}, and the request "
                f"adds {amount}; the limit is {budget.limit} ({setting}). Please try again later.",
                retry_after_s=self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """Whole seconds until what waits will have been computed, at the recent rate."""
        now_s = self._clock()
        while self._ended_s and self._ended_s[0] < now_s - RATE_WINDOW_S:
            self._ended_s.popleft()
        if not self._ended_s:
            return RETRY_AFTER_S
        rate = len(self._ended_s) / max(1.0, now_s - self._ended_s[0])
        return min(MAX_RETRY_AFTER_S, max(1, ceil(self.batcher.num_waiting / rate)))

    async def _prepare(
        self, request: PredictionRequest, caller: Caller, deadline_s: float
    ) -> list[TextItem | ImageItem]:
        """Return what the worker gets of each input. Raises DeadlineExceeded if that takes too long."""
        if self._tokenizer is None:
            return [await self._sized(each) for each in request.inputs if isinstance(each, ImageInput)]
        try:
            async with asyncio.timeout(None if deadline_s == NEVER else max(0.0, deadline_s - self._clock())):
                return list(await self._tokenizer.encode(request, caller.tenant))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the texts were encoded") from None

    async def _sized(self, image: ImageInput) -> ImageItem:
        """Return an image with the number of its pixels, as its header says it, but no more than an image may have."""
        most = self.config.max_image_pixels
        for num_bytes in HEADER_BYTES:
            await asyncio.sleep(0)  # to read a thousand headers takes some tens of milliseconds
            header = beginning_of(image.data, image.is_base64, num_bytes)
            if num_pixels := pixels_in_header(header):  # an old GIF may say 0, and mean its first frame
                return ImageItem(image.is_base64, image.data, min(most, num_pixels))
        return ImageItem(image.is_base64, image.data, most)

    def _length(self, item: TextItem | ImageItem) -> int:
        return len(item.token_ids) if isinstance(item, TextItem) else self.model.item_tokens

    def _states(self) -> list[BatchedPrediction]:
        return list(dict.fromkeys(state for state, _, _ in self._unfinished.values()))

    # -- the end of items ---------------------------------------------------------------------------------------------

    def _end(self, item: Item) -> tuple[BatchedPrediction, int]:
        """Forget an item that has ended; return its request and its index there."""
        state, index, _ = self._unfinished.pop(item.item_id)
        self._places.release(item.tenant, 1)
        self._tokens.release(item.tenant, item.length)
        self._pixels.release(item.tenant, item.num_pixels)
        self._ended_s.append(self._clock())
        return state, index

    def _fail(self, state: BatchedPrediction, error: ServekitError) -> None:
        """Report an error to a request's client, and end all of its items."""
        state.fail(error)
        self._abort(state, "failed")

    def _abort(self, state: BatchedPrediction, outcome: str = "aborted") -> None:
        for item in state.items:
            if item.item_id in self._unfinished:
                self.batcher.finish(item)
                self._end(item)
                self.metrics.predictions.ended(outcome, self._clock() - item.arrival_s)

    def _fail_items(self, items: Iterable[Item], error: Callable[[], ServekitError], outcome: str) -> None:
        """Fail the requests of items that have ended in the batcher."""
        for item in items:
            if item.item_id in self._unfinished:  # not with another item of the same request
                state, _ = self._end(item)
                self.metrics.predictions.ended(outcome, self._clock() - item.arrival_s)
                self._fail(state, error())

    # -- the main loop ------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            self.failure = await self._run()
        except Exception as error:
            log.exception("the predictor's main loop failed")
            self.failure = InternalError(f"the predictor's main loop failed: {type(error).__name__}")
        self.fail_all(self.failure)  # the server's process exits next

    async def _run(self) -> ServekitError:
        """Receive results, and replace lost workers, until no worker can be started."""
        while True:
            try:
                self._commit(await self._executor.receive())
            except WorkerError as loss:
                failure = await self._recover(loss)
                if failure is not None:
                    return failure
            self._pump()

    def _pump_soon(self) -> None:
        """Call `_pump` when the event loop has run what else waits: to admit a thousand items took milliseconds."""
        if self._is_pump_due:
            return  # to schedule it anew would let callers that come all the time put it off for ever
        self._cancel_pump()
        self._is_pump_due = True
        self._timer = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Send the worker a batch if one is due, and call this again when the next one may be.

        It is one batch, because to plan and to encode one of hundreds of images takes some milliseconds.
        """
        self._cancel_pump()
        now_s = self._clock()
        self._fail_items(self.batcher.expire(now_s), _missed_deadline, "expired")
        if not self._executor.is_ready:
            wake_s = self.batcher.next_deadline_s()
        elif (batch := self.batcher.plan(now_s)) is not None:
            self._send(batch, now_s)
            self._pump_soon()
            return
        else:
            wake_s = min(self.batcher.next_plan_s(), self.batcher.next_deadline_s())
        if wake_s != NEVER:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wake_s - now_s), self._pump)

    def _cancel_pump(self) -> None:
        """Cancel the next call of `_pump`, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._is_pump_due = None, False

    def _send(self, batch: Batch, now_s: float) -> None:
        items = tuple(self._unfinished[item.item_id][2] for item in batch.items)
        self._executor.send(PredictBatch(batch.epoch, batch.batch_id, items), batch.work)
        self.metrics.predictions.batch_sent(len(items), [now_s - item.arrival_s for item in batch.items])

    def _commit(self, result: BatchResult) -> None:
        """Deliver the results of a batch."""
        self._probe.prove(self._clock())
        ends = list(itertools.accumulate(result.counts))
        failures = {failure.index: failure for failure in result.failures}
        self.metrics.predictions.batch_done(result.step_time_s, result.num_computed_tokens)
        for index, item in self.batcher.commit(result.epoch, result.batch_id):
            state, place = self._end(item)
            failure, latency_s = failures.get(index), self._clock() - item.arrival_s
            if failure is None:
                start = FLOAT_BYTES * (ends[index] - result.counts[index])
                state.put(place, result.values[start : FLOAT_BYTES * ends[index]])
                self.metrics.predictions.ended("computed", latency_s)
                continue
            self.metrics.predictions.ended("failed", latency_s)
            kind = InvalidRequest if failure.is_client_error else InternalError
            self._fail(state, kind(failure.message))

    async def _recover(self, loss: WorkerError) -> ServekitError | None:
        """Replace a lost worker. Returns the failure if there is none any more."""
        workers, lost_s = self.metrics.workers, self._clock()
        workers.worker_lost(self._executor.cause)
        log.error(
            "the predictor's worker is lost, and %d batches with it: %s", self.batcher.num_in_flight, loss.message
        )
        self._fail_items(self.batcher.restart(), _crashes_worker, "failed")
        timer = PauseTolerantTimer(self.config.worker_restart_timeout, lambda: self._declare_outage(loss))

        def on_failed_start(why: str) -> None:
            workers.worker_start_failed()
            log.error("the predictor's worker did not start: %s", why)

        try:
            await self._executor.replace(on_failed_start)
        except ServekitError as error:
            return error
        finally:
            timer.cancel()
        self._outage = None
        workers.worker_ready(self._clock() - lost_s, self._clock())
        return None

    def _declare_outage(self, loss: ServekitError) -> None:
        """Fail all requests, and reject new ones until there is a worker."""
        self._outage = WorkerNotReady(
            f"there has been no model worker for {self.config.worker_restart_timeout:g} s (worker_restart_timeout): "
            f"{loss.message}",
            retry_after_s=RETRY_AFTER_S,
        )
        self.fail_all(self._outage)

    async def _predict_probe(self) -> None:
        """Compute one item as for a client. There is no image to do that with."""
        if self._tokenizer is None:
            self._probe.prove(self._clock())
            return
        state = await self.submit(PredictionRequest(inputs=[[0]], param="probe", priority=PROBE_PRIORITY), PROBE_CALLER)
        try:
            await state.results()
        finally:
            state.abort()


def _num_bytes(item: TextItem | ImageItem) -> int:
    return len(item.data) if isinstance(item, ImageItem) else 0


def _num_pixels(item: TextItem | ImageItem) -> int:
    return item.num_pixels if isinstance(item, ImageItem) else 0


def _find_files(config: ServeConfig) -> Path:
    return find_model(config.model, config.revision)


def check_settings(config: ServeConfig, kind: PredictorKind) -> None:
    """Raise ConfigError for a setting that a predictor cannot have."""
    refused = {
        "api_processes": config.api_processes > 1,
        "data_parallel_size": (config.data_parallel_size or 1) > 1,
        "devices": config.devices is not None and "," in config.devices,
        "journal": config.journal is not None,
        "prefill_replicas": config.prefill_replicas is not None,
        "kv_offload_dir": config.kv_offload_dir is not None,
        "kv_offload_memory_bytes": config.kv_offload_memory_bytes is not None,
        "listen_workers": config.listen_workers is not None,
        "load_format": config.load_format != "auto",
        "pipeline_parallel_size": config.pipeline_parallel_size > 1,
        "placement": config.placement != "local",
        "profile": config.profile is not None,
        "quantization": config.quantization is not None,
        "speculative": config.speculative != "off",
        "tensor_parallel_size": config.tensor_parallel_size > 1,
    }
    if config.has_adapters:
        name, value = ("enable_lora", "true") if config.lora is None else ("lora", repr(config.lora[:300]))
        raise ConfigError(
            f"{name} = {value}: a model of kind {kind} takes no LoRA adapters; leave out --{name.replace('_', '-')}, "
            "or set it only in the [[model]] entries of models that generate text"
        )
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{name} = {getattr(config, name)!r}: a model of kind {kind} is served by one worker process, in its "
                f"own data type; leave out --{name.replace('_', '-')}"
            )


def _missed_deadline() -> ServekitError:
    return DeadlineExceeded("the request's deadline passed before all of it was computed (deadline_ms)")


def _crashes_worker() -> ServekitError:
    return RequestCrashesWorker(
        f"{CRASHES_TO_FAIL} workers ended while they computed an input of this request, the last one that input alone"
    )
