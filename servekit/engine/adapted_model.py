"""Present a model with a LoRA adapter as a model of its own, to requests that name the adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine.adapter_registry import AdapterUse
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.interface import Adapters, Engine, GeneratingEngine, ModelUse, ServedModel, WorkerReport, generates
from servekit.engine.live_view import LiveView
from servekit.engine.request_state import RequestState
from servekit.protocol.lora import LoraAdapter
from servekit.requests.generation import GenerationRequest


class _AdaptedEngine:
    """An engine that answers with an adapter. Everything else is the engine's own."""

    def __init__(self, engine: GeneratingEngine, adapter: LoraAdapter, config: ServeConfig) -> None:
        self._engine, self._adapter, self.config = engine, adapter, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def submit(self, request: GenerationRequest, caller: Caller = ANONYMOUS, places: Any = None) -> RequestState:
        return await self._engine.submit(replace(request, adapter=self._adapter), caller, places)


class _AdaptedUse:
    """A model and an adapter that one request uses."""

    def __init__(self, use: ModelUse, adapter: AdapterUse, config: ServeConfig) -> None:
        engine = use.engine
        assert generates(engine)
        self.engine = cast(GeneratingEngine, _AdaptedEngine(engine, adapter.adapter, config))
        self._use, self._adapter = use, adapter

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        return self._use.headers

    def release(self) -> None:
        self._adapter.release()
        self._use.release()


class AdaptedModel:
    """A model that a request names by the name of an adapter."""

    def __init__(self, parent: ServedModel, name: str, path: str) -> None:
        self.parent, self.name, self.path = parent, name, path

    def adapters_for(self, caller: Caller) -> Mapping[str, str]:
        """It has no adapters of its own."""
        return {}

    @property
    def kind(self) -> str:
        return self.parent.kind

    @property
    def config(self) -> ServeConfig:
        return replace(self.parent.config, served_model_name=self.name)

    @property
    def state(self) -> str:
        return self.parent.state

    @property
    def engine(self) -> Engine | None:
        return self.parent.engine

    @property
    def worker(self) -> WorkerReport | None:
        return self.parent.worker

    @property
    def max_prompt_tokens(self) -> int | None:
        return self.parent.max_prompt_tokens

    def now(self) -> float:
        return self.parent.now()

    async def live_view(self) -> LiveView:
        return await self.parent.live_view()

    def begin_use(self, caller: Caller) -> ModelUse | None:
        use = self.parent.begin_use(caller)
        if use is None:
            return None
        try:
            adapter = _adapters_of(use).begin_use(self.name, caller.tenant)
        except BaseException:
            use.release()
            raise
        if adapter is None:
            use.release()
            return None
        return _AdaptedUse(use, adapter, self.config)

    async def wait_for_use(self, caller: Caller) -> ModelUse:
        use = await self.parent.wait_for_use(caller)
        try:
            adapter = await _adapters_of(use).wait_for_use(self.name, caller.tenant)
        except BaseException:
            use.release()
            raise
        return _AdaptedUse(use, adapter, self.config)


def adapted_models(models: Iterable[ServedModel], caller: Caller) -> list[AdaptedModel]:
    """Return the models with each of their adapters that the caller may use."""
    return [AdaptedModel(model, name, path) for model in models for name, path in model.adapters_for(caller).items()]


def find_adapted(models: Iterable[ServedModel], name: str, caller: Caller) -> AdaptedModel | None:
    """Return the model that has an adapter of this name, if the caller may use it."""
    for model in models:
        if (path := model.adapters_for(caller).get(name)) is not None:
            return AdaptedModel(model, name, path)
    return None


def _adapters_of(use: ModelUse) -> Adapters:
    engine = use.engine
    assert generates(engine) and engine.adapters is not None
    return engine.adapters
