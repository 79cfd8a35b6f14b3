"""Keep the workers that have joined and wait for work, and give them to the engine one after the other."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.executor.worker_connection import WorkerConnection
from servekit.joining.listener import JoinedWorker, WorkerListener
from servekit.joining.settings import listener_settings
from servekit.protocol.handshake import Offer, Reason
from servekit.protocol.messages import LoadModel, WorkerReady

log = logging.getLogger("servekit")


class WorkerPool:
    """The workers that have joined, the oldest first. They have loaded the model, so they can begin at once.

    The first one sets the model, its data type and the number of KV blocks. Sequences continue from one worker on the
    next, so all workers need the same.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.is_draining = False  # no worker may join, unless one is needed
        self._config = config
        self._load: LoadModel | None = None
        self.first: WorkerReady | None = None
        self._idle: list[JoinedWorker] = []
        self._has_idle = asyncio.Event()
        self._num_wanted = 0  # calls that wait for a worker
        self._listener: WorkerListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def stage(self) -> str:
        """What the engine waits for, as text for log lines and errors."""
        return f"waiting for a worker to join at {self._config.listen_workers}"

    def start(self, load: LoadModel) -> None:
        """Listen for workers that are to load this model. Raises ConfigError."""
        settings = listener_settings(self._config)
        if settings is None:
            raise ConfigError("workers join only if listen_workers is set")
        self._load = load
        self._listener = WorkerListener(settings, self)
        self._listener.start()

    async def stop(self) -> None:
        """Stop listening, and shut down the workers that wait here. Idempotent."""
        if self._listener is not None:
            await self._listener.stop()
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.connection.end(graceful=True) for worker in idle), *self._tasks)

    async def next_worker(self) -> tuple[WorkerConnection, WorkerReady]:
        """Wait for a worker, and return the one that has waited longest."""
        self._num_wanted += 1
        try:
            while not self._idle:
                self._has_idle.clear()
                await self._has_idle.wait()
        finally:
            self._num_wanted -= 1
        worker = self._idle.pop(0)
        log.info("%s serves from now on; %d more are ready", worker.name, len(self._idle))
        return worker.connection, worker.ready

    # -- what the listener asks for -----------------------------------------------------------------------------------

    def load_model(self) -> LoadModel:
        assert self._load is not None
        return self._load if self.first is None else replace(self._load, num_kv_blocks=self.first.num_blocks)

    def refusal(self, offer: Offer) -> tuple[Reason, str] | None:
        if self.is_draining and not self._num_wanted:
            return "draining", "the server is draining: it ends when its requests are answered"
        return None

    def worker_joined(self, worker: JoinedWorker) -> None:
        first = self.first = self.first or worker.ready
        if worker.ready.num_blocks != first.num_blocks:  # it began to load before the first one was ready
            log.warning(
                "%s has %d KV blocks, but the first worker has %d; it loads the model again",
                worker.name,
                worker.ready.num_blocks,
                first.num_blocks,
            )
            self._shut_down(worker)
            return
        self._idle.append(worker)
        worker.connection.on_loss = worker.connection.on_leaving = partial(self._shut_down, worker)
        if worker.connection.loss is not None or worker.connection.is_leaving:
            self._shut_down(worker)
        self._has_idle.set()

    def _shut_down(self, worker: JoinedWorker) -> None:
        """End a worker that waits here: it is lost, leaves, or does not fit."""
        if worker in self._idle:
            self._idle.remove(worker)
        worker.connection.on_loss = worker.connection.on_leaving = lambda: None
        task = asyncio.create_task(worker.connection.end(graceful=True), name=f"ends {worker.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
