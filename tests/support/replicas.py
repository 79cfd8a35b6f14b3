"""Several cores behind one engine: their managers are real ones, and workers are stood in for.

So a test decides when a worker is lost and when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from itertools import chain
from typing import Any, cast

from servekit.config import ServeConfig
from servekit.engine.engine_core import EngineCore
from servekit.engine.replica import Replica
from servekit.engine.replica_supervisor import ReplicaSupervisor
from servekit.engine.replicas import Replicas
from servekit.engine.request_registry import RequestRegistry
from servekit.errors import ServekitError, WorkerLost
from servekit.executor.joined_worker import JoinedWorker
from servekit.executor.worker_connection import WorkerConnection
from servekit.latency.latency_predictor import LatencyPredictor
from servekit.protocol.handshake import Offer, Role
from servekit.protocol.messages import FetchBlocks, ModelInfo, WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Finish, Plan, Restart
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.workload_manager import WorkloadManager
from tests.support.scheduler import make_manager

READY = WorkerReady(ModelInfo("Stand-in", 1, 10, 100, (), 1.0, 0, 1.0), "cpu", "float32", 8, 1, 0.0)
BLOCK_SIZE = make_manager().config.block_size


class Executor:
    """Stands in for an executor whose worker is ready."""

    is_ready, is_leaving, cause, stage = True, False, "ended", "serving"
    ready, host, worker_name = READY, "", "process 7"
    num_failing_starts = 0

    def __init__(self) -> None:
        self.requests: list[FetchBlocks] = []

    def fetch(self, number: int, addresses: tuple[str, ...], keys: tuple[bytes, ...]) -> None:
        self.requests.append(FetchBlocks(number, addresses, keys))

    async def start_again(self) -> None:
        if self.num_failing_starts:
            self.num_failing_starts -= 1
            raise WorkerLost("no memory")
        self.is_ready = True

    async def stop(self, graceful: bool = True) -> None:
        self.is_ready = False


class JoinedStream:
    """Stands in for the connection to a worker that has joined, and exits when it is asked to."""

    name = "a worker"

    def start(self, *_: object) -> None: ...

    def write(self, *_: object) -> None: ...

    def stop(self) -> None: ...

    async def wait_ended(self, timeout_s: float) -> bool:
        return True

    async def end(self, is_hung: bool = False) -> None: ...


class Core:
    """Stands in for a core: its manager is a real one, and its main loop ends with what is put into `failures`."""

    is_stalled = False

    def __init__(self, manager: WorkloadManager) -> None:
        self.manager = manager
        self.latency = LatencyPredictor()
        self.apply = manager.apply
        self.resume = manager.add
        self.failures: asyncio.Queue[ServekitError] = asyncio.Queue()
        self.run = self.failures.get
        self.failed_starts: list[str] = []
        self.worker_start_failed = self.failed_starts.append

    def worker_started(self) -> None: ...

    def wake(self) -> None: ...


class Source:
    """Stands in for the pool of workers that have joined."""

    stage = "waiting for a worker to join"

    def __init__(self) -> None:
        self.workers: list[JoinedWorker] = []
        self._has_worker = asyncio.Event()

    async def next_worker(self, accepts: Callable[[JoinedWorker], bool]) -> JoinedWorker:
        while (worker := self.take_worker(accepts)) is None:
            self._has_worker.clear()
            await self._has_worker.wait()
        return worker

    def take_worker(self, accepts: Callable[[JoinedWorker], bool]) -> JoinedWorker | None:
        worker = next((worker for worker in self.workers if accepts(worker)), None)
        if worker is not None:
            self.workers.remove(worker)
        return worker

    def join(self, host: str = "gpu-7", role: Role = "") -> None:
        self.workers.append(joined_worker(host, role))
        self._has_worker.set()


def joined_worker(host: str = "gpu-7", role: Role = "") -> JoinedWorker:
    connection = WorkerConnection(cast(Any, JoinedStream()), 10.0, lambda: None)
    return JoinedWorker(connection, Offer(host, "cuda:1", "", role=role), READY)


class Output:
    """What the registry has of a sequence."""

    request_id = ""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence


class Fleet:
    """Replicas, and sequences that are added to them."""

    def __init__(self, *num_blocks: int, source: Source | None = None, **settings: Any) -> None:
        self.registry = RequestRegistry()
        config = ServeConfig(data_parallel_size=len(num_blocks), block_size=BLOCK_SIZE, **settings)
        self.replicas = Replicas(BLOCK_SIZE, self.registry)
        self.supervisor = ReplicaSupervisor(config, self.replicas, self.registry, source)
        for replica, blocks in zip(self.replicas.all, num_blocks, strict=True):
            replica.executor = cast(Any, Executor())
            role, policy = replica.role, config.scheduling_policy
            has_connector = role is not ReplicaRole.BOTH
            manager = make_manager(
                num_blocks=blocks, scheduling_policy=policy, has_kv_connector=has_connector, role=role
            )
            core = Core(manager)
            self.replicas.give_core(replica, cast(EngineCore, core))
        self.supervisor._make_core = lambda _: cast(EngineCore, Core(make_manager(num_blocks=64)))
        self.failures: list[ServekitError] = []  # that all clients got
        self.num_added = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run the replicas until the end of the block."""
        task = asyncio.create_task(self.supervisor.run(self.failures.append, lambda *_: None))
        await asyncio.sleep(0)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.supervisor.stop(graceful=False)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def fail(self, index: int) -> None:
        """End the main loop of a replica, as when its worker cannot be replaced."""
        replica = self.replicas.all[index]
        if isinstance(replica.executor, Executor):
            replica.executor.is_ready = False
        cast(Core, replica.core).failures.put_nowait(WorkerLost(f"no worker starts for replica {index}"))

    def add(self, length: int = 5, max_tokens: int = 5, n: int = 1) -> Replica:
        first = self.num_added
        commands = [
            AddSequence(
                sequence_id=first + index,
                prompt_token_ids=[first % 200] * length,
                sampling=SamplingParams(max_tokens=max_tokens),
                leader_id=first if index else None,
            )
            for index in range(n)
        ]
        core = self.replicas.choose(commands)
        for command in commands:
            self.registry.add(cast(Any, None), cast(Any, Output(core.apply(command))))
        self.num_added += n
        return next(replica for replica in self.replicas.all if replica.core is core)

    def ids(self) -> list[list[int]]:
        return [replica.core.manager.sequence_ids for replica in self.replicas.all]

    def all_ids(self) -> list[int]:
        return sorted(chain.from_iterable(self.ids()))

    async def lose(self, index: int, is_idle: bool = False) -> None:
        """Lose a worker while all that can run does, or nothing."""
        replica = self.replicas.all[index]
        if not is_idle:
            replica.core.apply(Plan(0.0))
        replica.executor.is_ready = False  # type: ignore[misc]
        for failed in replica.core.apply(Restart()):
            replica.core.apply(Finish(failed.sequence_id, FinishReason.ERROR))
            self.registry.remove(failed.sequence_id)
        await self.supervisor.core_lost(replica.core, WorkerLost("killed"))

    async def replace(self, index: int) -> None:
        replica = self.replicas.all[index]
        replica.executor.is_ready = True  # type: ignore[misc]
        await self.supervisor.core_ready(replica.core)
