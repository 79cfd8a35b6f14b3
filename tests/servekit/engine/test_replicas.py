"""Tests of several cores behind one engine: which one gets a sequence, and what happens when workers are lost.

The managers are the real ones. Workers are stood in for, so that a test decides when one is lost and when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from itertools import chain
from typing import Any, cast

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine import replicas as replicas_module
from servekit.engine.engine_core import EngineCore
from servekit.engine.replicas import Replica, Replicas
from servekit.engine.request_registry import RequestRegistry
from servekit.errors import ConfigError, ContextTooLong, ServekitError, WorkerLost, WorkerNotReady
from servekit.executor.joined_worker import JoinedWorker
from servekit.executor.step_timeout import vacated_backoff_s
from servekit.executor.worker_connection import WorkerConnection
from servekit.protocol.handshake import Offer
from servekit.protocol.messages import LoadModel, ModelInfo, WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Finish, Plan, Restart
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

    def write(self, data: bytes) -> None: ...

    def stop(self) -> None: ...

    async def wait_ended(self, timeout_s: float) -> bool:
        return True

    async def end(self, is_hung: bool = False) -> None: ...


class Core:
    """Stands in for a core: its manager is a real one, and its main loop ends with what is put into `failures`."""

    is_stalled = False

    def __init__(self, manager: WorkloadManager) -> None:
        self.manager = manager
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
        self.workers: asyncio.Queue[JoinedWorker] = asyncio.Queue()
        self.next_worker = self.workers.get

    def join(self, host: str = "gpu-7") -> None:
        self.workers.put_nowait(joined_worker(host))


def joined_worker(host: str = "gpu-7") -> JoinedWorker:
    connection = WorkerConnection(cast(Any, JoinedStream()), 10.0, lambda: None)
    return JoinedWorker(connection, Offer(host, "cuda:1", ""), READY)


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
        self.replicas = Replicas(config, self.registry, source)
        for replica, blocks in zip(self.replicas.all, num_blocks, strict=True):
            replica.executor = cast(Any, Executor())
            replica.core = cast(
                EngineCore, Core(make_manager(num_blocks=blocks, scheduling_policy=config.scheduling_policy))
            )
            self.replicas._router.add_replica(replica.index, replica.core.manager)
        self.replicas._make_core = lambda _: cast(EngineCore, Core(make_manager(num_blocks=64)))
        self.replicas._has_cores = True
        self.failures: list[ServekitError] = []  # that all clients got
        self.num_added = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Run the replicas until the end of the block."""
        task = asyncio.create_task(self.replicas.run(self.failures.append, lambda *_: None))
        await asyncio.sleep(0)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.replicas.stop(graceful=False)

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
        await self.replicas.core_lost(replica.core, WorkerLost("killed"))

    async def replace(self, index: int) -> None:
        replica = self.replicas.all[index]
        replica.executor.is_ready = True  # type: ignore[misc]
        await self.replicas.core_ready(replica.core)


def test_answers_to_one_prompt_go_to_one_replica_and_prompts_are_spread() -> None:
    fleet = Fleet(64, 64)
    chosen = [fleet.add(n=3).index for _ in range(10)]
    assert set(chosen) == {0, 1}
    assert fleet.replicas.num_waiting == 30 and fleet.replicas.queued.total.num_sequences == 30
    assert fleet.replicas.queued.of("").num_tokens == 150
    assert fleet.replicas.queued.by_tenant()[""].num_sequences == 30
    for first in range(0, 30, 3):
        assert sum({first, first + 1, first + 2} <= set(ids) for ids in fleet.ids()) == 1


def test_replicas_that_share_tenants_learn_what_the_others_computed() -> None:
    fleet = Fleet(64, 64, scheduling_policy="fair")
    for _ in range(6):
        fleet.add()
    for replica in fleet.replicas.all:
        replica.core.apply(Plan(0.0))
    queues = [replica.core.manager.waiting_queue for replica in fleet.replicas.all]
    computed = [queue.num_served("") for queue in queues]
    assert min(computed) > 0
    for _ in range(2):
        fleet.replicas._exchange_service()
        assert [queue.num_served("") for queue in queues] == [sum(computed)] * 2


async def test_sequences_of_a_lost_worker_go_to_the_others_and_the_registry_knows_them() -> None:
    fleet = Fleet(64, 64, 64)
    for _ in range(12):
        fleet.add(n=2)
    await fleet.lose(1)
    assert not fleet.ids()[1] and fleet.all_ids() == list(range(24))
    for replica in fleet.replicas.all:
        replica.core.manager.check()
        for sequence_id in replica.core.manager.sequence_ids:
            output = fleet.registry.output(sequence_id)
            assert output is not None and output.sequence is replica.core.manager.find(sequence_id)
    assert fleet.add() is not fleet.replicas.all[1]


async def test_without_another_worker_sequences_wait_for_the_first_one_that_is_ready() -> None:
    fleet = Fleet(64, 64)
    for _ in range(8):
        fleet.add()
    await fleet.lose(0)
    await fleet.lose(1, is_idle=True)
    assert fleet.all_ids() == list(range(8)) and fleet.replicas.num_ready == 0
    fleet.add()  # waits, too
    await fleet.replace(0)
    assert fleet.ids() == [list(range(9)), []]


async def test_suspects_wait_for_a_worker_of_their_own_and_all_at_one_replica() -> None:
    fleet = Fleet(64, 64, 64)
    for _ in range(6):
        fleet.add()
    await fleet.lose(0)
    lost = fleet.ids()[1]
    await fleet.lose(1)  # some of its sequences were in flight in the first loss, too
    suspects = fleet.replicas.all[1].core.manager.quarantine.sequence_ids
    assert suspects and set(suspects) < set(lost) and fleet.ids()[1] == suspects
    assert fleet.replicas.all[2].takes_sequences and not fleet.replicas.all[2].core.manager.quarantine
    await fleet.replace(0)
    assert fleet.ids()[1] == suspects, "they stay while another replica has a worker again"
    await fleet.replace(1)
    assert not fleet.replicas.all[1].takes_sequences
    assert {fleet.add().index for _ in range(6)} <= {0, 2}


async def test_suspects_do_not_wait_for_ever_for_a_worker_that_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "REBALANCE_INTERVAL_S", 0.01)
    monkeypatch.setattr(replicas_module, "SUSPECTS_WAIT_S", 0.05)
    fleet = Fleet(64, 64, 64)
    for replica in fleet.replicas.all[:2]:
        replica.placement = None
    for _ in range(6):
        fleet.add()
    await fleet.lose(0)
    await fleet.lose(1)
    suspects = fleet.replicas.all[1].core.manager.quarantine.sequence_ids
    assert suspects and fleet.ids()[1] == suspects
    async with fleet.serving():
        await fleet.wait_until(lambda: not fleet.ids()[1])
    assert fleet.replicas.all[2].core.manager.quarantine.sequence_ids == suspects, "they run alone there"
    assert fleet.all_ids() == list(range(6))


async def test_what_fits_on_the_largest_replica_only_waits_for_it() -> None:
    fleet = Fleet(8, 64)
    limit = fleet.replicas.limits.max_total_tokens
    assert limit == fleet.replicas.all[1].core.manager.config.max_total_tokens
    assert fleet.add(limit - 5, 5) is fleet.replicas.all[1]
    small = fleet.num_added
    while fleet.add() is not fleet.replicas.all[1]:
        small = fleet.num_added
    await fleet.lose(1)
    assert 0 in fleet.ids()[1], "it does not fit on the other one"
    assert small in fleet.ids()[0]
    assert fleet.add(limit - 5, 5) is fleet.replicas.all[1]


async def test_waiting_sequences_move_to_a_worker_that_is_back() -> None:
    fleet = Fleet(256, 256)
    await fleet.lose(1)
    for _ in range(200):
        fleet.add(length=40)
    assert not fleet.ids()[1]
    await fleet.replace(1)
    moved = fleet.ids()[1]
    assert moved and fleet.all_ids() == list(range(200))
    await fleet.replace(1)
    assert set(moved) <= set(fleet.ids()[1]), "none goes back"


def test_state_is_that_of_all_replicas() -> None:
    fleet = Fleet(64, 64)
    first, second = fleet.replicas.all
    assert [each.state for each in fleet.replicas.all] == ["ready", "ready"] and fleet.replicas.stage == "serving"
    first.executor.is_ready = False  # type: ignore[misc]
    assert first.state == "recovering" and fleet.replicas.num_ready == 1
    assert fleet.replicas.has_other_worker(first.core) and not fleet.replicas.has_other_worker(second.core)
    first.is_vacated = True
    assert first.state == "vacated" and first.info()["state"] == "vacated"
    assert fleet.add() is second


async def test_requests_fail_after_the_restart_timeout_without_any_worker_and_the_outage_ends_with_a_new_one() -> None:
    fleet = Fleet(64, 64, worker_restart_timeout=0.05)
    async with fleet.serving():
        await fleet.lose(0)
        assert fleet.replicas._outage_timer is None, "another one serves"
        await fleet.lose(1)
        await fleet.wait_until(lambda: bool(fleet.failures))
        (error,) = fleet.failures
        assert isinstance(error, WorkerNotReady) and "no model worker for 0.05 s" in error.message
        assert fleet.replicas.outage is error
        await fleet.replace(0)
        assert fleet.replicas.outage is None and fleet.failures == [error]


async def test_a_replica_that_is_given_up_does_not_end_the_wait_for_an_outage() -> None:
    """The other worker had joined, and was lost before. Requests must not wait for ever for one that joins."""
    fleet = Fleet(64, 64, worker_restart_timeout=0.05)
    own, joined = fleet.replicas.all
    joined.placement = None
    async with fleet.serving():
        await fleet.lose(1)
        await fleet.lose(0, is_idle=True)
        fleet.fail(0)
        await fleet.wait_until(lambda: own.is_vacated and bool(fleet.failures))
    assert "no model worker for 0.05 s" in fleet.failures[0].message


def test_an_end_reaches_a_sequence_wherever_it_is() -> None:
    fleet = Fleet(64, 64)
    for _ in range(4):
        fleet.add()
    fleet.replicas.finish([Finish(each, FinishReason.ABORT) for each in range(4)])
    assert fleet.ids() == [[], []]


async def test_what_fits_on_no_other_replica_fails_when_its_replica_is_vacated() -> None:
    fleet = Fleet(8, 64)
    limit = fleet.replicas.limits.max_total_tokens
    large, small = fleet.num_added, 1
    assert fleet.add(limit - 5, 5).index == 1
    while fleet.add().index != 1:
        small = fleet.num_added
    replica = fleet.replicas.all[1]
    await fleet.lose(1, is_idle=True)
    failed = []
    await fleet.replicas._vacate(replica, WorkerLost("lost"), lambda sequence_id, _: failed.append(sequence_id))
    assert failed == [large] and small in fleet.ids()[0] and replica.state == "vacated"
    assert fleet.add().index == 0


async def test_the_limits_are_those_of_the_replicas_that_can_still_serve() -> None:
    """Clients that leave max_tokens open get as much as fits: after the loss of the largest replica, that is less."""
    fleet = Fleet(8, 64)
    small, large = (replica.core.manager.config for replica in fleet.replicas.all)
    replica = fleet.replicas.all[1]
    assert fleet.replicas.limits == large
    await fleet.lose(1, is_idle=True)
    assert fleet.replicas.limits == large, "its worker is being replaced"
    await fleet.replicas._vacate(replica, WorkerLost("lost"), lambda *_: None)
    assert fleet.replicas.limits == small
    with pytest.raises(ContextTooLong):
        fleet.add(large.max_total_tokens - 5, 5)
    replica.is_vacated = False  # a worker that has joined took its place
    assert fleet.replicas.limits == large


async def test_the_engine_fails_with_its_last_replica_or_with_a_task_of_its_own() -> None:
    fleet = Fleet(64, 64)
    serving = asyncio.create_task(fleet.replicas.run(lambda _: None, lambda *_: None))
    await asyncio.sleep(0)
    fleet.fail(0)
    await fleet.wait_until(lambda: fleet.replicas.all[0].is_vacated)
    fleet.fail(1)
    assert "replica 1" in (await serving).message, "although the first one would start again in a minute"

    broken = Fleet(64, 64)
    broken.replicas.all[0].core.run = lambda: asyncio.sleep(60)  # type: ignore[method-assign, assignment, return-value]
    broken.replicas.all[1].core.run = lambda: asyncio.sleep(60)  # type: ignore[method-assign, assignment, return-value]
    broken.replicas._rebalance_forever = failing  # type: ignore[method-assign]
    assert "a mistake" in (await broken.replicas.run(lambda _: None, lambda *_: None)).message


async def test_a_replica_that_was_given_up_starts_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_min: list[float] = []

    def no_pause(num_failures: int) -> float:
        pauses_min.append(vacated_backoff_s(num_failures) / 60)
        return 0.0

    monkeypatch.setattr(replicas_module, "vacated_backoff_s", no_pause)
    fleet = Fleet(64, 64)
    first, second = fleet.replicas.all
    cast(Executor, first.executor).num_failing_starts = 6
    async with fleet.serving():
        fleet.fail(0)
        await fleet.wait_until(lambda: len(pauses_min) == 7 and first.state == "ready")
        assert pauses_min == [1, 2, 4, 8, 10, 10, 10]
        assert cast(Core, first.core).failed_starts == ["no memory"] * 6
        assert {fleet.add().index for _ in range(6)} == {0, 1}
        fleet.fail(1)
        await fleet.wait_until(lambda: len(pauses_min) == 8 and second.state == "ready")
        assert pauses_min[7] == 1, "each time from the beginning"


async def test_a_draining_server_starts_no_replica_again(monkeypatch: pytest.MonkeyPatch) -> None:
    has_paused = asyncio.Event()

    def no_pause(_: int) -> float:
        has_paused.set()
        return 0.0

    monkeypatch.setattr(replicas_module, "vacated_backoff_s", no_pause)
    fleet = Fleet(64, 64)
    async with fleet.serving():
        fleet.replicas.drain()
        fleet.fail(0)
        await has_paused.wait()
        await fleet.wait_until(lambda: len(fleet.replicas._helpers) == 1)  # the one that rebalances
        assert fleet.replicas.all[0].state == "vacated"


async def test_workers_that_join_serve_beside_the_servers_own() -> None:
    source = Source()
    fleet = Fleet(64, source=source, listen_workers="unix:/nowhere")
    own = fleet.replicas.all[0]
    async with fleet.serving():
        source.join("gpu-7")
        await fleet.wait_until(lambda: len(fleet.replicas.all) == 2)
        joined = fleet.replicas.all[1]
        assert [each.info()["host"] for each in fleet.replicas.all] == [None, "gpu-7"]
        assert {fleet.add().index for _ in range(6)} == {0, 1}

        await fleet.lose(0)
        assert not fleet.ids()[0], "they continue on the worker that has joined"
        for host in ("gpu-8", "gpu-9"):
            source.join(host)
        await fleet.wait_until(lambda: len(fleet.replicas.all) == 4)
        assert own.state == "recovering", "it starts a worker itself, and takes none that joins"
        fleet.fail(0)
        await fleet.wait_until(lambda: own.state == "vacated")
        source.join("gpu-10")
        await fleet.wait_until(lambda: len(fleet.replicas.all) == 5)
        assert own.state == "vacated" and joined.state == "ready"


async def test_a_worker_that_joins_takes_the_place_of_one_that_left() -> None:
    fleet = Fleet(64, source=Source(), listen_workers="unix:/nowhere")
    async with fleet.serving():
        await fleet.replicas._add_worker(joined_worker("gpu-7"))
        joined = fleet.replicas.all[1]
        fleet.fail(1)
        await fleet.wait_until(lambda: joined.is_vacated)
        await fleet.replicas._add_worker(joined_worker("gpu-8"))
        assert fleet.replicas.all[1] is joined and len(fleet.replicas.all) == 2
        assert joined.state == "ready" and joined.info()["host"] == "gpu-8"
        assert joined.describe() == "worker a worker: 8 KV blocks, cpu"


async def test_replicas_of_different_data_types_are_refused_at_the_start() -> None:
    """A sequence that moves from a CPU to a GPU would continue with other tokens."""
    fleet, made = Fleet(64, 64), list[Replica]()

    async def start(_: LoadModel, ready: WorkerReady) -> WorkerReady:
        return ready

    def make_core(replica: Replica) -> EngineCore:
        made.append(replica)
        return cast(EngineCore, Core(make_manager(num_blocks=64)))

    for replica, ready in zip(
        fleet.replicas.all, (READY, replace(READY, device="cuda:0", dtype="bfloat16")), strict=True
    ):
        replica.executor.start = partial(start, ready=ready)  # type: ignore[method-assign]
    load = LoadModel("/model", "auto", "auto", 16, 1, 1, None, 1, None, 0.9)
    with pytest.raises(ConfigError, match=r"replica 1 .* bfloat16 on cuda:0, .* float32 on cpu, .*--dtype float32"):
        await fleet.replicas.start(load, make_core)
    assert not made


@pytest.mark.parametrize("error", [ConfigError("the journal cannot be created"), OSError("the disk is full")])
async def test_an_error_in_adding_a_worker_ends_that_worker_only(error: Exception) -> None:
    fleet = Fleet(64)
    added = fleet.add()
    tried: list[int] = []

    def make_core(replica: Replica) -> EngineCore:
        tried.append(replica.index)
        raise error

    fleet.replicas._make_core = make_core
    for _ in range(2):
        worker = joined_worker()
        await fleet.replicas._add_worker(worker)
        assert worker.connection.loss is not None
    assert tried == [1, 1] and fleet.replicas.all == [added] and fleet.add() is added


async def failing() -> None:
    raise RuntimeError("a mistake")
