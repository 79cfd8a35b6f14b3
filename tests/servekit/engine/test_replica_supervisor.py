"""Claims about replicas that lose their workers for good: outages, starts after growing pauses, workers that join."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

import pytest
from msgspec.structs import replace

from servekit.engine import replica_supervisor as supervisor_module
from servekit.engine import replicas as replicas_module
from servekit.engine.engine_core import EngineCore
from servekit.engine.replica import Replica
from servekit.errors import ConfigError, ContextTooLong, WorkerLost, WorkerNotReady
from servekit.executor.step_timeout import vacated_backoff_s
from servekit.protocol.handshake import Role
from servekit.protocol.messages import LoadModel, WorkerReady
from tests.support.replicas import READY, Core, Executor, Fleet, Source, joined_worker
from tests.support.scheduler import make_manager


async def test_suspects_do_not_wait_for_ever_for_a_worker_that_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "REBALANCE_INTERVAL_S", 0.01)
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


async def test_requests_fail_after_the_restart_timeout_without_any_worker_and_the_outage_ends_with_a_new_one() -> None:
    fleet = Fleet(64, 64, worker_restart_timeout=0.05)
    async with fleet.serving():
        await fleet.lose(0)
        assert fleet.supervisor._outage_timer is None, "another one serves"
        await fleet.lose(1)
        await fleet.wait_until(lambda: bool(fleet.failures))
        (error,) = fleet.failures
        assert isinstance(error, WorkerNotReady) and "no model worker for 0.05 s" in error.message
        assert fleet.supervisor.outage is error
        await fleet.replace(0)
        assert fleet.supervisor.outage is None and fleet.failures == [error]


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
    await fleet.supervisor._vacate(replica, WorkerLost("lost"), lambda sequence_id, _: failed.append(sequence_id))
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
    await fleet.supervisor._vacate(replica, WorkerLost("lost"), lambda *_: None)
    assert fleet.replicas.limits == small
    with pytest.raises(ContextTooLong):
        fleet.add(large.max_total_tokens - 5, 5)
    replica.is_vacated = False  # a worker that has joined took its place
    assert fleet.replicas.limits == large


async def test_the_engine_fails_with_its_last_replica_or_with_a_task_of_its_own() -> None:
    fleet = Fleet(64, 64)
    serving = asyncio.create_task(fleet.supervisor.run(lambda _: None, lambda *_: None))
    await asyncio.sleep(0)
    fleet.fail(0)
    await fleet.wait_until(lambda: fleet.replicas.all[0].is_vacated)
    fleet.fail(1)
    assert "replica 1" in (await serving).message, "although the first one would start again in a minute"

    broken = Fleet(64, 64)
    broken.replicas.all[0].core.run = lambda: asyncio.sleep(60)  # type: ignore[method-assign, assignment, return-value]
    broken.replicas.all[1].core.run = lambda: asyncio.sleep(60)  # type: ignore[method-assign, assignment, return-value]
    broken.supervisor._rebalance_forever = failing  # type: ignore[method-assign]
    assert "a mistake" in (await broken.supervisor.run(lambda _: None, lambda *_: None)).message


async def test_a_replica_that_was_given_up_starts_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []

    def no_pause(first_s: float, num_failures: int) -> float:
        pauses_s.append(vacated_backoff_s(first_s, num_failures))
        return 0.0

    monkeypatch.setattr(supervisor_module, "vacated_backoff_s", no_pause)
    fleet = Fleet(64, 64, replica_restart_delay=7.0)
    first, second = fleet.replicas.all
    cast(Executor, first.executor).num_failing_starts = 6
    async with fleet.serving():
        fleet.fail(0)
        await fleet.wait_until(lambda: len(pauses_s) == 7 and first.state == "ready")
        assert pauses_s == [7, 14, 28, 56, 70, 70, 70]
        assert cast(Core, first.core).failed_starts == ["no memory"] * 6
        assert {fleet.add().index for _ in range(6)} == {0, 1}
        fleet.fail(1)
        await fleet.wait_until(lambda: len(pauses_s) == 8 and second.state == "ready")
        assert pauses_s[7] == 7, "each time from the beginning"


async def test_a_draining_server_starts_no_replica_again(monkeypatch: pytest.MonkeyPatch) -> None:
    has_paused = asyncio.Event()

    def no_pause(*_: float) -> float:
        has_paused.set()
        return 0.0

    monkeypatch.setattr(supervisor_module, "vacated_backoff_s", no_pause)
    fleet = Fleet(64, 64)
    async with fleet.serving():
        fleet.supervisor.drain()
        fleet.fail(0)
        await has_paused.wait()
        await fleet.wait_until(lambda: len(fleet.supervisor._helpers) == 1)  # the one that rebalances
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


async def test_workers_that_join_are_for_prefill_or_decode_as_they_say_or_as_is_needed() -> None:
    source = Source()
    fleet = Fleet(64, source=source, listen_workers="unix:/nowhere")
    fleet.supervisor._config = replace(fleet.supervisor._config, prefill_replicas=1)
    async with fleet.serving():
        for number, role in enumerate(("", "", "prefill", "decode"), start=1):
            source.join(f"gpu-{number}", cast(Role, role))
            await fleet.wait_until(lambda number=number: len(fleet.replicas.all) == 1 + number)
        joined = fleet.replicas.all[1:]
        assert [each.role.value for each in joined] == ["prefill", "decode", "prefill", "decode"]

        joined[0].executor._is_ready = False  # it waits for another worker
        await fleet.supervisor.core_lost(joined[0].core, WorkerLost("killed"))
        source.join("gpu-5", "prefill")
        source.join("gpu-6")
        source.join("gpu-7", "decode")
        await fleet.wait_until(lambda: len(fleet.replicas.all) == 6)
        assert fleet.replicas.all[5].executor.host == "gpu-7", "no replica waits for this one"
        assert [worker.offer.host for worker in source.workers] == ["gpu-5", "gpu-6"]
        assert all(map(joined[0].executor.accepts, source.workers))
        assert not joined[0].executor.accepts(joined_worker(role="decode"))


async def test_a_worker_that_joins_takes_the_place_of_one_that_left() -> None:
    fleet = Fleet(64, source=Source(), listen_workers="unix:/nowhere")
    async with fleet.serving():
        await fleet.supervisor._add_worker(joined_worker("gpu-7"))
        joined = fleet.replicas.all[1]
        fleet.fail(1)
        await fleet.wait_until(lambda: joined.is_vacated)
        await fleet.supervisor._add_worker(joined_worker("gpu-8"))
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
        await fleet.supervisor.start(load, make_core)
    assert not made


@pytest.mark.parametrize("error", [ConfigError("the journal cannot be created"), OSError("the disk is full")])
async def test_an_error_in_adding_a_worker_ends_that_worker_only(error: Exception) -> None:
    fleet = Fleet(64)
    added = fleet.add()
    tried: list[int] = []

    def make_core(replica: Replica) -> EngineCore:
        tried.append(replica.index)
        raise error

    fleet.supervisor._make_core = make_core
    for _ in range(2):
        worker = joined_worker()
        await fleet.supervisor._add_worker(worker)
        assert worker.connection.loss is not None
    assert tried == [1, 1] and fleet.replicas.all == [added] and fleet.add() is added


async def failing() -> None:
    raise RuntimeError("a mistake")
