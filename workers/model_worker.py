"""The worker's main loop: receive a message, execute it, answer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from servekit.errors import ConfigError
from servekit.messages import (
    HEARTBEAT_S,
    FromWorker,
    Heartbeat,
    Loading,
    LoadModel,
    Profiled,
    Shutdown,
    StartProfile,
    StepFailed,
    StepPlan,
    StepResult,
    StopProfile,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from servekit.queues import MessageReceiver, MessageSender
from servekit.simulated_model import is_simulated
from workers.c_library import compile_ahead
from workers.runner import OutOfMemory, Runner

if TYPE_CHECKING:
    from workers.profiler import Profiler

log = logging.getLogger("servekit.worker")

NVIDIA_DRIVER = Path("/dev/nvidiactl")  # there is one if this exists; torch knows more, but is not there yet


class ModelWorker:
    """One process, one device, one model; holds nothing that the manager could not have computed again."""

    def __init__(self, tasks: MessageReceiver[ToWorker], results: MessageSender[FromWorker]) -> None:
        self._tasks = tasks
        self._results = results
        self._sending = threading.Lock()  # answers and heartbeats share the queue
        self._runner: Runner | None = None
        self._failed_epoch: int | None = None
        self._profiler: Profiler | None = None
        self._launched: Callable[[], StepResult | StepFailed] | None = None  # a step that nobody has waited for yet

    def run(self) -> int:
        """Serve until told to stop, or until the manager is gone; returns the exit code."""
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()
        try:
            while not isinstance(message := self._receive(), Shutdown):
                if isinstance(message, StepPlan):
                    self._launch(message)
                else:
                    self._settle()
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

    def _receive(self) -> ToWorker:
        if not self._tasks.has_message():
            self._settle()  # nothing is to be launched behind the last step, so there is time to wait for it
        return self._tasks.receive()

    def _launch(self, plan: StepPlan) -> None:
        """Begin a step, and answer for the one before it, which the device was busy with meanwhile."""
        assert self._runner is not None, "a step before the model was loaded"
        finish = self._begin(plan, self._runner)
        self._settle()
        self._launched = finish
        if not self._runner.runs_ahead:
            self._settle()

    def _settle(self) -> None:
        """Wait for the step that was launched last, if there is one, and answer for it."""
        finish, self._launched = self._launched, None
        if finish is not None:
            self._send(finish())

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            self._results.send(message)

    def _beat(self) -> None:
        """Say that this process is there, also while a step takes its time."""
        with contextlib.suppress(OSError):
            while True:
                time.sleep(HEARTBEAT_S)
                self._send(Heartbeat())

    def _handle(self, message: LoadModel | StartProfile | StopProfile) -> FromWorker:
        match message:
            case LoadModel():
                return self._load(message)
            case StartProfile():
                return self._start_profile(message)
            case StopProfile():
                return self._stop_profile()

    def _load(self, settings: LoadModel) -> WorkerReady:
        if is_simulated(settings.model_path):
            from workers.simulated_runner import load
        else:
            if settings.device == "cpu" or (settings.device == "auto" and not NVIDIA_DRIVER.exists()):
                compile_ahead("float32" if settings.dtype == "auto" else settings.dtype)
            from workers.model_runner import load  # type: ignore[assignment]  # and torch, which takes seconds
        self._runner, ready = load(settings, lambda stage: self._send(Loading(stage)))
        return ready

    def _begin(self, plan: StepPlan, runner: Runner) -> Callable[[], StepResult | StepFailed]:
        """What is returned waits for the step's answer."""
        if plan.epoch == self._failed_epoch:
            return lambda: StepFailed(plan.epoch, plan.step_id, "the step before it failed")
        plan = plan.with_grammars_back()
        try:
            return runner.launch(plan) if self._profiler is None else self._profiler.launch(plan, runner)
        except OutOfMemory as error:
            self._failed_epoch = plan.epoch  # the manager begins again in another one, and seats everybody anew
            failed = StepFailed(plan.epoch, plan.step_id, str(error))
            return lambda: failed

    def _start_profile(self, message: StartProfile) -> Profiled:
        if self._profiler is not None:
            return Profiled(refusal="steps are being recorded already; POST /profile/stop ends that")
        from workers.profiler import Profiler  # and torch, which a simulated model does without

        self._profiler = Profiler(Path(message.directory), message.max_steps)
        return Profiled()

    def _stop_profile(self) -> Profiled:
        if self._profiler is None:
            return Profiled(
                refusal="no steps are being recorded; POST /profile/start begins, and what a worker had recorded that "
                "was lost is lost with it"
            )
        profiler, self._profiler = self._profiler, None
        return profiler.end()
