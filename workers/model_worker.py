"""The worker's main loop: receive a message, execute it, answer."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from servekit.errors import ConfigError
from servekit.messages import (
    FromWorker,
    LoadModel,
    Shutdown,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from servekit.queues import MessageReceiver, MessageSender
from workers.model_manager import ModelManager
from workers.model_runner import ModelRunner

log = logging.getLogger("servekit.worker")


class ModelWorker:
    """One process, one device, one model; holds nothing that the manager could not have computed again."""

    def __init__(self, tasks: MessageReceiver[ToWorker], results: MessageSender[FromWorker]) -> None:
        self._tasks = tasks
        self._results = results
        self._runner: ModelRunner | None = None

    def run(self) -> int:
        """Serve until told to stop, or until the manager is gone; returns the exit code."""
        try:
            while not isinstance(message := self._tasks.receive(), Shutdown):
                self._results.send(self._handle(message))
        except (EOFError, BrokenPipeError):
            log.warning("the manager is gone")
        except ConfigError as error:
            self._results.send(WorkerFailed(error.message, is_config_error=True))
            return 2
        except Exception as error:
            log.exception("the worker failed")
            self._results.send(WorkerFailed(f"{type(error).__name__}: {error}"))
            return 1
        return 0

    def _handle(self, message: LoadModel | StepPlan) -> FromWorker:
        match message:
            case LoadModel():
                return self._load(message)
            case StepPlan():
                return self._execute(message)

    def _load(self, settings: LoadModel) -> WorkerReady:
        started = time.monotonic()
        loaded = ModelManager(settings.device).load(Path(settings.model_path), settings.dtype, settings.max_model_len)
        self._runner = ModelRunner(loaded, settings)
        distance = self._runner.self_check()
        self._runner.constraints.warm_up()
        elapsed_s = time.monotonic() - started
        log.info(
            "loaded %.1f M parameters in %.1f s; paged logits agree with transformers' within %.1g",
            loaded.info.num_parameters / 1e6,
            elapsed_s,
            distance,
        )
        return WorkerReady(
            model=loaded.info,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            num_blocks=self._runner.cache.num_blocks,
            kv_bytes_per_token=self._runner.kv_bytes_per_token,
            load_time_s=elapsed_s,
        )

    def _execute(self, plan: StepPlan) -> StepResult:
        assert self._runner is not None, "a step before the model was loaded"
        return self._runner.execute(plan.with_grammars_back())
