"""A stand-in for a worker process: it follows the protocol and computes nothing, so it starts fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servekit.errors import ServekitError
from servekit.executor import worker_connection, worker_process
from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.messages import LoadModel, ScheduledChunk, StepPlan
from tests.servekit.executor import stand_in_worker

LOAD = LoadModel("", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9)
PLAN = StepPlan(0, 0, (), (ScheduledChunk(0, 0, 1, (1,), (), True),))

Start = Callable[..., tuple[WorkerProcess, WorkerConnection]]


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let worker processes be stand-ins, whose behaviour is the argument of the process."""
    real = worker_process.subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        options["env"] = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        return real([sys.executable, stand_in_worker.__file__, *command[4:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(worker_process.subprocess, "Popen", popen)
    monkeypatch.setattr(worker_connection, "HEARTBEAT_S", 0.05)  # the tick, so that silence is detected sooner


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts a stand-in with a behaviour."""
    use_stand_ins(monkeypatch)
    started: list[WorkerProcess] = []

    def start(
        behaviour: str = "works", on_loss: Callable[[], None] = lambda: None, silence_s: float = 60.0
    ) -> tuple[WorkerProcess, WorkerConnection]:
        process = WorkerProcess([behaviour])
        worker = WorkerConnection(process, silence_s, on_loss)
        worker.send(LOAD)
        started.append(process)
        return process, worker

    yield start
    for process in started:
        if process._process.poll() is None:
            process._process.kill()
            process._process.wait()


async def wait_for_loss(worker: WorkerConnection, timeout_s: float = 60) -> ServekitError:
    """The loss of a worker, whatever it answers before."""
    while True:
        try:
            await worker.receive(timeout_s)
        except ServekitError as error:
            return error
