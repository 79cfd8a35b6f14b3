"""The worker's main loop: receive a message, execute it, answer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
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
from workers.runner import OutOfMemory, Pending, Runner, done

if TYPE_CHECKING:
    from workers.profiler import Profiler

log = logging.getLogger("servekit.worker")

# How often a step under way is asked whether it is done. A plan or a result waits so long at most, a tenth of the
# shortest steps there are; a plan does so while the device is busy. It costs 35 us of a processor each time, the sleep
# included, an eighth of a core in all, where to wait for CUDA's event spins on all of one.
POLL_S = 0.0002
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
        # Steps that were launched and not answered for, the oldest first: as many as the manager plans ahead.
        self._under_way: deque[Pending[StepResult] | Pending[StepFailed]] = deque()

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
        """Wait for a message, and meanwhile answer for what is done.

        A plan goes first, for the device may be idle. What is under way is asked rather than waited for: whoever waits
        for a step cannot launch the one that comes meanwhile, and the device would begin it late.
        """
        while self._under_way and not self._tasks.has_message():
            if self._under_way[0].is_done():
                self._answer()
            else:
                time.sleep(POLL_S)
        return self._tasks.receive()

    def _launch(self, plan: StepPlan) -> None:
        """Begin a step; where the device has no queue of its own, it is over then."""
        assert self._runner is not None, "a step before the model was loaded"
        self._under_way.append(self._begin(plan, self._runner))
        if not self._runner.runs_ahead:
            self._settle()

    def _settle(self) -> None:
        """Wait for all that is under way, and answer for it."""
        while self._under_way:
            self._answer()

    def _answer(self) -> None:
        """Of the oldest step under way; waits for it if need be."""
        self._send(self._under_way.popleft().finish())

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

    def _begin(self, plan: StepPlan, runner: Runner) -> Pending[StepResult] | Pending[StepFailed]:
        if plan.epoch == self._failed_epoch:
            return done(StepFailed(plan.epoch, plan.step_id, "the step before it failed"))
        plan = plan.with_grammars_back()
        try:
            return runner.launch(plan) if self._profiler is None else self._profiler.launch(plan, runner)
        except OutOfMemory as error:
            self._failed_epoch = plan.epoch  # the manager begins again in another one, and seats everybody anew
            return done(StepFailed(plan.epoch, plan.step_id, str(error)))

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
