"""Tests of one worker process: how its exit, its silence and its invalid messages are detected, and how soon.

The process is a stand-in that follows the protocol and computes nothing, so it starts fast.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servekit.errors import ServekitError, WorkerLost, WorkerTimeout
from servekit.executor import worker_process
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.messages import (
    LoadModel,
    Profiled,
    ScheduledChunk,
    StartProfile,
    StepPlan,
    StepResult,
    StopProfile,
)
from tests.servekit.executor import stand_in_worker
from tests.servekit.executor.stand_in_worker import READY, SLOW_PROFILE_S

LOAD = LoadModel("", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9)
PLAN = StepPlan(0, 0, (), (ScheduledChunk(0, 0, 1, (1,), (), True),))


Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts a stand-in with a behaviour."""
    real = worker_process.subprocess.Popen
    started: list[WorkerProcess] = []

    def popen(command: list[str], **options: object) -> object:
        options["env"] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        return real([sys.executable, stand_in_worker.__file__, *command[4:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(worker_process.subprocess, "Popen", popen)
    monkeypatch.setattr(worker_process, "HEARTBEAT_S", 0.05)  # the tick, so that silence is detected sooner

    def start(
        behaviour: str = "works", on_loss: Callable[[], None] = lambda: None, silence_s: float = 3.0
    ) -> WorkerProcess:
        process = WorkerProcess([behaviour], silence_s, on_loss)
        process.send(LOAD)
        started.append(process)
        return process

    yield start
    for process in started:
        if process._process.poll() is None:
            process._process.kill()
            process._process.wait()


async def wait_for_loss(process: WorkerProcess, timeout_s: float = 20) -> ServekitError:
    while True:
        try:
            await process.receive(timeout_s)
        except ServekitError as error:
            return error


async def test_a_worker_answers_and_exits_on_request(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY and process.stage == "pretending"
    process.send(PLAN)
    assert await process.receive(20) == StepResult(0, 0, (7,), 0.0)
    began = time.monotonic()
    await process.end(graceful=True)
    assert time.monotonic() - began < 1
    await process.end()
    assert process._process.returncode == 0


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")]
)
async def test_death_is_detected_within_100_ms(start: Start, number: int, name: str) -> None:
    lost = asyncio.Event()
    process = start(on_loss=lost.set)
    assert await process.receive(20) == READY
    began = time.monotonic()
    os.kill(process.pid, number)
    async with asyncio.timeout(5):
        await lost.wait()
    assert time.monotonic() - began < 0.1
    error = await wait_for_loss(process)
    assert isinstance(error, WorkerLost) and f"was killed by {name}" in error.message
    assert process.cause == "ended"
    await process.end()


async def test_death_is_detected_although_a_child_holds_the_pipe_open(start: Start) -> None:
    process = start("leaves a child")
    assert await process.receive(20) == READY
    process.send(PLAN)
    began = time.monotonic()
    error = await wait_for_loss(process)
    assert time.monotonic() - began < 1 and "SIGKILL" in error.message
    await process.end()


async def test_missing_heartbeats_are_detected_and_stacks_are_logged(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start("sends no heartbeats", silence_s=0.3)
    assert await process.receive(20) == READY
    began = time.monotonic()
    error = await wait_for_loss(process)
    assert isinstance(error, WorkerTimeout) and "sent no heartbeat for 0.3 s" in error.message
    assert time.monotonic() - began < 2 and process.cause == "silence"
    await process.end()
    assert process._process.returncode == -signal.SIGKILL
    assert "Current thread" in capfd.readouterr().err


async def test_heartbeat_timeout_is_longer_while_the_model_loads(start: Start) -> None:
    process = start("stops while it loads", silence_s=0.05)
    began = time.monotonic()
    error = await wait_for_loss(process)
    assert isinstance(error, WorkerTimeout) and "sent no heartbeat for 0.5 s" in error.message
    assert time.monotonic() - began > 0.5
    await process.end()


async def test_a_hanging_step_times_out_although_heartbeats_arrive(start: Start) -> None:
    process = start("hangs")
    assert await process.receive(20) == READY
    process.send(PLAN)
    error = await wait_for_loss(process, timeout_s=0.5)
    assert isinstance(error, WorkerTimeout) and "did not answer within 0.5 s" in error.message
    assert process.cause == "step_timeout"
    await process.end()


async def test_a_stopped_worker_can_be_killed(start: Start) -> None:
    process = start(silence_s=0.5)
    assert await process.receive(20) == READY
    os.kill(process.pid, signal.SIGSTOP)
    assert isinstance(await wait_for_loss(process), WorkerTimeout)
    async with asyncio.timeout(5):
        await process.end()


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ("sends garbage", "sent an invalid message"),
        ("exits within a message", "exited with code 0"),
        ("floods", "sent more than 64 messages that no request asked for"),
        ("answers no request", "a Profiled message without a request"),
    ],
)
async def test_an_invalid_message_is_reported_as_the_loss_of_the_worker(
    start: Start, behaviour: str, expected: str
) -> None:
    process = start(behaviour)
    assert await process.receive(20) == READY
    process.send(PLAN)
    await asyncio.sleep(0.2)
    error = await wait_for_loss(process)
    assert isinstance(error, WorkerLost) and expected in error.message
    await process.end()


async def test_a_plan_larger_than_the_pipe_does_not_block_the_event_loop(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY
    os.kill(process.pid, signal.SIGSTOP)
    large = StepPlan(0, 0, (), (ScheduledChunk(0, 0, 1, tuple(range(2_000_000)), (), True),))
    began = time.monotonic()
    process.send(large)
    assert time.monotonic() - began < 1
    os.kill(process.pid, signal.SIGCONT)
    assert await process.receive(20) == StepResult(0, 0, (7,), 0.0)
    await process.end(graceful=True)


async def test_requests_get_their_own_answers_between_those_to_steps(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY
    process.send(PLAN)
    first, second = (asyncio.create_task(process.ask(StartProfile("", number))) for number in (3, 4))
    await asyncio.sleep(0)
    process.send(PLAN)
    assert (await first, await second) == (Profiled(num_steps=3), Profiled(num_steps=4))
    assert [await process.receive(20) for _ in range(2)] == [StepResult(0, 0, (7,), 0.0)] * 2
    await process.end(graceful=True)


async def test_the_answer_to_a_cancelled_request_goes_to_no_other_request(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY
    cancelled = asyncio.create_task(process.ask(StartProfile("", 3)))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await process.ask(StartProfile("", 4)) == Profiled(num_steps=4)
    await process.end(graceful=True)


async def test_a_worker_that_writes_a_profile_may_be_silent_and_steps_wait_for_it(start: Start) -> None:
    """After its answer the usual heartbeat timeout applies again."""
    process = start("profiles slowly", silence_s=0.3)
    assert await process.receive(20) == READY
    began = time.monotonic()
    request = asyncio.create_task(process.ask(StopProfile()))
    await asyncio.sleep(0)
    process.send(PLAN)
    assert await process.receive(0.1) == StepResult(0, 0, (7,), 0.0)
    assert time.monotonic() - began > SLOW_PROFILE_S and await request == Profiled()
    error = await wait_for_loss(process)
    assert isinstance(error, WorkerTimeout) and "sent no heartbeat for 0.3 s" in error.message
    await process.end()


async def test_a_step_may_wait_for_a_request_that_was_sent_meanwhile(start: Start) -> None:
    process = start("profiles slowly")
    assert await process.receive(20) == READY
    waiting = asyncio.create_task(process.receive(0.3))
    await asyncio.sleep(0.05)
    request = asyncio.create_task(process.ask(StopProfile()))
    await asyncio.sleep(0.1)
    process.send(PLAN)
    assert await waiting == StepResult(0, 0, (7,), 0.0) and await request == Profiled()
    await process.end()


async def test_a_request_raises_the_loss_of_the_worker(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("profiles slowly")
    assert await process.receive(20) == READY
    request = asyncio.create_task(process.ask(StopProfile()))
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        async with asyncio.timeout(10):
            await request
    with pytest.raises(WorkerLost, match="SIGKILL"):
        await process.ask(StopProfile())
    await process.end()
    stuck = start("profiles slowly")
    monkeypatch.setattr(worker_process, "PROFILE_TIMEOUT_S", 0.5)
    assert await stuck.receive(20) == READY
    with pytest.raises(WorkerTimeout, match=r"did not answer StopProfile within 0\.5 s"):
        await stuck.ask(StopProfile())
    await stuck.end()
