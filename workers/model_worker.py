"""The worker's main loop: receive a message, execute it, answer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from servekit.errors import ConfigError
from servekit.messages import (
    HEARTBEAT_S,
    FromWorker,
    Heartbeat,
    Loading,
    LoadModel,
    Shutdown,
    StepFailed,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from servekit.queues import MessageReceiver, MessageSender
from servekit.simulated_model import is_simulated
from workers.runner import OutOfMemory, Runner

log = logging.getLogger("servekit.worker")


class ModelWorker:
    """One process, one device, one model; holds nothing that the manager could not have computed again."""

    def __init__(self, tasks: MessageReceiver[ToWorker], results: MessageSender[FromWorker]) -> None:
        self._tasks = tasks
        self._results = results
        self._sending = threading.Lock()  # answers and heartbeats share the queue
        self._runner: Runner | None = None
        self._failed_epoch: int | None = None

    def run(self) -> int:
        """Serve until told to stop, or until the manager is gone; returns the exit code."""
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        try:
            while not isinstance(message := self._tasks.receive(), Shutdown):
                self._send(self._handle(message))
        except (EOFError, BrokenPipeError):
            log.warning("the manager is gone")
        except ConfigError as error:
            self._send(WorkerFailed(error.message, is_config_error=True))
            return 2
        except Exception as error:
            log.exception("the worker failed")
            self._send(WorkerFailed(f"the model worker failed: {type(error).__name__}: {error}"))
            return 1
        return 0

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            self._results.send(message)

    def _beat(self) -> None:
        """Say that this process is there, also while a step takes its time."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(HEARTBEAT_S)
                self._send(Heartbeat())

    def _handle(self, message: LoadModel | StepPlan) -> FromWorker:
        match message:
            case LoadModel():
                return self._load(message)
            case StepPlan():
                return self._execute(message)

    def _load(self, settings: LoadModel) -> WorkerReady:
        if is_simulated(settings.model_path):
            from workers.simulated_runner import load
        else:
            from workers.model_runner import load  # type: ignore[assignment]  # and torch, which takes seconds
        self._runner, ready = load(settings, lambda stage: self._send(Loading(stage)))
        return ready

    def _execute(self, plan: StepPlan) -> StepResult | StepFailed:
        assert self._runner is not None, "a step before the model was loaded"
        if plan.epoch == self._failed_epoch:
            return StepFailed(plan.epoch, plan.step_id, "the step before it failed")
        try:
            return self._runner.execute(plan.with_grammars_back())
        except OutOfMemory as error:
            self._failed_epoch = plan.epoch  # the manager begins again in another one, and seats everybody anew
            return StepFailed(plan.epoch, plan.step_id, str(error))
