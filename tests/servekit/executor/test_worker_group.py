"""Tests of a group of ranks: one answer of all, and one loss of all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from servekit.errors import ServekitError, WorkerLost
from servekit.executor import worker_group
from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.protocol.messages import StepResult, WorkerReady
from tests.servekit.executor.conftest import PLAN, Start


def start_group(start: Start, *behaviours: str, first: str = "works") -> tuple[WorkerGroup, list[ServekitError | None]]:
    """A group whose first rank works, and whose others behave as given; and what it reports when it is lost."""
    losses: list[ServekitError | None] = []
    of_ranks = [first, *behaviours]
    group = WorkerGroup(
        len(of_ranks), 0, lambda rank, on_loss: start(of_ranks[rank], on_loss)[1], lambda: losses.append(group.loss)
    )
    return group, losses


async def compute_steps(group: WorkerGroup) -> None:
    for _ in range(2):
        group.send(PLAN)
        await group.receive(20)


async def test_ranks_that_agree_are_one_worker(start: Start) -> None:
    group, losses = start_group(start, "acknowledges", "acknowledges")
    assert isinstance(await group.receive(20), WorkerReady)
    for _ in range(3):
        group.send(PLAN)
        assert isinstance(await group.receive(20), StepResult)
    assert not losses and group.loss is None
    await group.end(graceful=True)


async def test_a_block_that_one_rank_could_not_load_is_lost_for_all(start: Start) -> None:
    group, _ = start_group(start, "acknowledges and loads less", "acknowledges and loads less", first="loads")
    await group.receive(20)
    group.send(PLAN)
    result = await group.receive(20)
    assert isinstance(result, StepResult) and result.transfers is not None
    assert result.transfers.failed_loads == (0, 2) and result.transfers.num_received == 3
    assert result.transfers.dropped_keys == (b"a" * 16, b"b" * 16, b"c" * 16)
    assert result.transfers.block_bytes == 200, "of all parts together"
    await group.end(graceful=True)


@pytest.mark.parametrize(
    ("first", "other"), [("loads", "acknowledges"), ("works", "acknowledges and loads less")], ids=["first", "other"]
)
async def test_ranks_of_which_only_one_says_what_it_loaded_are_lost(start: Start, first: str, other: str) -> None:
    group, _ = start_group(start, other, first=first)
    await group.receive(20)
    with pytest.raises(WorkerLost, match="answered StepAcknowledged, which does not fit"):
        await compute_steps(group)
    await group.end()


@pytest.mark.parametrize(
    ("behaviour", "cause", "expected"),
    [
        (
            "acknowledges other tokens",
            "garbage",
            "rank 1 of the model worker answered StepAcknowledged, which does",
        ),
        ("works", "garbage", "rank 1 of the model worker answered StepResult, which does not fit rank 0's StepResult"),
        ("runs out of memory", "out_of_memory", "rank 1 of the model worker ran out of memory: no memory"),
        ("exits within a message", "ended", "rank 1 of 2: the model worker exited with code 0"),
        ("sends garbage", "garbage", "rank 1 of 2: the model worker sent an invalid message"),
    ],
)
async def test_the_failure_of_one_rank_is_the_loss_of_all(
    start: Start, behaviour: str, cause: str, expected: str
) -> None:
    group, losses = start_group(start, behaviour)
    await group.receive(20)
    with pytest.raises(WorkerLost, match=expected):
        await compute_steps(group)
    assert group.cause == cause
    assert losses == [group.loss], "reported once"
    await group.end()


async def test_a_rank_that_is_killed_while_rank_0_waits_for_it_is_noticed_at_once(start: Start) -> None:
    """Rank 0 waits in the middle of a step, and would for half an hour."""
    processes = []

    def start_rank(rank: int, on_loss: object) -> object:
        process, worker = start("hangs" if rank == 0 else "acknowledges", on_loss)  # type: ignore[arg-type]
        processes.append(process)
        return worker

    group = WorkerGroup(2, 0, start_rank, lambda: None)  # type: ignore[arg-type]
    await group.receive(20)
    group.send(PLAN)
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rank 1 of 2: the model worker was killed by SIGKILL"):
        await group.receive(600)
    await group.end()


async def test_the_end_of_a_rank_is_the_cause_although_another_one_reports_a_failed_exchange_first(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "CAUSE_TIMEOUT_S", 600.0)
    processes, has_failed = [], asyncio.Event()

    def start_rank(rank: int, on_loss: Callable[[], None]) -> WorkerConnection:
        def on_rank_loss() -> None:
            on_loss()
            has_failed.set()

        process, worker = start("fails" if rank == 0 else "hangs", on_rank_loss)
        processes.append(process)
        return worker

    group = WorkerGroup(2, 0, start_rank, lambda: None)
    await group.receive(20)
    group.send(PLAN)
    async with asyncio.timeout(60):
        await has_failed.wait()
    assert group.loss is None
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="rank 1 of 2: the model worker was killed by SIGKILL"):
        await group.receive(20)
    assert group.cause == "ended"
    await group.end()


async def test_a_rank_that_fails_by_itself_is_the_cause(start: Start) -> None:
    group, losses = start_group(start, "fails")
    await group.receive(20)
    with pytest.raises(WorkerLost, match="rank 1 of 2: the model worker failed: RuntimeError"):
        await compute_steps(group)
    assert group.cause == "failed" and losses == [group.loss]
    await group.end()


async def test_ranks_with_different_numbers_of_blocks_do_not_serve(start: Start) -> None:
    group, _ = start_group(start, "has other blocks")
    with pytest.raises(WorkerLost, match="answered WorkerReady, which does not fit"):
        await group.receive(20)
    await group.end()


async def test_a_rank_that_cannot_be_started_ends_those_before_it(start: Start) -> None:
    processes = []

    def start_rank(rank: int, on_loss: object) -> object:
        if rank == 2:
            raise OSError("too many open files")
        process, worker = start("works", on_loss)  # type: ignore[arg-type]
        processes.append(process)
        return worker

    group = WorkerGroup(3, 0, start_rank, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(WorkerLost, match="rank 2 of 3 of the model worker did not start: too many open files"):
        await group.receive(20)
    await group.end()
    assert [await process.wait_ended(20) for process in processes] == [True, True]
