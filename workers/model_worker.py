"""Run the worker of a language model: load the model, execute step plans, send their results."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from servekit.errors import ConfigError
from servekit.protocol.cpu_dtype import read_stored_numbers
from servekit.protocol.cpu_list import format_cpu_list
from servekit.protocol.framing import MessageReceiver, MessageSender
from servekit.protocol.light_imports import light_imports
from servekit.protocol.lora import LoadAdapter
from servekit.protocol.messages import (
    FromWorker,
    ListBlocks,
    Loading,
    LoadModel,
    Profiled,
    RankInfo,
    StartProfile,
    StepAcknowledged,
    StepFailed,
    StepPlan,
    StepResult,
    StopProfile,
    ToWorker,
    WorkerReady,
)
from servekit.simulation.model import is_simulated
from workers.csrc.build import compile_ahead
from workers.runner.interface import OutOfMemory, Pending, Runner, done
from workers.worker_loop import WorkerLoop

if TYPE_CHECKING:
    from workers.runner.profiler import Profiler

log = logging.getLogger("servekit.worker")

# How often the oldest step in flight is polled. This is the longest that a plan or a result waits, a tenth of the
# shortest steps; a plan waits only while the device is busy. Each poll takes 35 us of a processor, the sleep included:
# 12 % of a core in all. Waiting for CUDA's event would spin on a whole core.
POLL_S = 0.0002
NVIDIA_DRIVER = Path("/dev/nvidiactl")  # exists if the driver is loaded; asking torch would take seconds for its import


class ModelWorker(WorkerLoop):
    """One process, one device, one model or one rank's part of it.

    All of its state can be computed again by the manager's plans.
    """

    def __init__(self, tasks: MessageReceiver[ToWorker], results: MessageSender[FromWorker]) -> None:
        super().__init__(tasks, results)
        self._runner: Runner | None = None
        self._sends_results = True
        self._failed_epoch: int | None = None
        self._profiler: Profiler | None = None
        # Steps that were launched and not answered, the oldest first: as many as the manager plans ahead.
        self._in_flight: deque[Pending[StepResult] | Pending[StepFailed]] = deque()

    def execute(self, message: ToWorker) -> None:
        """Launch a step; handle any other message when the steps before it are answered."""
        if isinstance(message, StepPlan):
            self._launch(message)
        else:
            self._answer_all()
            self.send(self._handle(message))

    def receive(self) -> ToWorker:
        """Wait for a message, and answer steps that become complete in the meantime.

        A message goes before answers, because the device may be idle. Steps are polled: if the worker waited for a
        step, it could not launch the next plan during this time, and the device would begin it late.
        """
        while self._in_flight and not self.tasks.has_message():
            if self._in_flight[0].is_done():
                self._answer_oldest()
            else:
                time.sleep(POLL_S)
        return self.tasks.receive()

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step. If the device has no queue of its own, the step is complete afterwards."""
        assert self._runner is not None, "a step before the model was loaded"
        self._in_flight.append(self._begin(plan, self._runner))
        if not self._runner.runs_ahead:
            self._answer_all()

    def _answer_all(self) -> None:
        """Wait for all steps in flight, and send their answers."""
        while self._in_flight:
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        """Send the answer of the oldest step in flight; wait for the step if it is not complete."""
        answer = self._in_flight.popleft().finish()
        self.send(answer if self._sends_results or isinstance(answer, StepFailed) else StepAcknowledged.of(answer))

    def _handle(self, message: ToWorker) -> FromWorker:
        match message:
            case LoadModel():
                return self._load(message)
            case StartProfile():
                return self._start_profile(message)
            case StopProfile():
                return self._stop_profile()
            case LoadAdapter():
                assert self._runner is not None, "an adapter before the model was loaded"
                return self._runner.load_adapter(message.adapter)
            case ListBlocks():
                assert self._runner is not None, "a question for blocks before the model was loaded"
                return self._runner.list_blocks(message.start)
            case _:
                raise ValueError(f"{type(message).__name__} is not for a model worker")

    def _load(self, settings: LoadModel) -> WorkerReady:
        fingerprint = _fingerprint(settings)
        if settings.fingerprint not in ("", fingerprint):
            raise ConfigError(
                f"the model in {settings.model_path} on {socket.gethostname()} is not the one that the server's other "
                f"workers have loaded: its fingerprint is {fingerprint[:16]}, theirs {settings.fingerprint[:16]}; copy "
                "the same files there"
            )
        self._sends_results = settings.is_result_rank
        if is_simulated(settings.model_path):
            from workers.runner.simulated_runner import load
        else:
            if settings.device.startswith("cpu") or (settings.device == "auto" and not NVIDIA_DRIVER.exists()):
                stored = read_stored_numbers(Path(settings.model_path))
                on_auto = stored.cpu_dtype if settings.quantization is None else "float32"
                compile_ahead(on_auto if settings.dtype == "auto" else settings.dtype)
            with light_imports(shares_model=settings.num_ranks > 1):  # of torch, too, which takes seconds
                from workers.runner.model_runner import load  # type: ignore[assignment]
        settings = replace(settings, fingerprint=fingerprint)
        self._runner, ready = load(settings, lambda stage: self.send(Loading(stage)))
        place = RankInfo(ready.device, format_cpu_list(os.sched_getaffinity(0)))
        return replace(ready, model=replace(ready.model, fingerprint=fingerprint), ranks=(place,))

    def _begin(self, plan: StepPlan, runner: Runner) -> Pending[StepResult] | Pending[StepFailed]:
        """Launch a step; after an OutOfMemory, this step and all later ones of its epoch fail."""
        if plan.epoch == self._failed_epoch:
            return done(StepFailed(plan.epoch, plan.step_id, "the step before it failed"))
        if self._sends_results:
            plan = plan.unpack_grammars()  # the other ranks take the tokens that this one chooses by a grammar
        try:
            return runner.launch(plan) if self._profiler is None else self._profiler.launch(plan, runner)
        except OutOfMemory as error:
            self._failed_epoch = plan.epoch  # the manager restarts in another epoch, and assigns all slots anew
            return done(StepFailed(plan.epoch, plan.step_id, str(error)))

    def _start_profile(self, message: StartProfile) -> Profiled:
        if self._profiler is not None:
            return Profiled(refusal="a profile is recorded already; end it with POST /profile/stop")
        from workers.runner.profiler import Profiler  # and torch, which a simulated model does without

        self._profiler = Profiler(Path(message.directory), message.max_steps)
        return Profiled()

    def _stop_profile(self) -> Profiled:
        if self._profiler is None:
            return Profiled(
                refusal="no profile is recorded; start one with POST /profile/start. If the worker was replaced, "
                "what it had recorded is lost"
            )
        profiler, self._profiler = self._profiler, None
        return profiler.end()


def _fingerprint(settings: LoadModel) -> str:
    """Identify the model that `settings` name: its files, or the specification of a simulated one."""
    if is_simulated(settings.model_path):
        return settings.model_path
    from workers.loading.fingerprint import fingerprint  # which a simulated model does without

    return fingerprint(Path(settings.model_path), has_weights=settings.load_format != "dummy")
