"""Run several engine cores as one: choose the core of each sequence, and move sequences when a core is lost or ready.

A sequence is on one core at a time. It moves as values: its manager forgets it and answers with the command that
continues it elsewhere, token for token (docs/design/replicas.md).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.config import ServeConfig
from servekit.engine.engine_core import RETRY_AFTER_S, EngineCore
from servekit.engine.request_registry import RequestRegistry
from servekit.errors import ConfigError, InternalError, ServekitError, WorkerError, WorkerLost, WorkerNotReady
from servekit.executor.joined_worker import JoinedWorker
from servekit.executor.model_executor import ModelExecutor, WorkerSource
from servekit.executor.placement import ANYWHERE, Placement, placements
from servekit.executor.step_timeout import vacated_backoff_s
from servekit.observability.metrics import SchedulerStats
from servekit.protocol.messages import LoadModel, WorkerReady
from servekit.routing.router import Router
from servekit.routing.service_exchange import ServiceExchange
from servekit.scheduler.commands import AddSequence, Finish, Withdraw
from servekit.scheduler.queued_work import CombinedWork, QueuedCounts
from servekit.scheduler.scheduler_config import SchedulerConfig

log = logging.getLogger("servekit")

MOVED_PER_SLICE = 32  # sequences that move without a pause; each takes some 0.1 ms
REBALANCE_INTERVAL_S = 1.0
EXCHANGE_INTERVAL_S = 0.25  # what other replicas computed meanwhile is not known where tenants take turns
JOIN_INTERVAL_S = 0.1  # how soon a worker that waits is taken, when no other replica needs one any more
MAX_REBALANCED = 16  # prompts at a time: what moves away for a wrong prediction has to wait twice
SUSPECTS_WAIT_S = 60.0  # for a worker that joins in place of the one that they were lost on; perhaps none does


class Replica:
    """One engine core, the executor of its steps, and where its worker runs."""

    def __init__(self, index: int, executor: ModelExecutor, placement: Placement | None) -> None:
        """`placement` is where the server starts its worker; None if its workers join."""
        self.index = index
        self.executor = executor
        self.placement = placement
        self.is_vacated = False  # it has no worker and awaits none: the last one left, or could not be replaced
        self.waited_s = 0.0  # for a worker, in intervals of rebalancing: a pause of this process says nothing
        self._core: EngineCore | None = None

    @property
    def is_joined(self) -> bool:
        """Whether its workers are not started by this server."""
        return self.placement is None

    @property
    def worker(self) -> WorkerReady | None:
        """What its worker reported; None before there is a core."""
        return None if self._core is None else self.executor.ready

    @property
    def core(self) -> EngineCore:
        """Its core; there is one when the first worker is ready."""
        assert self._core is not None
        return self._core

    @core.setter
    def core(self, core: EngineCore) -> None:
        self._core = core

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, vacated."""
        if self.is_vacated:
            return "vacated"
        if self._core is None:
            return "loading"
        return "ready" if self.is_ready else "recovering"

    @property
    def is_ready(self) -> bool:
        """Whether its worker executes steps, as far as is known."""
        return self._core is not None and self.executor.is_ready and not self.executor.is_leaving

    @property
    def takes_sequences(self) -> bool:
        """Whether a new sequence can run here at once: not beside one that is suspected of crashing workers."""
        return self.is_ready and not self.core.manager.quarantine

    def wake(self) -> None:
        """Let its core see that the worker is lost or leaves. Does nothing before there is a core."""
        if self._core is not None:
            self._core.wake()

    async def start(self, load: LoadModel) -> WorkerReady:
        """Start its first worker, or wait until one joins. Raises ConfigError or WorkerError."""
        return await self.executor.start(load if self.placement is None else self.placement.apply(load))

    def info(self) -> dict[str, Any]:
        """What /info says of it."""
        worker = self.worker
        return {
            "state": self.state,
            "worker": self.executor.worker_name,
            "host": self.executor.host or None,
            "device": None if worker is None else worker.device,
            "num_blocks": None if worker is None else worker.num_blocks,
            "ranks": [] if worker is None else worker.ranks,
        }

    def describe(self) -> str:
        """Return a text for log lines: its worker, and where that runs. There is one."""
        worker = self.worker
        assert worker is not None
        return f"worker {self.executor.worker_name}: {worker.place}"

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of so many tokens can run here alone."""
        return max_length <= self.core.manager.config.max_total_tokens


class Replicas:
    """All replicas of one engine. Everything runs on the event loop's thread."""

    def __init__(self, config: ServeConfig, registry: RequestRegistry, source: WorkerSource | None) -> None:
        self.outage: ServekitError | None = None  # set while there has been no worker at all for worker_restart_timeout
        self._config = config
        self._registry = registry
        self._router = Router(config.block_size)
        self._service_exchange = ServiceExchange()
        self._source = source
        self._fail_all: Callable[[ServekitError], None] = lambda _: None
        self._make_core: Callable[[Replica], EngineCore] | None = None
        self._has_cores = False
        self._loops: dict[asyncio.Task[ServekitError], Replica] = {}  # the main loop of each core
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()  # no more than there are loops and helpers
        self._helpers: set[asyncio.Task[None]] = set()
        self._joining: asyncio.Task[JoinedWorker] | None = None
        self._outage_timer: PauseTolerantTimer | None = None  # runs while there is no worker at all
        self._is_draining = False
        self.all: list[Replica] = []
        for placement in placements(config):
            self.all.append(self._new_replica(placement))
        if not self.all:
            self.all.append(self._new_replica(None))  # of the first worker that joins

    def _new_replica(self, placement: Placement | None) -> Replica:
        """Return the next replica; the caller appends it to `all`. Without a placement, its workers join."""

        def wake() -> None:
            replica.wake()

        source = self._source if placement is None else None
        executor = ModelExecutor(self._config, wake, wake, source, placement or ANYWHERE)
        replica = Replica(len(self.all), executor, placement)
        return replica

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, load: LoadModel, make_core: Callable[[Replica], EngineCore]) -> None:
        """Start all workers at the same time, and a core for each. Raises ConfigError or WorkerError."""
        self._make_core = make_core
        workers = await asyncio.gather(*(each.start(load) for each in self.all))
        for index, worker in enumerate(workers):
            if (why := worker.difference(workers[0])) is not None:
                raise ConfigError(f"the worker of replica {index} cannot serve beside that of replica 0: {why}")
        for replica in self.all:
            self._give_core(replica)
            log.info("replica %d: %s", replica.index, replica.describe())
        self._has_cores = True

    def _give_core(self, replica: Replica) -> None:
        assert self._make_core is not None
        replica.core = self._make_core(replica)
        self._router.add_replica(replica.index, replica.core.manager)

    async def run(
        self, fail_all: Callable[[ServekitError], None], fail_request_of: Callable[[int, ServekitError], None]
    ) -> ServekitError:
        """Serve until the engine fails, and return the failure. Cancel this to stop serving.

        A replica whose worker cannot be replaced is vacated, unless it is the last one. `fail_all` reports an error to
        all clients, `fail_request_of` to the client of one sequence.
        """
        self._fail_all = fail_all
        for replica in self.all:
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

    def drain(self) -> None:
        """Take no more workers that join, except for those that are lost."""
        self._is_draining = True
        if self._joining is not None:
            self._joining.cancel()

    # -- replicas without a worker ------------------------------------------------------------------------------------

    async def _vacate(
        self, replica: Replica, failure: ServekitError, fail_request_of: Callable[[int, ServekitError], None]
    ) -> None:
        """Give up a replica whose worker has left or cannot be replaced."""
        log.warning("replica %d is vacated: %s", replica.index, failure.message)
        await replica.executor.stop()
        replica.is_vacated = True  # from now on, if its workers join, the next one may take it
        await self._move_from(replica)
        if not replica.is_ready:
            for sequence_id in replica.core.manager.sequence_ids:  # which fit on no other replica
                fail_request_of(sequence_id, failure)

    async def _start_again(self, replica: Replica) -> None:
        """Start the worker of a vacated replica, again after longer and longer pauses, until one is ready."""
        for num_failures in itertools.count():
            delay_s = vacated_backoff_s(num_failures)
            log.info("replica %d: a worker starts there in %g min", replica.index, delay_s / 60)
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

    async def _take_joined_workers(self, source: WorkerSource) -> None:
        """Give each worker that joins a replica. While a replica waits for a worker, the next one is for that."""
        while True:
            is_wanted = all(each.executor.is_ready or each.is_vacated for each in self.all if each.is_joined)
            if self._is_draining or not is_wanted:
                await asyncio.sleep(JOIN_INTERVAL_S)
                continue
            self._joining = asyncio.create_task(source.next_worker(), name="next worker")
            try:
                await asyncio.wait([self._joining])
            finally:
                self._joining.cancel()  # does nothing if it is done
            if not self._joining.cancelled():
                await self._add_worker(self._joining.result())

    async def _add_worker(self, worker: JoinedWorker) -> None:
        """Let a worker that has joined serve: in a vacated replica, or in a new one."""
        vacated = next((replica for replica in self.all if replica.is_joined and replica.is_vacated), None)
        if vacated is not None:
            vacated.executor.adopt(worker)
            await self._occupy(vacated)
            return
        replica = self._new_replica(None)
        replica.executor.adopt(worker)
        try:
            self._give_core(replica)
        except Exception as error:  # a journal that cannot be created, for example: the other replicas serve on
            log.exception("worker %s cannot be used: %s", replica.executor.worker_name, error)
            await replica.executor.stop()
            return
        self.all.append(replica)
        await self._begin(replica)

    async def _occupy(self, replica: Replica) -> None:
        """Let a vacated replica serve, which has a worker again."""
        replica.is_vacated = False
        replica.core.worker_started()
        await self._begin(replica)

    async def _begin(self, replica: Replica) -> None:
        self._start_loop(replica)
        log.info("replica %d serves: %s", replica.index, replica.describe())
        await self.core_ready(replica.core)

    # -- stop ---------------------------------------------------------------------------------------------------------

    async def stop(self, graceful: bool) -> None:
        """End all workers."""
        await asyncio.gather(*(replica.executor.stop(graceful) for replica in self.all))

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def cores(self) -> list[EngineCore]:
        """The cores of all replicas; none before all are ready for the first time."""
        return [replica.core for replica in self.all] if self._has_cores else []

    @property
    def num_ready(self) -> int:
        return sum(replica.executor.is_ready for replica in self.all)

    @property
    def stage(self) -> str:
        """What the first replica that is not ready is doing, as text for log lines and errors."""
        return next((each.executor.stage for each in self.all if not each.executor.is_ready), "serving")

    @property
    def limits(self) -> SchedulerConfig:
        """The limits of the replica with the most KV blocks, of those that have a worker or wait for one.

        What fits there can be served.
        """
        limits = (replica.core.manager.config for replica in self.all if not replica.is_vacated)
        return max(limits, key=lambda config: config.max_total_tokens)

    @property
    def num_waiting(self) -> int:
        """Waiting sequences of all replicas."""
        return sum(core.manager.num_waiting for core in self.cores)

    @property
    def queued(self) -> QueuedCounts:
        """What is queued at all replicas."""
        cores = self.cores
        return cores[0].manager.queued if len(cores) == 1 else CombinedWork([each.manager.queued for each in cores])

    @property
    def is_stalled(self) -> bool:
        """Whether a core with a worker makes no progress."""
        return any(replica.is_ready and replica.core.is_stalled for replica in self.all)

    def stats(self) -> list[SchedulerStats]:
        """Return the state of each scheduler, for metrics."""
        return [core.stats() for core in self.cores]

    # -- sequences ----------------------------------------------------------------------------------------------------

    def finish(self, commands: Iterable[Finish]) -> None:
        """End sequences, wherever they are: for the other cores, Finish does nothing."""
        for command in commands:
            for core in self.cores:
                core.apply(command)

    def choose(self, commands: Sequence[AddSequence]) -> EngineCore:
        """Return the core for all answers to one prompt, the first of which is the leader of the others.

        Raises ContextTooLong if none can: the largest replica may have been given up since the request was checked.
        """
        if len(self.all) == 1:
            return self.all[0].core
        self.limits.check_fits(len(commands[0].prompt_token_ids), commands[0].sampling.max_tokens)
        return self._choose([each for each in self.all if not each.is_vacated], commands).core

    def _choose(self, candidates: list[Replica], commands: Sequence[AddSequence]) -> Replica:
        """Return the candidate for all answers to one prompt, preferably one that can begin at once."""
        fitting = [each for each in candidates if each.fits(_max_length(commands[0]))] or candidates
        for replica in self.all:
            self._router.set_available(replica.index, replica in fitting and replica.takes_sequences)
        route = self._router.route(commands)
        if route is not None:
            return self.all[route.replica_id]
        return min(fitting, key=lambda each: (not each.is_ready, each.core.manager.num_waiting))

    # -- moving -------------------------------------------------------------------------------------------------------

    async def core_lost(self, core: EngineCore, loss: WorkerError) -> bool:
        """Continue the sequences of a core that has lost its worker on those that have one, in order of arrival.

        Returns False if the worker needs no replacement: it has left, and others go on.
        """
        replica = self._replica_of(core)
        await self._move_from(replica)
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
        for replica in self.all:
            if replica.core is not core and not replica.is_ready:
                await self._move_from(replica)
        self._rebalance()

    def has_other_worker(self, core: EngineCore) -> bool:
        """Return whether another core than this one has a worker."""
        return any(replica.is_ready and replica.core is not core for replica in self.all)

    def _replica_of(self, core: EngineCore) -> Replica:
        return next(replica for replica in self.all if replica.core is core)

    async def _move_from(self, source: Replica) -> None:
        """Move what a replica without a worker has to others that can run it at once.

        Suspects of a crash stay, and run alone when its worker is replaced. Where workers join, none may ever do so:
        then suspects go to others after SUSPECTS_WAIT_S. Only one replica has suspects: if another one has, they go
        there. So a sequence that crashes workers does not take them down one after the other.
        """
        manager = source.core.manager
        suspects = set(manager.quarantine.sequence_ids)
        others = [replica for replica in self.all if replica is not source and not replica.is_vacated]
        isolating = [replica for replica in others if replica.core.manager.quarantine]
        has_waited = source.waited_s >= SUSPECTS_WAIT_S and any(each.is_ready for each in others)
        if suspects and (isolating or source.is_vacated or has_waited):
            self._move(source, sorted(suspects), isolating[:1] or others)
        ids = [each for each in manager.sequence_ids if each not in suspects]
        for start in range(0, len(ids), MOVED_PER_SLICE):
            targets = [replica for replica in others if replica.takes_sequences] or (
                others if source.is_vacated else []
            )
            if not targets or source.is_ready:
                return
            self._move(source, ids[start : start + MOVED_PER_SLICE], targets)
            await asyncio.sleep(0)

    def _move(self, source: Replica, sequence_ids: Sequence[int], targets: list[Replica]) -> None:
        """Move sequences, all answers to one prompt together."""
        num_moved = 0
        largest = max(targets, key=lambda replica: replica.core.manager.config.max_total_tokens)
        ids = tuple(each for each in sequence_ids if self._fits(each, source, largest))  # the others wait
        commands = source.core.apply(Withdraw(ids))
        for prompt in _by_prompt(commands):
            target = self._choose(targets, prompt)
            for command in prompt:
                output = self._registry.output(command.sequence_id)
                assert output is not None, "a sequence that has not ended is in the registry"
                output.sequence = target.core.resume(command)
                num_moved += 1
        if num_moved:
            log.info("%d sequences of replica %d continue on others", num_moved, source.index)

    @staticmethod
    def _fits(sequence_id: int, source: Replica, target: Replica) -> bool:
        sequence = source.core.manager.find(sequence_id)
        return sequence is not None and target.fits(sequence.max_length)

    async def _rebalance_forever(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_INTERVAL_S)
            for replica in self.all:
                is_waiting = replica.is_joined and not replica.is_ready
                replica.waited_s = replica.waited_s + REBALANCE_INTERVAL_S if is_waiting else 0.0
            if len(self.all) == 1:
                continue  # another worker may join later
            for replica in self.all:
                if not replica.is_ready and replica.core.manager.has_work:
                    await self._move_from(replica)
            self._rebalance()

    def _rebalance(self) -> None:
        """Move waiting sequences to where they start much sooner."""
        for replica in self.all:
            self._router.set_available(replica.index, replica.takes_sequences)
        for move in self._router.rebalance(MAX_REBALANCED):
            source, target = self.all[move.source_id], self.all[move.target_id]
            if not all(self._fits(each, source, target) for each in move.sequence_ids):
                continue
            for command in source.core.apply(Withdraw(move.sequence_ids)):
                output = self._registry.output(command.sequence_id)
                assert output is not None, "a sequence that has not ended is in the registry"
                output.sequence = target.core.resume(command)

    # -- fairness -----------------------------------------------------------------------------------------------------

    async def _exchange_service_forever(self) -> None:
        while True:
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            self._exchange_service()

    def _exchange_service(self) -> None:
        """Tell each manager what the others computed for each tenant."""
        cores = self.cores
        commands = self._service_exchange.commands([core.manager for core in cores])
        for core, command in zip(cores, commands, strict=True):
            if command is not None:
                core.apply(command)


def _max_length(command: AddSequence) -> int:
    return len(command.prompt_token_ids) + command.sampling.max_tokens


def _by_prompt(commands: Iterable[AddSequence]) -> Iterator[list[AddSequence]]:
    """Return the answers to each prompt, in order of the first one's arrival."""
    prompts: dict[int, list[AddSequence]] = {}
    for command in commands:
        leader_id = command.sequence_id if command.leader_id is None else command.leader_id
        prompts.setdefault(leader_id, []).append(command)
    return iter(prompts.values())
