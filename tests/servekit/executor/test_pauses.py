"""A container that is frozen, by `docker pause` for example, loses no worker: neither side ran meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from servekit.config import ServeConfig
from servekit.errors import ServekitError, WorkerTimeout
from servekit.executor.predictor_executor import PredictorExecutor
from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.protocol.messages import Profiled, StepResult, StopProfile
from servekit.protocol.prediction import PredictBatch, TextItem
from tests.servekit.executor.conftest import PLAN, Start
from tests.servekit.executor.stand_in_worker import READY
from tests.support.pauses import pause

TIMEOUT_S = 30.0
FROZEN_S = 3600.0
BATCH = PredictBatch(0, 0, (TextItem((1,)),))


async def freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all timers begin, move the clock on, and let those that are due run."""
    await asyncio.sleep(0.01)
    pause(monkeypatch, FROZEN_S)
    await asyncio.sleep(0.2)


async def test_a_step_and_its_worker_outlast_a_pause(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the heartbeats: none came for an hour."""
    _, worker = start(silence_s=10.0)
    assert await worker.receive(60) == READY
    waiting = asyncio.create_task(worker.receive(TIMEOUT_S))
    await freeze(monkeypatch)
    assert worker.loss is None and not waiting.done()
    worker.send(PLAN)
    assert await waiting == StepResult(0, 0, (7,), 0.0)
    await worker.end()


async def test_a_request_beside_the_steps_outlasts_a_pause(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker = start("profiles slowly")
    assert await worker.receive(60) == READY
    asking = asyncio.create_task(worker.ask(StopProfile()))
    await freeze(monkeypatch)
    assert worker.loss is None and await asking == Profiled()
    await worker.end()


async def start_group(start: Start) -> WorkerGroup:
    """A group whose first rank answers, and whose second one never does."""

    def start_rank(rank: int, on_loss: Callable[[], None]) -> WorkerConnection:
        connection: WorkerConnection = start("works" if rank == 0 else "hangs", on_loss)[1]
        return connection

    group = WorkerGroup(2, 0, start_rank, lambda: None)
    await group.receive(60)
    group.send(PLAN)
    return group


async def test_the_wait_for_the_other_ranks_outlasts_a_pause(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = await start_group(start)
    waiting = asyncio.create_task(group.receive(TIMEOUT_S))
    await asyncio.sleep(0.5)  # the first rank has answered
    await freeze(monkeypatch)
    assert group.loss is None and not waiting.done()
    waiting.cancel()
    await group.end()


async def test_a_rank_that_does_not_answer_ends_the_group_all_the_same(start: Start) -> None:
    group = await start_group(start)
    with pytest.raises(WorkerTimeout, match=r"did not all answer within 0\.5 s"):
        await group.receive(0.5)
    assert group.cause == "step_timeout"
    await group.end()


class SilentWorker:
    """Takes batches, and answers none."""

    def __init__(self) -> None:
        self.loss: ServekitError | None = None

    def send_payload(self, *_: object) -> None:
        pass

    def mark_lost(self, error: ServekitError, cause: str) -> None:
        self.loss = self.loss or error
        assert cause == "step_timeout"


def predictor_with(worker: SilentWorker, step_timeout: float) -> PredictorExecutor:
    executor = PredictorExecutor(ServeConfig(model="demo", step_timeout=step_timeout))
    executor._worker = worker  # type: ignore[assignment]
    executor.send(BATCH, 1)
    return executor


async def test_a_batch_of_a_predictor_outlasts_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SilentWorker()
    executor = predictor_with(worker, TIMEOUT_S)
    await freeze(monkeypatch)
    assert worker.loss is None
    executor._stop_timer()


async def test_a_predictor_that_does_not_answer_is_lost_all_the_same() -> None:
    worker = SilentWorker()
    predictor_with(worker, 0.05)
    await asyncio.sleep(0.5)
    assert isinstance(worker.loss, WorkerTimeout)
    assert "did not answer within 0.05 s" in worker.loss.message
