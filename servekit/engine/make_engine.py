"""Make the engine of a model: one that generates text, or one that embeds, reranks or classifies."""

from __future__ import annotations

import time
from collections.abc import Callable

from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.model_kind import GENERATE, choose_kind
from servekit.engine.predictor_engine import PredictorEngine
from servekit.observability.metrics import ModelMetrics
from servekit.protocol.prediction import PredictorKind
from servekit.shared_budget import SharedBudget

AnyEngine = LLMEngine | PredictorEngine


def make_engine(
    config: ServeConfig,
    clock: Callable[[], float] = time.monotonic,
    metrics: ModelMetrics | None = None,
    result_budget: SharedBudget | None = None,
) -> AnyEngine:
    """Return the engine for the model that the settings name. It is not started. Raises ConfigError.

    `metrics` and `result_budget`, in logprobs, are given where the server has several models.
    """
    kind = choose_kind(config)
    if kind == GENERATE:
        return LLMEngine(config, clock, metrics, result_budget)
    return PredictorEngine(config, PredictorKind(kind), clock, metrics)
