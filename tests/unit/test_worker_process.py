"""Claims about one worker process: how its end, its silence and its nonsense are noticed, and how soon.

The process is a stand-in that speaks the protocol and computes nothing, so that each claim takes milliseconds.
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

from servekit import worker_process
from servekit.errors import ServekitError, WorkerLost, WorkerTimeout
from servekit.messages import LoadModel, Profiled, Row, StartProfile, StepPlan, StepResult, StopProfile
from servekit.worker_process import WorkerProcess
from tests.unit import stand_in_worker
from tests.unit.stand_in_worker import READY, SLOWLY_S

LOAD = LoadModel("", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9)
PLAN = StepPlan(0, 0, (), (Row(0, 0, 1, (1,), (), True),))


Start = Callable[..., WorkerProcess]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a stand-in that behaves in some way."""
    real = worker_process.subprocess.Popen
    started: list[WorkerProcess] = []

    def popen(command: list[str], **options: object) -> object:
        options["env"] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        return real([sys.executable, stand_in_worker.__file__, *command[4:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(worker_process.subprocess, "Popen", popen)

    def start(does: str = "works", on_loss: Callable[[], None] = lambda: None, silence_s: float = 3.0) -> WorkerProcess:
        process = WorkerProcess([does], silence_s, on_loss)
        process.send(LOAD)
        started.append(process)
        return process

    yield start
    for process in started:
        if process._process.poll() is None:
            process._process.kill()
            process._process.wait()


async def loss_of(process: WorkerProcess, timeout_s: float = 20) -> ServekitError:
    while True:
        try:
            await process.receive(timeout_s)
        except ServekitError as error:
            return error


async def test_a_worker_answers_and_ends_when_it_is_told_to(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY and process.stage == "pretending"
    process.send(PLAN)
    assert await process.receive(20) == StepResult(0, 0, (7,), 0.0)
    began = time.monotonic()
    await process.end(kindly=True)
    assert time.monotonic() - began < 1
    await process.end()
    assert process._process.returncode == 0


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")]
)
async def test_death_is_seen_within_a_tenth_of_a_second(start: Start, number: int, name: str) -> None:
    lost = asyncio.Event()
    process = start(on_loss=lost.set)
    assert await process.receive(20) == READY
    began = time.monotonic()
    os.kill(process.pid, number)
    async with asyncio.timeout(5):
        await lost.wait()
    assert time.monotonic() - began < 0.1
    error = await loss_of(process)
    assert isinstance(error, WorkerLost) and f"was ended by {name}" in error.message
    assert process.cause == "ended"
    await process.end()


async def test_a_child_that_holds_its_queue_open_does_not_hide_its_death(start: Start) -> None:
    process = start("child")
    assert await process.receive(20) == READY
    process.send(PLAN)
    began = time.monotonic()
    error = await loss_of(process)
    assert time.monotonic() - began < 1 and "SIGKILL" in error.message
    await process.end()


async def test_silence_is_noticed_and_the_stacks_are_in_the_log(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = start("silent", silence_s=1.0)
    assert await process.receive(20) == READY
    began = time.monotonic()
    error = await loss_of(process)
    assert isinstance(error, WorkerTimeout) and "no sign of life for 1 s" in error.message
    assert time.monotonic() - began < 3 and process.cause == "silence"
    await process.end()
    assert process._process.returncode == -signal.SIGKILL
    assert "Current thread" in capfd.readouterr().err


async def test_silence_while_the_model_loads_is_noticed_later(start: Start) -> None:
    process = start("stops while it loads", silence_s=0.2)
    began = time.monotonic()
    error = await loss_of(process)
    assert isinstance(error, WorkerTimeout) and "no sign of life for 2 s" in error.message
    assert time.monotonic() - began > 2
    await process.end()


async def test_a_step_that_hangs_is_given_up_though_the_heart_beats(start: Start) -> None:
    process = start("hangs")
    assert await process.receive(20) == READY
    process.send(PLAN)
    error = await loss_of(process, timeout_s=1.5)
    assert isinstance(error, WorkerTimeout) and "did not answer within 1.5 s" in error.message
    assert process.cause == "step_timeout"
    await process.end()


async def test_a_stopped_worker_can_be_ended(start: Start) -> None:
    process = start(silence_s=1.0)
    assert await process.receive(20) == READY
    os.kill(process.pid, signal.SIGSTOP)
    assert isinstance(await loss_of(process), WorkerTimeout)
    async with asyncio.timeout(5):
        await process.end()


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("garbage", "sent what nobody understands"),
        ("torn", "ended with exit code 0"),
        ("chatters", "sent what nobody understands"),
        ("answers", "an answer to no question"),
    ],
)
async def test_nonsense_ends_the_worker_and_nothing_else(start: Start, does: str, expected: str) -> None:
    process = start(does)
    assert await process.receive(20) == READY
    process.send(PLAN)
    await asyncio.sleep(0.2)
    error = await loss_of(process)
    assert isinstance(error, WorkerLost) and expected in error.message
    await process.end()


async def test_a_plan_that_the_pipe_cannot_hold_does_not_hold_up_the_loop(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY
    os.kill(process.pid, signal.SIGSTOP)
    large = StepPlan(0, 0, (), (Row(0, 0, 1, tuple(range(2_000_000)), (), True),))
    began = time.monotonic()
    process.send(large)
    assert time.monotonic() - began < 1
    os.kill(process.pid, signal.SIGCONT)
    assert await process.receive(20) == StepResult(0, 0, (7,), 0.0)
    await process.end(kindly=True)


async def test_a_question_has_its_own_answer_among_those_to_steps(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY
    process.send(PLAN)
    first, second = (asyncio.create_task(process.ask(StartProfile("", number))) for number in (3, 4))
    await asyncio.sleep(0)
    process.send(PLAN)
    assert (await first, await second) == (Profiled(num_steps=3), Profiled(num_steps=4))
    assert [await process.receive(20) for _ in range(2)] == [StepResult(0, 0, (7,), 0.0)] * 2
    await process.end(kindly=True)


async def test_whoever_goes_away_leaves_its_answer_to_nobody(start: Start) -> None:
    process = start()
    assert await process.receive(20) == READY
    gone = asyncio.create_task(process.ask(StartProfile("", 3)))
    await asyncio.sleep(0)
    gone.cancel()
    assert await process.ask(StartProfile("", 4)) == Profiled(num_steps=4)
    await process.end(kindly=True)


async def test_a_worker_that_writes_a_trace_may_be_silent_and_steps_wait_for_it(start: Start) -> None:
    """And when it has answered, its silence counts as before."""
    process = start("profiles slowly", silence_s=1.0)
    assert await process.receive(20) == READY
    began = time.monotonic()
    asked = asyncio.create_task(process.ask(StopProfile()))
    await asyncio.sleep(0)
    process.send(PLAN)
    assert await process.receive(0.5) == StepResult(0, 0, (7,), 0.0)
    assert time.monotonic() - began > SLOWLY_S and await asked == Profiled()
    error = await loss_of(process)
    assert isinstance(error, WorkerTimeout) and "no sign of life for 1 s" in error.message
    await process.end()


async def test_a_step_may_wait_for_a_question_that_was_asked_after_it_was_sent(start: Start) -> None:
    process = start("profiles slowly")
    assert await process.receive(20) == READY
    waiting = asyncio.create_task(process.receive(0.5))
    await asyncio.sleep(0.1)
    asked = asyncio.create_task(process.ask(StopProfile()))
    await asyncio.sleep(0.1)
    process.send(PLAN)
    assert await waiting == StepResult(0, 0, (7,), 0.0) and await asked == Profiled()
    await process.end()


async def test_whoever_asked_hears_of_the_loss(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start("profiles slowly")
    assert await process.receive(20) == READY
    asked = asyncio.create_task(process.ask(StopProfile()))
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        async with asyncio.timeout(10):
            await asked
    with pytest.raises(WorkerLost, match="SIGKILL"):
        await process.ask(StopProfile())
    await process.end()
    stuck = start("profiles slowly")
    monkeypatch.setattr(worker_process, "PROFILE_TIMEOUT_S", 0.5)
    assert await stuck.receive(20) == READY
    with pytest.raises(WorkerTimeout, match=r"did not answer StopProfile within 0\.5 s"):
        await stuck.ask(StopProfile())
    await stuck.end()
