"""Run several engine cores as one: choose the core of each sequence, and move sequences when a core is lost or ready.

A sequence is on one core at a time. It moves as values: its manager forgets it and answers with the command that
continues it elsewhere, token for token (docs/design/replicas.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from servekit.config import ServeConfig
from servekit.engine.engine_core import EngineCore
from servekit.engine.request_registry import RequestRegistry
from servekit.errors import ConfigError, InternalError, ServekitError, WorkerLost
from servekit.executor.model_executor import ModelExecutor, WorkerSource
from servekit.executor.placement import ANYWHERE, Placement, placements
from servekit.executor.worker_connection import WorkerConnection
from servekit.observability.metrics import SchedulerStats
from servekit.protocol.messages import LoadModel, WorkerReady
from servekit.routing.router import Router
from servekit.scheduler.commands import AddSequence, Finish, Withdraw
from servekit.scheduler.queued_work import CombinedWork, QueuedCounts
from servekit.scheduler.scheduler_config import SchedulerConfig

log = logging.getLogger("servekit")

MOVED_PER_SLICE = 32  # sequences that move without a pause; each takes some 0.1 ms
REBALANCE_INTERVAL_S = 1.0
JOIN_INTERVAL_S = 0.1  # how soon a worker that waits is taken, when no other replica needs one any more
MAX_REBALANCED = 16  # prompts at a time: what moves away for a wrong prediction has to wait twice


class Replica:
    """One engine core, the executor of its steps, and where its worker runs."""

    def __init__(self, index: int, executor: ModelExecutor, placement: Placement) -> None:
        self.index = index
        self.executor = executor
        self.placement = placement
        self.worker: WorkerReady | None = None  # what its first worker reported; None until it is ready
        self.is_vacated = False  # it has no worker and starts none: the last one left, or could not be replaced
        self._core: EngineCore | None = None

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

    def info(self) -> dict[str, Any]:
        """What /info says of it."""
        worker = self.worker
        return {
            "state": self.state,
            "device": None if worker is None else worker.device,
            "num_blocks": None if worker is None else worker.num_blocks,
            "cpus": self.placement.cpus,
        }

    def fits(self, max_length: int) -> bool:
        """Whether a sequence of so many tokens can run here alone."""
        return max_length <= self.core.manager.config.max_total_tokens


class Replicas:
    """All replicas of one engine. Everything runs on the event loop's thread."""

    def __init__(self, config: ServeConfig, registry: RequestRegistry, source: WorkerSource | None) -> None:
        self._config = config
        self._registry = registry
        self._router = Router(config.block_size)
        self._source = source
        self._fail_all: Callable[[ServekitError], None] = lambda _: None
        self._make_core: Callable[[Replica], EngineCore] | None = None
        self._has_cores = False
        self._loops: dict[asyncio.Task[ServekitError], Replica] = {}  # the main loop of each core
        self._ended: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()  # no more than there are loops
        self._joining: asyncio.Task[tuple[WorkerConnection, WorkerReady]] | None = None
        self._is_draining = False
        self.all: list[Replica] = []
        for placement in placements(config):
            self.all.append(self._new_replica(placement))

    def _new_replica(self, placement: Placement = ANYWHERE) -> Replica:
        """Return the next replica. It is one of `all` when the caller appends it."""

        def wake() -> None:
            replica.wake()

        executor = ModelExecutor(self._config, wake, wake, self._source, placement)
        replica = Replica(len(self.all), executor, placement)
        return replica

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, load: LoadModel, make_core: Callable[[Replica], EngineCore]) -> None:
        """Start all workers at the same time, and a core for each. Raises ConfigError or WorkerError."""
        self._make_core = make_core
        workers = await asyncio.gather(*(each.executor.start(each.placement.apply(load)) for each in self.all))
        for index, worker in enumerate(workers):
            if (why := worker.difference(workers[0])) is not None:
                raise ConfigError(f"the worker of replica {index} cannot serve beside that of replica 0: {why}")
        for replica, worker in zip(self.all, workers, strict=True):
            self._give_core(replica, worker)
            if len(self.all) > 1:
                log.info(
                    "replica %d: %s, %d KV blocks, %s",
                    replica.index,
                    worker.device,
                    worker.num_blocks,
                    replica.placement,
                )
        self._has_cores = True

    def _give_core(self, replica: Replica, worker: WorkerReady) -> None:
        assert self._make_core is not None
        replica.worker = worker
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
        helpers = [asyncio.create_task(self._rebalance_forever(), name="rebalancing")]
        if self._source is not None:
            helpers.append(asyncio.create_task(self._take_joined_workers(self._source), name="joined workers"))
        for helper in helpers:
            helper.add_done_callback(self._ended.put_nowait)
        try:
            while True:
                task = await self._ended.get()
                if task not in self._loops:  # a helper, which ends by a mistake of ours only
                    log.error("a task of the engine failed", exc_info=task.exception())
                    return InternalError(f"a task of the engine failed: {task.exception()}")
                failure: ServekitError = task.result()
                replica = self._loops.pop(task)
                if not isinstance(failure, WorkerLost) or not self._loops:
                    return failure
                await self._vacate(replica, failure, fail_request_of)
        finally:
            for each in (*self._loops, *helpers):
                each.cancel()
            await asyncio.gather(*self._loops, *helpers, return_exceptions=True)

    async def _vacate(
        self, replica: Replica, failure: ServekitError, fail_request_of: Callable[[int, ServekitError], None]
    ) -> None:
        """Give up a replica whose worker has left or cannot be replaced."""
        log.warning("replica %d is vacated: %s", replica.index, failure.message)
        await replica.executor.stop()
        replica.is_vacated = True  # from now on a worker that joins may take it
        await self._move_from(replica)
        if not replica.is_ready:
            for sequence_id in replica.core.manager.sequence_ids:  # which fit on no other replica
                fail_request_of(sequence_id, failure)

    def drain(self) -> None:
        """Take no more workers that join, except for those that are lost."""
        self._is_draining = True
        if self._joining is not None:
            self._joining.cancel()

    def _start_loop(self, replica: Replica) -> None:
        task = asyncio.create_task(replica.core.run(), name=f"core {replica.index}")
        self._loops[task] = replica
        task.add_done_callback(self._ended.put_nowait)

    async def _take_joined_workers(self, source: WorkerSource) -> None:
        """Give each worker that joins a replica. While a replica waits for a worker, the next one is for that."""
        while True:
            is_wanted = all(replica.executor.is_ready or replica.is_vacated for replica in self.all)
            if self._is_draining or not is_wanted:
                await asyncio.sleep(JOIN_INTERVAL_S)
                continue
            self._joining = asyncio.create_task(source.next_worker(), name="next worker")
            try:
                await asyncio.wait([self._joining])
            finally:
                self._joining.cancel()  # does nothing if it is done
            if not self._joining.cancelled():
                await self._add_worker(*self._joining.result())

    async def _add_worker(self, worker: WorkerConnection, ready: WorkerReady) -> None:
        """Let a worker that has joined serve: in a vacated replica, or in a new one."""
        vacated = next((replica for replica in self.all if replica.is_vacated), None)
        replica = vacated or self._new_replica()
        replica.executor.adopt(worker, ready)
        if vacated is None:
            try:
                self._give_core(replica, ready)
            except Exception as error:  # a journal that cannot be created, for example: the other replicas serve on
                log.exception("a worker that has joined cannot be used: %s", error)
                await replica.executor.stop()
                return
            self.all.append(replica)
        else:
            replica.worker, replica.is_vacated = ready, False
            replica.core.worker_joined()
        self._start_loop(replica)
        log.info("replica %d serves: %s, %d KV blocks", replica.index, ready.device, ready.num_blocks)
        await self.core_ready(replica.core)

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
    def outage(self) -> ServekitError | None:
        """Set while there has been no worker at all for worker_restart_timeout."""
        if self.num_ready:
            return None
        return next((core.outage for core in self.cores if core.outage is not None), None)

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

    async def core_lost(self, core: EngineCore) -> bool:
        """Continue the sequences of a core that has lost its worker on those that have one, in order of arrival.

        Returns False if the worker needs no replacement: it has left, and others go on.
        """
        replica = self._replica_of(core)
        await self._move_from(replica)
        if replica.executor.cause == "left" and self.has_other_worker(core):
            return False
        if self._joining is not None:
            self._joining.cancel()  # this core needs the next worker
        return True

    async def core_ready(self, core: EngineCore) -> None:
        """Let a core whose worker is ready take over what waits at others."""
        for other in self.cores:
            other.outage = None
        for replica in self.all:
            if replica.core is not core and not replica.is_ready:
                await self._move_from(replica)
        self._rebalance()

    def has_other_worker(self, core: EngineCore) -> bool:
        """Return whether another core than this one has a worker."""
        return any(replica.is_ready and replica.core is not core for replica in self.all)

    def fail_all(self, error: ServekitError) -> None:
        """Report an error to all clients."""
        self._fail_all(error)

    def _replica_of(self, core: EngineCore) -> Replica:
        return next(replica for replica in self.all if replica.core is core)

    async def _move_from(self, source: Replica) -> None:
        """Move what a replica without a worker has to others that can run it at once.

        Suspects of a crash stay, and run alone when its worker is replaced. Only one replica has suspects: if another
        one has, they go there. So a sequence that crashes workers does not take them down one after the other.
        """
        manager = source.core.manager
        suspects = set(manager.quarantine.sequence_ids)
        others = [replica for replica in self.all if replica is not source and not replica.is_vacated]
        isolating = [replica for replica in others if replica.core.manager.quarantine]
        if suspects and (isolating or source.is_vacated):
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


def _max_length(command: AddSequence) -> int:
    return len(command.prompt_token_ids) + command.sampling.max_tokens


def _by_prompt(commands: Iterable[AddSequence]) -> Iterator[list[AddSequence]]:
    """Return the answers to each prompt, in order of the first one's arrival."""
    prompts: dict[int, list[AddSequence]] = {}
    for command in commands:
        leader_id = command.sequence_id if command.leader_id is None else command.leader_id
        prompts.setdefault(leader_id, []).append(command)
    return iter(prompts.values())
