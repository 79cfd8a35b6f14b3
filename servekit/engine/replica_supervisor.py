"""Keep the replicas of one engine running: start workers, vacate replicas, start them again, and accept workers.

A core replaces a lost worker itself, and calls the supervisor to move its sequences meanwhile. A replica whose worker
cannot be replaced is vacated: it has no main loop and no worker until one starts or joins (docs/design/replicas.md).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.config import ServeConfig
from servekit.engine.engine_core import RETRY_AFTER_S, EngineCore
from servekit.engine.replica import Replica
from servekit.engine.replicas import Replicas
from servekit.engine.request_registry import RequestRegistry
from servekit.errors import ConfigError, InternalError, ServekitError, WorkerError, WorkerLost, WorkerNotReady
from servekit.executor.joined_worker import JoinedWorker
from servekit.executor.model_executor import ModelExecutor, WorkerSource
from servekit.executor.placement import ANYWHERE, Placement, placements
from servekit.executor.step_timeout import vacated_backoff_s
from servekit.executor.transfer_memory import TransferMemory, replica_role
from servekit.protocol.messages import LoadModel
from servekit.scheduler.commands import Finish
from servekit.scheduler.kv_connector import ReplicaRole

log = logging.getLogger("servekit")

REBALANCE_INTERVAL_S = 1.0
EXCHANGE_INTERVAL_S = 0.25  # what other replicas computed meanwhile is not known where tenants take turns
JOIN_INTERVAL_S = 0.1  # how soon a worker that waits is taken, when no other replica needs one any more


class ReplicaSupervisor:
    """Starts and ends the parts of the replicas. Everything runs on the event loop's thread."""

    def __init__(
        self, config: ServeConfig, replicas: Replicas, registry: RequestRegistry, source: WorkerSource | None
    ) -> None:
        """Add the replicas to begin with. `source` has the workers that join, if they may."""
        self.outage: ServekitError | None = None  # set while there has been no worker at all for worker_restart_timeout
        self._config = config
        self._replicas = replicas
        self._registry = registry
        self._source = source
        self._fail_all: Callable[[ServekitError], None] = lambda _: None
        self._make_core: Callable[[Replica], EngineCore] | None = None
        self._loops: dict[asyncio.Task[ServekitError], Replica] = {}  # the main loop of each core
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()  # no more than there are loops and helpers
        self._helpers: set[asyncio.Task[None]] = set()
        self._joining: asyncio.Task[JoinedWorker] | None = None
        self._outage_timer: PauseTolerantTimer | None = None  # runs while there is no worker at all
        self._is_draining = False
        self._transfer_memory = TransferMemory(config)
        for placement in placements(config):
            replicas.add(self._new_replica(placement))
        if not replicas.all:
            replicas.add(self._new_replica(None))  # the replica of the first worker that joins

    def _new_replica(self, placement: Placement | None) -> Replica:
        """Return the next replica, which is not among the replicas yet. Without a placement, its workers join."""

        def wake() -> None:
            replica.wake()

        source, index = self._source if placement is None else None, len(self._replicas.all)
        shared_fds = self._transfer_memory.fds
        executor = ModelExecutor(self._config, wake, wake, source, placement or ANYWHERE, shared_fds)
        replica = Replica(index, executor, placement, replica_role(self._config, index))
        if placement is None:
            executor.accepts = lambda worker: not replica.has_core or _is_for(replica.role, worker.offer.role)
            executor.on_fetched = lambda answer: self._replicas.fetched(replica, answer)
        return replica

    def _choose_role(self, offered: str) -> ReplicaRole:
        """Return the role of a worker that joins: its own, or the one of which there are not enough."""
        num_prefill = self._config.prefill_replicas
        if num_prefill is None:
            return ReplicaRole.BOTH
        if offered:
            return ReplicaRole(offered)
        found = [each.role for each in self._replicas.all if each.has_core and not each.is_vacated]
        return ReplicaRole.PREFILL if found.count(ReplicaRole.PREFILL) < num_prefill else ReplicaRole.DECODE

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, load: LoadModel, make_core: Callable[[Replica], EngineCore]) -> None:
        """Start all workers at the same time, and a core for each. Raises ConfigError or WorkerError."""
        self._make_core = make_core
        replicas, memory = self._replicas.all, self._transfer_memory
        workers = await asyncio.gather(*(each.start(memory.apply(load, each.index, each.role)) for each in replicas))
        for index, worker in enumerate(workers):
            if (why := worker.difference(workers[0])) is not None:
                raise ConfigError(f"the worker of replica {index} cannot serve together with that of replica 0: {why}")
            if worker.kv_layout != workers[0].kv_layout:
                raise ConfigError(
                    f"the worker of replica {index} ({worker.device}, attention {worker.attention}) stores keys and "
                    f"values in another layout than that of replica 0 ({workers[0].device}, {workers[0].attention}); "
                    "they cannot be handed over; use devices of one kind, or leave out --prefill-replicas"
                )
        for replica in self._replicas.all:
            if replica.is_joined:
                replica.role = self._choose_role(replica.executor.offered_role)
            self._replicas.give_core(replica, make_core(replica))
            log.info("replica %d: %s", replica.index, replica.describe())

    async def run(
        self, fail_all: Callable[[ServekitError], None], fail_request_of: Callable[[int, ServekitError], None]
    ) -> ServekitError:
        """Serve until the engine fails, and return the failure. Cancel this to stop serving.

        A replica whose worker cannot be replaced is vacated, unless it is the last one. `fail_all` reports an error to
        all clients, `fail_request_of` to the client of one sequence.
        """
        self._fail_all = fail_all
        for replica in self._replicas.all:
            self._start_loop(replica)
        self._start_helper(self._rebalance_forever(), "rebalancing")
        if self._config.scheduling_policy == "fair":
            self._start_helper(self._exchange_service_forever(), "service exchange")
        if self._source is not None:
            self._start_helper(self._take_joined_workers(self._source), "joined workers")
        try:
            while True:
                task = await self._ended.get()
                if task in self._helpers:
                    self._helpers.remove(task)
                    if (mistake := task.exception()) is not None:
                        log.error("a task of the engine failed", exc_info=mistake)
                        return InternalError(f"a task of the engine failed: {mistake}")
                    continue
                failure: ServekitError = task.result()
                replica = self._loops.pop(task)
                if not isinstance(failure, WorkerLost) or not self._loops:
                    return failure
                await self._vacate(replica, failure, fail_request_of)
                if not replica.is_joined:
                    self._start_helper(self._start_again(replica), f"starts replica {replica.index} again")
        finally:
            if self._outage_timer is not None:
                self._outage_timer.cancel()
            for each in (*self._loops, *self._helpers):
                each.cancel()
            await asyncio.gather(*self._loops, *self._helpers, return_exceptions=True)

    def _start_loop(self, replica: Replica) -> None:
        task = asyncio.create_task(replica.core.run(), name=f"core {replica.index}")
        self._loops[task] = replica
        task.add_done_callback(self._ended.put_nowait)

    def _start_helper(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._helpers.add(task)
        task.add_done_callback(self._ended.put_nowait)

    async def _rebalance_forever(self) -> None:
        replicas = self._replicas
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            for replica in replicas.all:
                is_waiting = replica.is_joined and not replica.is_ready
                replica.waited_s = replica.waited_s + REBALANCE_INTERVAL_S if is_waiting else 0.0
            if len(replicas.all) == 1:
                continue  # another worker may join later
            for replica in replicas.all:
                if not replica.is_ready and replica.core.manager.has_work:
                    await replicas.move_from(replica)
            await replicas.rebalance()

    async def _exchange_service_forever(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            await self._replicas.exchange_service()

    def drain(self) -> None:
        """Accept no more workers that join, except to replace lost ones."""
        self._is_draining = True
        if self._joining is not None:
            self._joining.cancel()

    async def stop(self, graceful: bool) -> None:
        """End all workers."""
        await asyncio.gather(*(replica.executor.stop(graceful) for replica in self._replicas.all))
        self._transfer_memory.close()

    # -- what cores ask -----------------------------------------------------------------------------------------------

    async def core_lost(self, core: EngineCore, loss: WorkerError) -> bool:
        """Continue the sequences of a core that has lost its worker on those that have one, in order of arrival.

        Returns False if the worker needs no replacement: it has left, and others go on.
        """
        replica = self._replicas.of(core)
        await self._replicas.move_from(replica)
        if self.has_other_worker(core):
            if replica.executor.cause == "left":
                return False
        elif self._outage_timer is None:
            timeout_s = self._config.worker_restart_timeout
            self._outage_timer = PauseTolerantTimer(timeout_s, partial(self._declare_outage, loss))
        if replica.is_joined and self._joining is not None:
            self._joining.cancel()  # this core needs the next worker
        return True

    def _declare_outage(self, loss: ServekitError) -> None:
        """Fail all requests, and reject new ones until there is a worker."""
        self.outage = WorkerNotReady(
            f"there has been no model worker for {self._config.worker_restart_timeout:g} s (worker_restart_timeout): "
            f"{loss.message}",
            retry_after_s=RETRY_AFTER_S,
        )
        log.error(
            "%s; rejecting requests until a worker starts; failing %s", self.outage.message, self._registry.describe()
        )
        self._fail_all(self.outage)

    async def core_ready(self, core: EngineCore) -> None:
        """Let a core whose worker is ready take over what waits at others."""
        self.outage = None
        if self._outage_timer is not None:
            self._outage_timer.cancel()
            self._outage_timer = None
        for replica in self._replicas.all:
            if replica.core is not core and not replica.is_ready:
                await self._replicas.move_from(replica)
        await self._replicas.rebalance()

    def hand_over(self, core: EngineCore) -> None:
        """Let decode replicas go on with sequences of a prefill replica."""
        self._replicas.hand_over(self._replicas.of(core))

    def has_other_worker(self, core: EngineCore) -> bool:
        """Return whether another core than this one has a worker."""
        return any(replica.is_ready and replica.core is not core for replica in self._replicas.all)

    def finish(self, commands: Iterable[Finish]) -> None:
        """End sequences, which may be on any core."""
        self._replicas.finish(commands)

    # -- replicas without a worker ------------------------------------------------------------------------------------

    async def _vacate(
        self, replica: Replica, failure: ServekitError, fail_request_of: Callable[[int, ServekitError], None]
    ) -> None:
        """Give up a replica whose worker has left or cannot be replaced."""
        log.warning("replica %d is vacated: %s", replica.index, failure.message)
        await replica.executor.stop()
        replica.is_vacated = True  # from now on, if its workers join, the next one may take it
        await self._replicas.move_from(replica)
        if not replica.is_ready:
            for sequence_id in replica.core.manager.sequence_ids:  # these sequences fit on no other replica
                fail_request_of(sequence_id, failure)

    async def _start_again(self, replica: Replica) -> None:
        """Start the worker of a vacated replica, again after longer and longer pauses, until one is ready."""
        for num_failures in itertools.count():
            delay_s = vacated_backoff_s(self._config.replica_restart_delay, num_failures)
            log.info("replica %d: a worker starts there in %g s", replica.index, delay_s)
            await asyncio.sleep(delay_s)
            if self._is_draining:
                return
            try:
                await replica.executor.start_again()
            except (ServekitError, OSError) as error:
                replica.core.worker_start_failed(str(error))
            else:
                await self._occupy(replica)
                return

    async def _occupy(self, replica: Replica) -> None:
        """Let a vacated replica serve, which has a worker again."""
        replica.is_vacated = False
        replica.core.worker_started()
        await self._begin(replica)

    async def _begin(self, replica: Replica) -> None:
        self._start_loop(replica)
        log.info("replica %d serves: %s", replica.index, replica.describe())
        await self.core_ready(replica.core)

    # -- workers that join --------------------------------------------------------------------------------------------

    async def _take_joined_workers(self, source: WorkerSource) -> None:
        """Give each worker that joins a replica. While a replica waits for a worker, the next one is for that."""
        while True:
            joined = [each for each in self._replicas.all if each.is_joined]
            waiting = [each for each in joined if not each.executor.is_ready and not each.is_vacated]
            if self._is_draining or waiting:
                await asyncio.sleep(JOIN_INTERVAL_S)
                worker = None if self._is_draining else source.take_worker(partial(_is_for_none, waiting))
                if worker is not None:
                    await self._add_worker(worker)
                continue
            self._joining = asyncio.create_task(source.next_worker(lambda _: True), name="next worker")
            try:
                await asyncio.wait([self._joining])
            finally:
                self._joining.cancel()  # does nothing if it is done
            if not self._joining.cancelled():
                await self._add_worker(self._joining.result())

    async def _add_worker(self, worker: JoinedWorker) -> None:
        """Let a worker that has joined serve: in a vacated replica, or in a new one."""
        role = self._choose_role(worker.offer.role)
        free = (replica for replica in self._replicas.all if replica.is_joined and replica.is_vacated)
        vacated = next((replica for replica in free if replica.role is role), None)
        if vacated is not None:
            vacated.executor.adopt(worker)
            await self._occupy(vacated)
            return
        assert self._make_core is not None
        replica = self._new_replica(None)
        replica.role = role
        replica.executor.adopt(worker)
        try:
            self._replicas.give_core(replica, self._make_core(replica))
        except Exception as error:  # a journal that cannot be created, for example: the other replicas serve on
            log.exception("worker %s cannot be used: %s", replica.executor.worker_name, error)
            await replica.executor.stop()
            return
        self._replicas.add(replica)
        await self._begin(replica)


def _is_for(role: ReplicaRole, offered: str) -> bool:
    """Whether a worker may serve a replica: one that offers no role may serve any."""
    return role is ReplicaRole.BOTH or offered in ("", role)


def _is_for_none(replicas: Iterable[Replica], worker: JoinedWorker) -> bool:
    """Whether a worker may serve none of these replicas, which wait for one."""
    return not any(_is_for(replica.role, worker.offer.role) for replica in replicas)
