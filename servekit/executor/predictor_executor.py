"""Keep one predictor's worker running: start it, send batches, receive results, and replace it when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.config import ServeConfig
from servekit.errors import ServekitError, WorkerLost, WorkerTimeout
from servekit.executor.step_timeout import StepTimeout, backoff_s
from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.prediction import BatchResult, LoadPredictor, PredictBatch, PredictorReady, encode_batch

STABLE_AFTER_S = 10.0  # a worker that was ready for this long does not count as a failed start
FLOAT_BYTES = 4


class PredictorExecutor:
    """Computes batches in one worker at a time. All methods must be called on the event loop's thread."""

    def __init__(self, config: ServeConfig) -> None:
        self.ready: PredictorReady | None = None  # what the first worker reported; its replacements report the same
        self._config = config
        self._load: LoadPredictor | None = None
        self._worker: WorkerConnection | None = None
        self._is_ready = False
        self._timeout = StepTimeout(config.step_timeout)
        self._in_flight: dict[tuple[int, int], tuple[int, int]] = {}  # (items, tokens) by (epoch, batch id), in order
        self._timer: PauseTolerantTimer | None = None  # limits the time of the oldest batch in flight
        self._num_losses = 0  # losses in a row, without a result or STABLE_AFTER_S of readiness between them
        self._ready_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether there is a worker that accepts batches, as far as is known."""
        return self._is_ready and self._worker is not None and self._worker.loss is None

    @property
    def stage(self) -> str:
        """What a worker that is not ready is doing, as text for people."""
        if self._worker is not None:
            return self._worker.stage if self._worker.loss is None else "replacing the worker"
        return "reading the model's configuration" if self.ready is None else "waiting before the worker starts again"

    @property
    def pid(self) -> int | None:
        """The worker's process id; None before the first start."""
        return None if self._worker is None else self._worker.pid

    @property
    def cause(self) -> str:
        """The reason for the loss as a metric's label value."""
        return "other" if self._worker is None else self._worker.cause

    async def start(self, load: LoadPredictor) -> PredictorReady:
        """Start a worker and load the model. Raises ConfigError, WorkerLost or WorkerTimeout."""
        self._load = load
        self._in_flight.clear()
        arguments = ["--predictor", "--log-level", self._config.log_level, "--log-format", self._config.log_format]
        process = WorkerProcess(arguments)
        self._worker = WorkerConnection(process, self._config.heartbeat_timeout, self._stop_timer)
        self._worker.send(load)
        message = await self._worker.receive(self._config.load_timeout)
        if not isinstance(message, PredictorReady):
            raise self.mark_lost(f"answered {type(message).__name__} to its first message")
        self.ready = self.ready or message
        if message.model != self.ready.model:
            raise self.mark_lost("has loaded another model than its predecessor: the files were changed")
        self._is_ready = True
        self._ready_s = asyncio.get_running_loop().time()
        return message

    def send(self, batch: PredictBatch, num_tokens: int) -> None:
        """Send a batch of so many tokens to the worker. Does not wait."""
        assert self._worker is not None
        self._in_flight[batch.epoch, batch.batch_id] = len(batch.items), num_tokens
        self._worker.send_payload(*encode_batch(batch))
        if len(self._in_flight) == 1:
            self._start_timer()

    async def receive(self) -> BatchResult:
        """Wait for the next result, for any time while no batch is in flight. Raises WorkerLost or WorkerTimeout."""
        assert self._worker is not None
        message = await self._worker.receive(None)
        if not isinstance(message, BatchResult):
            raise self.mark_lost(f"answered {type(message).__name__} to a batch")
        num_items, num_tokens = self._in_flight.pop((message.epoch, message.batch_id), (None, 0))
        if num_items is None:
            raise self.mark_lost("answered a batch that it was not sent")
        if len(message.counts) != num_items or FLOAT_BYTES * sum(message.counts) != len(message.values):
            raise self.mark_lost("sent a result that does not fit its batch")
        if not all(0 <= failure.index < num_items for failure in message.failures):
            raise self.mark_lost("reported the failure of an item that its batch does not have")
        if not 0.0 <= message.step_time_s < float("inf"):
            raise self.mark_lost(f"reported a batch of {message.step_time_s:g} s")
        self._timeout.observe(num_tokens, message.step_time_s)
        self._num_losses = 0
        self._start_timer()
        return message

    async def replace(self, on_failed_start: Callable[[str], None]) -> None:
        """End the worker, and start new ones until one is ready. `on_failed_start` gets why one did not start.

        Raises WorkerLost after `max_worker_restarts` failed starts in a row.
        """
        assert self._worker is not None and self._load is not None
        self._is_ready = False
        if asyncio.get_running_loop().time() - self._ready_s > STABLE_AFTER_S:
            self._num_losses = 0
        max_attempts = self._config.max_worker_restarts
        for attempt in range(1, max_attempts + 1):
            await self._worker.end()
            self._num_losses += 1
            await asyncio.sleep(backoff_s(self._num_losses))
            try:
                await self.start(self._load)
                return
            except (ServekitError, OSError) as error:
                delay_s = backoff_s(self._num_losses + 1)
                on_failed_start(f"attempt {attempt} of {max_attempts}, next in {delay_s:g} s: {error}")
        await self._worker.end()
        raise WorkerLost(
            f"the model worker was lost, and {max_attempts} replacements in a row did not start (max_worker_restarts)"
        )

    async def stop(self, graceful: bool = True) -> None:
        """End the worker. If graceful, a ready worker is asked to exit before it is killed."""
        is_ready, self._is_ready = self._is_ready, False
        self._stop_timer()
        if self._worker is not None:
            await self._worker.end(graceful and is_ready)
            self._worker = None

    def mark_lost(self, what: str) -> ServekitError:
        """Declare the worker lost because of what it did. Returns the loss, for callers that raise it."""
        assert self._worker is not None
        self._worker.mark_lost(WorkerLost(f"the model worker {what}"), "garbage")
        assert self._worker.loss is not None
        return self._worker.loss

    def _start_timer(self) -> None:
        """Limit the time of the oldest batch in flight, which the worker computes from now on."""
        self._stop_timer()
        oldest = next(iter(self._in_flight.values()), None)
        if oldest is not None:
            limit_s = self._timeout.limit_s(oldest[1])
            self._timer = PauseTolerantTimer(limit_s, lambda: self._on_late_result(limit_s))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late_result(self, limit_s: float) -> None:
        assert self._worker is not None
        error = WorkerTimeout(f"the model worker did not answer within {limit_s:.3g} s")
        self._worker.mark_lost(error, "step_timeout")
