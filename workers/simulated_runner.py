"""A device that is not there: steps take as long as they are said to, and its model answers with bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from servekit.messages import LoadModel, ModelInfo, StepPlan, StepResult, WorkerReady
from servekit.simulated_model import DEFAULT_MAX_MODEL_LEN, SimulatedModel, parse_simulated
from servekit.simulated_worker import VOCAB_SIZE, SimulatedWorker
from workers.runner import Pending, done

KV_TOKENS = 2**20  # in the pool, where nothing else is said; a page of the model is a list of numbers
KV_BYTES_PER_TOKEN = 8


class SimulatedRunner:
    """Does a step at once, and tells of it when it would have been done."""

    runs_ahead = False

    def __init__(self, model: SimulatedModel, worker: SimulatedWorker) -> None:
        self._model = model
        self._worker = worker

    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        started = time.monotonic()
        result = self._worker.execute(plan)
        remaining_s = started + self._model.duration_s(plan) - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)
        result = replace(result, step_time_s=time.monotonic() - started)
        return done(result)


def load(settings: LoadModel, tell: Callable[[str], None]) -> tuple[SimulatedRunner, WorkerReady]:
    """As a model's loading, but for the model. Raises ConfigError."""
    model = parse_simulated(settings.model_path)
    tell("pretending to load weights")
    time.sleep(model.load_s)
    num_blocks = settings.num_kv_blocks or -(-KV_TOKENS // settings.block_size)
    worker = SimulatedWorker(num_blocks, settings.block_size, settings.max_num_batched_tokens)
    info = ModelInfo(
        architecture="Simulated",
        num_parameters=0,
        vocab_size=VOCAB_SIZE,
        max_model_len=settings.max_model_len or DEFAULT_MAX_MODEL_LEN,
        eos_token_ids=(),
        default_temperature=0.0,
        default_top_k=0,
        default_top_p=1.0,
    )
    ready = WorkerReady(info, "simulated", "none", num_blocks, KV_BYTES_PER_TOKEN, model.load_s)
    return SimulatedRunner(model, worker), ready
