"""Make the engine of a model: one that generates text, or one that embeds, reranks or classifies."""

from __future__ import annotations

from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.model_kind import GENERATE, choose_kind
from servekit.engine.predictor_engine import PredictorEngine
from servekit.protocol.prediction import PredictorKind

AnyEngine = LLMEngine | PredictorEngine


def make_engine(config: ServeConfig) -> AnyEngine:
    """Return the engine for the model that the settings name. It is not started. Raises ConfigError."""
    kind = choose_kind(config)
    return LLMEngine(config) if kind == GENERATE else PredictorEngine(config, PredictorKind(kind))
