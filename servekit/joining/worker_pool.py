"""Keep the workers that have joined and wait for work, and give them to the engine one after the other."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection
from functools import partial

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError, WorkerError
from servekit.executor.joined_worker import JoinedWorker
from servekit.joining.adapter_check import adapter_refusal
from servekit.joining.listener import JoinRefusal, WorkerListener
from servekit.joining.settings import listener_settings
from servekit.joining.worker_placer import WorkerPlacer
from servekit.protocol.handshake import Offer, Reason
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import LoadModel, WorkerReady

log = logging.getLogger("servekit")

GROUP_BYTES = 16  # of the random name of the workers that hand KV blocks over to each other


class WorkerPool:
    """The workers that have joined, the oldest first. They have loaded the model, so they can begin at once.

    All workers of a server compute the same. The first worker sets the model and the data type. If the server starts
    workers itself, the first one is one of these, and no worker may join until it is ready. All that join have as many
    KV blocks as the first one of them, because a sequence may use all blocks of a worker, and continue on the next.
    """

    def __init__(self, config: ServeConfig, count_refused: Callable[[JoinRefusal], None] = lambda _: None) -> None:
        """`count_refused` is called for each connection that does not become a worker."""
        self.is_draining = False  # no worker may join, unless one is needed
        self.loaded_adapters: Callable[[], Collection[LoraAdapter]] = tuple  # of the server, now; set by the caller
        self.first: WorkerReady | None = None  # set by the caller if the server starts workers itself
        self._config = config
        self._count_refused = count_refused
        self._load: LoadModel | None = None
        self._num_blocks: int | None = None
        self._idle: list[JoinedWorker] = []
        self._given: list[JoinedWorker] = []  # those that serve, or will in a moment; lost ones may be among them
        self._loading_adapters: list[LoraAdapter] = []  # checked on workers, and not among `adapters` yet
        self._has_idle = asyncio.Event()
        self._num_wanted = 0  # calls that wait for a worker
        self._listener: WorkerListener | None = None
        self._placer: WorkerPlacer | None = None  # of workers on a cluster
        self._failure: ConfigError | None = None  # why no worker can join
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def stage(self) -> str:
        """What the engine waits for, as a text for log lines and errors."""
        if self._config.placement != "local":
            return f"waiting for a worker that {self._config.placement} places"
        return f"waiting for a worker to join at {self._config.listen_workers}"

    def start(self, load: LoadModel) -> None:
        """Listen for workers that are to load this model. Raises ConfigError."""
        settings = listener_settings(self._config)
        if settings is None:
            raise ConfigError("workers join only if listen_workers is set")
        group = secrets.token_bytes(GROUP_BYTES) if load.kv_transfer_bytes else b""
        self._load = replace(load, kv_transfer_group=group)
        self._listener = WorkerListener(settings, self)
        self._listener.start()
        if self._config.placement != "local":
            self._placer = WorkerPlacer(self._config, self._listener.address, settings.key, self._placement_failed)

    def _placement_failed(self, message: str) -> None:
        """If the server is starting, fail its start. Otherwise log the reason; placement is tried again."""
        log.error("%s", message)
        if self.first is None:
            self._failure = ConfigError(message)
            self._has_idle.set()

    async def stop(self) -> None:
        """Stop listening, and shut down the workers that wait here. Idempotent."""
        if self._listener is not None:
            await self._listener.stop()
        idle, self._idle = self._idle, []
        await asyncio.gather(*(worker.connection.end(graceful=True) for worker in idle), *self._tasks)

    @property
    def num_placed(self) -> int:
        """How many workers there should be on a cluster; 0 without one."""
        return 0 if self._placer is None else self._placer.num_workers

    @num_placed.setter
    def num_placed(self, num_workers: int) -> None:
        assert self._placer is not None
        self._placer.set_num_workers(num_workers)

    async def stop_placing(self) -> None:
        """End the process that places workers, and the workers that are left. Idempotent."""
        if self._placer is not None:
            await self._placer.stop()

    async def next_worker(self, accepts: Callable[[JoinedWorker], bool] = lambda _: True) -> JoinedWorker:
        """Wait for a worker that the caller accepts, and return the one that has waited longest.

        Raises ConfigError if none can join.
        """
        self._num_wanted += 1
        try:
            while (worker := self.take_worker(accepts)) is None:
                if self._failure is not None:
                    raise self._failure
                self._has_idle.clear()
                await self._has_idle.wait()
        finally:
            self._num_wanted -= 1
        return worker

    def take_worker(self, accepts: Callable[[JoinedWorker], bool]) -> JoinedWorker | None:
        """Return the worker that has waited longest, of those that the caller accepts; None if there is none."""
        worker = next((worker for worker in self._idle if accepts(worker)), None)
        if worker is None:
            return None
        self._idle.remove(worker)
        self._given = [each for each in self._given if each.connection.loss is None] + [worker]
        log.info("worker %s serves from now on; %d more are ready", worker.connection.name, len(self._idle))
        return worker

    async def check_adapter(self, adapter: LoraAdapter, checked: Collection[object] = ()) -> None:
        """Let go of the workers that cannot serve an adapter. They join again, and then are refused.

        The caller has asked the connections of `checked`, and adds the adapter to `loaded_adapters` without another
        `await`. So no worker is left out, however far it is: one that joins meanwhile is asked by the listener.
        """
        self._loading_adapters.append(adapter)
        try:
            for worker in [*self._idle, *self._given]:
                connection = worker.connection
                if connection in checked:
                    continue
                try:
                    why = await adapter_refusal(connection, [adapter])
                except WorkerError:  # its loss is reported by itself
                    continue
                if why is not None and connection.loss is None:
                    log.error("worker %s is not used: %s", connection.name, why)
                    # It may serve by now. Then its sequences continue on other workers.
                    connection.let_go()
        finally:
            self._loading_adapters.remove(adapter)

    # -- what the listener asks for -----------------------------------------------------------------------------------

    def load_model(self) -> LoadModel:
        assert self._load is not None
        return self._load if self._num_blocks is None else replace(self._load, num_kv_blocks=self._num_blocks)

    def refusal(self, offer: Offer) -> tuple[Reason, str] | None:
        if self.first is None and self._config.starts_workers:
            return "loading", "the server's own workers load the model; others may join when these are ready"
        if self.is_draining and not self._num_wanted:
            return "draining", "the server is draining: it ends when its requests are answered"
        return None

    def adapters(self) -> Collection[LoraAdapter]:
        return [*self.loaded_adapters(), *self._loading_adapters]

    def join_refused(self, reason: JoinRefusal) -> None:
        self._count_refused(reason)

    def worker_joined(self, worker: JoinedWorker) -> None:
        self.first = self.first or worker.ready
        self._num_blocks = self._num_blocks or worker.ready.num_blocks
        if worker.ready.num_blocks != self._num_blocks:  # this worker began to load before the first one was ready
            log.warning(
                "worker %s has %d KV blocks, but the first one that joined has %d; it loads the model again",
                worker.connection.name,
                worker.ready.num_blocks,
                self._num_blocks,
            )
            self._shut_down(worker)
            return
        self._idle.append(worker)
        worker.connection.on_loss = worker.connection.on_leaving = partial(self._shut_down, worker)
        if worker.connection.loss is not None or worker.connection.is_leaving:
            self._shut_down(worker)
        self._has_idle.set()

    def _shut_down(self, worker: JoinedWorker) -> None:
        """End a worker that waits here, because it is lost, leaves, or does not fit."""
        if worker in self._idle:
            self._idle.remove(worker)
        worker.connection.on_loss = worker.connection.on_leaving = lambda: None
        task = asyncio.create_task(worker.connection.end(graceful=True), name=f"ends worker {worker.connection.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
