"""Tests of one worker process: how its exit is detected, how soon, and how it is ended."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from servekit.errors import WorkerLost, WorkerTimeout
from servekit.executor import worker_process
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.messages import ScheduledChunk, StepPlan, StepResult
from tests.servekit.executor.conftest import PLAN, Start, wait_for_loss
from tests.servekit.executor.stand_in_worker import READY
from tests.support.timing import again_if_late, assert_within


@again_if_late
async def test_a_worker_answers_and_exits_on_request(start: Start) -> None:
    process, worker = start()
    assert await worker.receive(60) == READY and worker.stage == "pretending"
    worker.send(PLAN)
    assert await worker.receive(60) == StepResult(0, 0, (7,), 0.0)
    began = time.monotonic()
    await worker.end(graceful=True)
    elapsed_s = time.monotonic() - began
    await worker.end()
    assert process._process.returncode == 0
    assert_within(1, elapsed_s)


@again_if_late
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")]
)
async def test_death_is_detected_within_100_ms(start: Start, number: int, name: str) -> None:
    lost = asyncio.Event()
    process, worker = start(on_loss=lost.set)
    assert await worker.receive(60) == READY
    began = time.monotonic()
    os.kill(process.pid, number)
    async with asyncio.timeout(60):
        await lost.wait()
    elapsed_s = time.monotonic() - began
    error = await wait_for_loss(worker)
    assert isinstance(error, WorkerLost) and f"was killed by {name}" in error.message
    assert worker.cause == "ended"
    await worker.end()
    assert_within(0.1, elapsed_s)


async def test_death_is_detected_although_a_child_holds_the_pipe_open(start: Start) -> None:
    _, worker = start("leaves a child")
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    error = await wait_for_loss(worker, timeout_s=10)  # the child lives longer
    assert "SIGKILL" in error.message
    await worker.end()


async def test_the_signal_is_known_although_the_process_ends_long_after_its_pipe(start: Start) -> None:
    _, worker = start("closes its pipe before it is killed")
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    loss = asyncio.create_task(wait_for_loss(worker))
    num_turns = 0
    while not loss.done():
        await asyncio.sleep(0.01)
        num_turns += 1
    assert "was killed by SIGKILL" in (await loss).message
    assert num_turns >= 10, "the event loop does not wait for the half second between the two ends"
    await worker.end()


async def test_a_worker_that_only_closes_its_pipe_is_lost_soon(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "EXIT_TIMEOUT_S", 0.2)
    process, worker = start("closes its pipe")
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    assert "closed its result pipe (EOFError)" in (await wait_for_loss(worker, timeout_s=30)).message
    await worker.end()
    assert process._process.returncode == -signal.SIGKILL


async def test_missing_heartbeats_are_detected_and_stacks_are_logged(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process, worker = start("sends no heartbeats", silence_s=0.3)
    assert await worker.receive(60) == READY
    error = await wait_for_loss(worker)
    assert isinstance(error, WorkerTimeout) and "sent no heartbeat for 0.3 s" in error.message
    assert worker.cause == "silence"
    await worker.end()
    assert process._process.returncode == -signal.SIGKILL
    assert "Current thread" in capfd.readouterr().err


async def test_a_stopped_worker_can_be_killed(start: Start) -> None:
    process, worker = start(silence_s=0.5)
    assert await worker.receive(60) == READY
    os.kill(process.pid, signal.SIGSTOP)
    assert isinstance(await wait_for_loss(worker), WorkerTimeout)
    async with asyncio.timeout(60):
        await worker.end()


@again_if_late
async def test_a_plan_larger_than_the_pipe_does_not_block_the_event_loop(start: Start) -> None:
    process, worker = start()
    assert await worker.receive(60) == READY
    os.kill(process.pid, signal.SIGSTOP)
    large = StepPlan(0, 0, (), (ScheduledChunk(0, 0, 1, tuple(range(2_000_000)), (), True),))
    began = time.monotonic()
    worker.send(large)
    elapsed_s = time.monotonic() - began
    os.kill(process.pid, signal.SIGCONT)
    assert await worker.receive(60) == StepResult(0, 0, (7,), 0.0)
    await worker.end(graceful=True)
    assert_within(1, elapsed_s)


async def test_workers_keep_few_kernels_of_onednn_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel takes some 160 KB, and oneDNN keeps 1,024 by default: the worker's memory would grow for hours."""
    environments: list[dict[str, str]] = []

    def popen(command: list[str], *, env: dict[str, str], **options: object) -> None:
        environments.append(env)
        raise OSError("not started by this test")

    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    monkeypatch.setattr(worker_process.subprocess, "Popen", popen)
    for _ in range(2):
        with pytest.raises(OSError, match="not started"):
            WorkerProcess([])
        monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    assert [each["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] for each in environments] == ["128", "7"]
