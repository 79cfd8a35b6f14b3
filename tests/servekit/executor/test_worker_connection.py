"""Tests of the messages to and from one worker: silence, late answers, requests beside steps, invalid messages."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from servekit.errors import WorkerLost, WorkerTimeout
from servekit.executor import worker_connection
from servekit.protocol.messages import Profiled, StartProfile, StepResult, StopProfile
from tests.servekit.executor.conftest import PLAN, Start, wait_for_loss
from tests.servekit.executor.stand_in_worker import READY, SLOW_PROFILE_S


async def test_heartbeat_timeout_is_longer_while_the_model_loads(start: Start) -> None:
    _, worker = start("stops while it loads", silence_s=0.05)
    began = time.monotonic()
    error = await wait_for_loss(worker)
    assert isinstance(error, WorkerTimeout) and "sent no heartbeat for 0.5 s" in error.message
    assert time.monotonic() - began > 0.5
    await worker.end()


async def test_a_hanging_step_times_out_although_heartbeats_arrive(start: Start) -> None:
    _, worker = start("hangs")
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    error = await wait_for_loss(worker, timeout_s=0.5)
    assert isinstance(error, WorkerTimeout) and "did not answer within 0.5 s" in error.message
    assert worker.cause == "step_timeout"
    await worker.end()


async def test_a_group_that_has_joined_and_ran_out_of_memory_is_lost_for_that(start: Start) -> None:
    """So the next steps are smaller, as after the loss of a group that the server started itself."""
    _, worker = start("is a group without memory")
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    with pytest.raises(WorkerLost, match="ran out of memory"):
        await worker.receive(60)
    assert worker.cause == "out_of_memory"
    await worker.end()


async def test_bytes_that_trickle_in_are_no_sign_of_life(start: Start) -> None:
    """A frame that never ends, byte by byte, is silence; the step has no time limit here."""
    _, worker = start("trickles", silence_s=0.3)
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    async with asyncio.timeout(60):
        with pytest.raises(WorkerTimeout, match=r"sent no heartbeat for 0\.3 s"):
            await worker.receive(None)
    assert worker.cause == "silence"
    await worker.end()


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
    _, worker = start(behaviour)
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    await asyncio.sleep(0.2)
    error = await wait_for_loss(worker)
    assert isinstance(error, WorkerLost) and expected in error.message
    await worker.end()


async def test_requests_get_their_own_answers_between_those_to_steps(start: Start) -> None:
    _, worker = start()
    assert await worker.receive(60) == READY
    worker.send(PLAN)
    first, second = (asyncio.create_task(worker.ask(StartProfile("", number))) for number in (3, 4))
    await asyncio.sleep(0)
    worker.send(PLAN)
    assert (await first, await second) == (Profiled(num_steps=3), Profiled(num_steps=4))
    assert [await worker.receive(60) for _ in range(2)] == [StepResult(0, 0, (7,), 0.0)] * 2
    await worker.end(graceful=True)


async def test_the_answer_to_a_cancelled_request_goes_to_no_other_request(start: Start) -> None:
    _, worker = start()
    assert await worker.receive(60) == READY
    cancelled = asyncio.create_task(worker.ask(StartProfile("", 3)))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await worker.ask(StartProfile("", 4)) == Profiled(num_steps=4)
    await worker.end(graceful=True)


async def test_a_worker_that_writes_a_profile_may_be_silent_and_steps_wait_for_it(start: Start) -> None:
    """After its answer the usual heartbeat timeout applies again."""
    _, worker = start("profiles slowly", silence_s=0.8)
    assert await worker.receive(60) == READY
    began = time.monotonic()
    request = asyncio.create_task(worker.ask(StopProfile()))
    await asyncio.sleep(0)
    worker.send(PLAN)
    assert await worker.receive(0.8) == StepResult(0, 0, (7,), 0.0)
    assert time.monotonic() - began > SLOW_PROFILE_S and await request == Profiled()
    error = await wait_for_loss(worker)
    assert isinstance(error, WorkerTimeout) and "sent no heartbeat for 0.8 s" in error.message
    await worker.end()


async def test_a_step_may_wait_for_a_request_that_was_sent_meanwhile(start: Start) -> None:
    _, worker = start("profiles slowly")
    assert await worker.receive(60) == READY
    waiting = asyncio.create_task(worker.receive(0.8))
    await asyncio.sleep(0.05)
    request = asyncio.create_task(worker.ask(StopProfile()))
    await asyncio.sleep(0.1)
    worker.send(PLAN)
    assert await waiting == StepResult(0, 0, (7,), 0.0) and await request == Profiled()
    await worker.end()


async def test_a_request_raises_the_loss_of_the_worker(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    process, worker = start("profiles slowly")
    assert await worker.receive(60) == READY
    request = asyncio.create_task(worker.ask(StopProfile()))
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="SIGKILL"):
        async with asyncio.timeout(60):
            await request
    with pytest.raises(WorkerLost, match="SIGKILL"):
        await worker.ask(StopProfile())
    await worker.end()
    _, stuck = start("profiles slowly")
    monkeypatch.setattr(worker_connection, "PROFILE_TIMEOUT_S", 0.5)
    assert await stuck.receive(60) == READY
    with pytest.raises(WorkerTimeout, match=r"did not answer StopProfile within 0\.5 s"):
        await stuck.ask(StopProfile())
    await stuck.end()
