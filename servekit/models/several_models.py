"""Run several models in one server: load them when they are needed, and unload those that make room.

Each model has an engine and worker processes of its own: if one model is lost, or cannot be loaded, the others are not
affected. `Residency` decides what is loaded; this executes it. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from msgspec.structs import replace

from servekit import __version__
from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.engine.adapted_model import AdaptedModel, find_adapted
from servekit.engine.adapter_registry import adapters_at_start
from servekit.engine.caller import Caller
from servekit.engine.interface import ManagedEngine, WorkerReport
from servekit.engine.live_view import LiveView
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.make_engine import make_engine
from servekit.engine.model_names import ANY_MODEL, MAX_NAME_SHOWN, model_not_found
from servekit.errors import (
    ConfigError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    ServekitError,
    WorkerNotReady,
    shutting_down,
)
from servekit.models.model_file import ModelFile, ModelSpec, check_kinds, check_split
from servekit.models.names import Names, Split, StickyBy
from servekit.models.residency import DEFAULT_LOAD_S, Admit, Load, ModelNeeds, Residency, State, Unload
from servekit.observability.live_frames import LiveState
from servekit.observability.metrics import HttpMetrics, LoadMetrics, ModelMetrics, SeveralModelsMetrics
from servekit.remote.remote_engine import RemoteEngine
from servekit.remote.remote_model import RemoteModel
from servekit.remote.remote_predictor import RemotePredictor
from servekit.remote.settings import OpenAISettings, PredictorServerSettings, TritonSettings, VllmSettings
from servekit.remote.triton_engine import TritonEngine
from servekit.remote.vllm_engine import VllmEngine
from servekit.shared_budget import SharedBudget

log = logging.getLogger("servekit")

COLLECT_DELAY_S = 1.0  # after an engine has ended: by then its tasks have, too
UNKNOWN_PROMPT_TOKENS = 2**20  # upper bound for models that were never loaded


class ModelUse:
    """A model that one request uses."""

    __slots__ = ("_is_held", "_model", "_tenant", "engine", "headers")

    def __init__(self, model: ManagedModel, engine: ManagedEngine, tenant: str | None) -> None:
        """`tenant` is None for an operator."""
        self.engine = engine
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self._model = model
        self._tenant = tenant
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._model.end_use(self.engine, self._tenant)


class ManagedModel:
    """One model of several: its engine while it is loaded, and the requests that wait for it."""

    def __init__(self, models: SeveralModels, spec: ModelSpec) -> None:
        self.spec = spec
        self.metrics = ModelMetrics(spec.config)
        residency = models.residency
        self.loads = LoadMetrics(
            self.metrics,
            lambda: self.load_state,
            lambda: residency.num_uses(self.name),
            lambda: sum(residency.memory(self.name).values()),
        )
        self.engine: ManagedEngine | None = None  # while it is loaded
        self.starting: ManagedEngine | None = None  # while it is being loaded
        self.worker: WorkerReport | None = None
        self.max_prompt_tokens: int | None = None
        self.is_removed = False  # whether it is no longer in the file
        self.failure: ServekitError | None = None  # why it could not be loaded, or why it ended
        self.waiting: dict[asyncio.Future[ModelUse], str | None] = {}  # in order; their tenants, None of operators
        self.places = SharedBudget(spec.config.max_num_queued_reqs)  # of requests that wait, operators' calls left out
        self.measured_bytes: int | None = None  # memory of one worker when the model was last loaded
        self._models = models

    @property
    def name(self) -> str:
        return self.spec.id

    @property
    def kind(self) -> str:
        return self.spec.kind if self.engine is None else self.engine.kind

    @property
    def config(self) -> ServeConfig:
        """The settings that it was loaded with, or will be loaded with."""
        return self.spec.config if self.engine is None else self.engine.config

    @property
    def adapter_paths(self) -> Mapping[str, str]:
        """The directory of each of its LoRA adapters, by name: those of its settings while it is not loaded."""
        if isinstance(self.engine, LLMEngine):
            return self.engine.adapter_paths
        return adapters_at_start(self.config)

    def adapters_for(self, caller: Caller) -> Mapping[str, str]:
        """Those that the caller's tenant may use and see."""
        tenants = self.spec.entry.adapter_tenants
        return {
            name: path
            for name, path in self.adapter_paths.items()
            if name not in tenants or caller.tenant in tenants[name]
        }

    @property
    def load_state(self) -> State:
        """Whether it is loaded."""
        return self._models.residency.state(self.name)

    @property
    def state(self) -> str:
        """The state of its engine, or the reason why it has none."""
        state = self.load_state
        return self.engine.state if self.engine is not None and state is State.READY else state

    @property
    def stage(self) -> str:
        """What it is doing, as a text for people."""
        state = self.load_state
        if self.starting is not None:
            return self.starting.stage
        if self.engine is not None:
            return self.engine.stage
        if state is State.FAILED and self.failure is not None:
            return self.failure.message
        return {State.WAITING: "waits for its turn to be loaded"}.get(state, "is not loaded")

    def may_be_used_by(self, caller: Caller) -> bool:
        """Whether the caller's tenant may use and see the model."""
        tenants = self.spec.entry.tenants
        return tenants is None or caller.tenant in tenants

    def now(self) -> float:
        return self._models.now()

    async def live_view(self) -> LiveView:
        if self.engine is not None:
            return await self.engine.live_view()
        now_s = self.now()
        return LiveView(LiveState(now_s, self.state, self.stage, self.name, __version__, [], kind=self.kind))

    # -- use ----------------------------------------------------------------------------------------------------------

    def begin_use(self, caller: Caller) -> ModelUse | None:
        return self.begin_use_by(caller.tenant)

    def begin_use_by(self, tenant: str | None) -> ModelUse | None:
        """Use the model if it can be used at once. `tenant` is None for an operator."""
        if self.engine is None or not self._models.residency.begin_use(self.name, self.now(), tenant):
            return None
        self.loads.waited("hot", 0.0)
        return ModelUse(self, self.engine, tenant)

    async def wait_for_use(self, caller: Caller) -> ModelUse:
        return await self._models.wait_for_use(self, caller)

    def end_use(self, engine: ManagedEngine, tenant: str | None) -> None:
        """Note that a tenant's request does not use the model any more."""
        if engine is self.engine:  # not if this engine has failed in the meantime
            self._models.residency.end_use(self.name, self.now(), tenant)
            if not self._models.residency.is_settled:
                self._models.look()


class SeveralModels:
    """All models of a server. Call `start`, and then `stop`."""

    has_choice = True

    def __init__(self, config: ServeConfig, file: ModelFile, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.failure: ServekitError | None = None
        self._clock = clock
        self._file = file
        self._models: dict[str, ManagedModel] = {}
        self.residency = Residency(file.memory)
        self._assume_load_time()
        self.metrics = SeveralModelsMetrics(__version__, lambda: [each.metrics for each in self._models.values()])
        self._result_budget = SharedBudget(config.max_total_logprobs)
        for spec in file.models:
            self._add(spec)
        self._names = _names(file)
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._collection: asyncio.TimerHandle | None = None
        self._has_started = False  # all models with keep = "always" are loaded, or have failed
        self._is_draining = False
        self._is_stopping = False
        self._rejects_requests = False
        self._ended = asyncio.Event()
        self._has_changed = asyncio.Event()

    def _assume_load_time(self) -> None:
        """Assume that a model which was not loaded yet can be loaded while a request may wait for it."""
        self.residency.assumed_load_s = min(DEFAULT_LOAD_S, self._file.max_load_wait_s)

    def _add(self, spec: ModelSpec) -> None:
        self.residency.add(ModelNeeds(spec.id, spec.memory, spec.entry.is_kept))
        self._models[spec.id] = ManagedModel(self, spec)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.failure is not None:
            return "failed"
        if self._is_draining:
            return "draining"
        return "ready" if self._has_started else "loading"

    @property
    def stage(self) -> str:
        stages = [f"{each.name} {each.stage}" for each in self._models.values() if each.starting is not None]
        return "; ".join(stages) or "serving"

    @property
    def is_healthy(self) -> bool:
        return self.failure is None and all(each.is_healthy for each in self._engines)

    @property
    def has_free_slots(self) -> bool:
        return all(each.has_free_slots for each in self._engines)

    @property
    def _engines(self) -> list[ManagedEngine]:
        return [each.engine for each in self._models.values() if each.engine is not None]

    @property
    def http_counters(self) -> HttpMetrics:
        return self.metrics.http

    @property
    def max_prompt_tokens(self) -> int:
        return max(each.max_prompt_tokens or UNKNOWN_PROMPT_TOKENS for each in self._models.values())

    @property
    def workers(self) -> list[tuple[dict[str, str], int | None]]:
        """The labels and the process id of each worker."""
        return [
            ({"model_name": model.name, "replica": str(replica)}, pid)
            for model in self._models.values()
            for replica, pid in enumerate([] if model.engine is None else model.engine.worker_pids)
        ]

    def now(self) -> float:
        return self._clock()

    async def probe_readiness(self) -> bool:
        """Whether some model that is loaded generates tokens, or all of them are loaded on demand."""
        if self.state != "ready":
            return False
        if not any(model.spec.entry.is_kept for model in self._models.values()):
            return True  # none need be loaded, so one that recovers is no worse than one that is cold
        proofs = await asyncio.gather(*(engine.probe_readiness() for engine in self._engines))
        return any(proofs) and self.state == "ready"

    async def render_metrics(self) -> bytes:
        return self.metrics.render()

    async def abort_request(self, tenant: str, request_id: str) -> int:
        return sum([await engine.abort_request(tenant, request_id) for engine in self._engines])

    @property
    def models(self) -> list[ManagedModel]:
        """All models, in the order of the file."""
        return [each for each in self._models.values() if not each.is_removed]

    # -- names --------------------------------------------------------------------------------------------------------

    def served(self, caller: Caller) -> list[ManagedModel]:
        return [each for each in self.models if each.may_be_used_by(caller)]

    def find(
        self,
        name: str | None,
        caller: Caller,
        conversation: Callable[[], bytes] | None = None,
        kind: str | None = None,
    ) -> ManagedModel | AdaptedModel:
        wanted = self._default(caller, kind) if name is None or name in ANY_MODEL else name
        split = self._names.split(wanted)
        if split is None:
            found = self._names.find(wanted)
        else:
            key = conversation() if split.sticky == "conversation" and conversation is not None else b""
            found = split.choose(key or (caller.tenant or caller.request_id).encode())
        adapted = find_adapted(self.served(caller), wanted, caller) if found is None else None
        if adapted is not None:
            return adapted
        if found is None or not self._may_use(wanted, caller):
            raise model_not_found(wanted, self.names_for(caller))
        return self._models[found]

    def _default(self, caller: Caller, kind: str | None) -> str:
        """Return the name of the default model, or of the first one of this kind if the default one is of another."""
        default = self._file.default
        kinds = {self._models[each].kind for each in self._names.ids_of(default)}
        if kind is None or kind in kinds:
            return default
        return next((each.name for each in self.served(caller) if each.kind == kind), default)

    def _may_use(self, name: str, caller: Caller) -> bool:
        """Whether the caller may use all models that a name stands for."""
        return all(self._models[each].may_be_used_by(caller) for each in self._names.ids_of(name))

    def names_for(self, caller: Caller) -> Iterator[str]:
        """All names that the caller may use: of models and aliases, then of adapters."""
        yield from (name for name in self._names if self._may_use(name, caller))
        for model in self.served(caller):
            yield from model.adapters_for(caller)

    # -- for operators ------------------------------------------------------------------------------------------------

    async def load_model(self, model_id: str) -> ManagedModel:
        model = self._by_id(model_id)
        self.residency.forget_failures(model_id)
        use = model.begin_use_by(None) or await self.wait_for_use(model, None)
        use.release()
        return model

    def unload_model(self, model_id: str) -> ManagedModel:
        model = self._by_id(model_id)
        if model.spec.entry.is_kept:
            raise InvalidRequest(
                f"the model {model_id!r} stays loaded (keep = {model.spec.entry.keep!r}); set keep = 'on_demand' "
                "in the models file, and send SIGHUP to the server"
            )
        self.residency.dismiss(model_id)
        self.look()
        return model

    def divide(
        self,
        alias: str,
        weights: Mapping[str, float],
        sticky: StickyBy | None = None,
        mirror: str | None = None,
        mirror_percent: float = 100.0,
    ) -> None:
        if sticky is None:
            present = self._file.splits.get(alias)
            sticky = "key" if present is None else present.sticky
        split = Split(weights, sticky, mirror, mirror_percent)
        taken = {*(each.id for each in self._file.models), *self._file.aliases, *ANY_MODEL}
        if alias in taken or any(alias in each.adapter_paths for each in self.models):
            raise InvalidRequest(
                f"{alias[:MAX_NAME_SHOWN]!r} is the name of a model or an adapter, or stands for any model; choose "
                "another name for the alias"
            )
        try:
            where = f"the alias {alias[:MAX_NAME_SHOWN]!r}"
            kinds = {each.id: each.kind for each in self._file.models}
            check_split(where, split, set(kinds))
            check_kinds(where, split, kinds)
        except ConfigError as error:
            raise InvalidRequest(error.message, param="models") from None
        self._file = replace(self._file, splits={**self._file.splits, alias: split})
        self._names = _names(self._file)
        log.info("the alias %s is divided: %s", alias, dict(weights))
        if mirror is not None:
            log.info("the alias %s: %g %% of its requests are copied to %s", alias, mirror_percent, mirror)

    def remove_alias(self, alias: str) -> None:
        splits = self._file.splits
        if alias not in splits:
            raise model_not_found(alias, splits)
        if alias == self._file.default:
            raise InvalidRequest(
                f"{alias!r} gets the requests that name no model (default in the models file); change its weights "
                f"with POST /v1/aliases/{alias} instead"
            )
        self._file = replace(self._file, splits={name: split for name, split in splits.items() if name != alias})
        self._names = _names(self._file)
        log.info("the alias %s is removed", alias)

    def sticky(self) -> Mapping[str, StickyBy]:
        return {alias: split.sticky for alias, split in self._file.splits.items()}

    def divided(self) -> Mapping[str, Mapping[str, float]]:
        return {alias: split.models for alias, split in self._file.splits.items()}

    def mirrored(self) -> Mapping[str, Mapping[str, float]]:
        splits = self._file.splits
        return {
            alias: {split.mirror: split.mirror_percent} for alias, split in splits.items() if split.mirror is not None
        }

    @property
    def has_waiting(self) -> bool:
        return any(each.waiting for each in self._models.values())

    def mirror_of(self, name: str | None, caller: Caller, kind: str) -> str | None:
        split = self._names.split(self._default(caller, kind) if name is None or name in ANY_MODEL else name)
        return split.mirror if split is not None and split.is_mirrored(caller.request_id) else None

    def note_mirrored(self, model_id: str, result: str) -> None:
        model = self._models.get(model_id)
        if model is not None:  # it may have been removed in the meantime
            model.loads.mirrored(result)

    def _by_id(self, model_id: str) -> ManagedModel:
        model = self._models.get(model_id)
        if model is None or model.is_removed:
            raise model_not_found(model_id, [each.name for each in self.models])
        return model

    def replace_file(self, file: ModelFile) -> None:
        """Serve the models of a new file from now on.

        Models that are in both files keep their engines, and their changed settings apply when they are loaded next.
        Models that are no longer in the file are unloaded when their requests have ended.
        """
        self.residency.set_capacity(file.memory)
        specs = {spec.id: spec for spec in file.models}
        for name, model in list(self._models.items()):
            if name not in specs:
                self._remove(model)
        for spec in file.models:
            present = self._models.get(spec.id)
            if present is None:
                self._add(spec)
                continue
            changes = (present.spec.server, present.config) != (spec.server, spec.config)
            measured: Mapping[str, int] = {}
            if changes or spec.entry.memory_bytes is not None or spec.workers is None:
                present.measured_bytes = None
            elif present.measured_bytes is not None:  # a measurement is better than a new estimate
                measured = replace(spec.workers, memory_bytes=present.measured_bytes).memory
            if changes:  # they may be the remedy
                self.residency.forget_failures(spec.id)
            if present.engine is not None and changes:
                log.warning("the model %s: its changed settings apply when it is loaded next", spec.id)
            present.spec, present.is_removed = spec, False
            present.places.limit = spec.config.max_num_queued_reqs
            self.residency.replace(ModelNeeds(spec.id, spec.memory, spec.entry.is_kept, measured))
        leaving = [name for name in self._models if name not in specs]
        self._models = {name: self._models[name] for name in (*specs, *leaving)}
        self._file, self._names = file, _names(file)
        self._assume_load_time()
        self.look()

    def _remove(self, model: ManagedModel) -> None:
        """Unload a model that is no longer in the file, and then remove it."""
        model.is_removed = True
        self._fail_waiting(model, _removed(model))
        self.residency.clear_requested(model.name)
        self.residency.replace(ModelNeeds(model.name, model.spec.memory))
        self.residency.dismiss(model.name)
        self._forget_removed(model)

    def _forget_removed(self, model: ManagedModel) -> None:
        if model.is_removed and model.load_state in (State.COLD, State.FAILED):
            self.residency.remove(model.name)
            del self._models[model.name]

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the models that stay loaded. Raises the failure of one if none can be loaded at all."""
        for use in self._file.device_uses if self._file.memory else []:
            for line in use.lines():
                log.info("%s", line)
        kept = [each for each in self._models.values() if each.spec.entry.is_kept]
        self.look()
        while any(each.load_state not in (State.READY, State.FAILED) for each in kept):
            self._has_changed.clear()
            await self._has_changed.wait()
        if kept and len(kept) == len(self._models) and all(each.load_state is State.FAILED for each in kept):
            failure = kept[0].failure
            assert failure is not None
            raise failure
        self._has_started = True

    async def wait_until_failed(self) -> None:
        """Return when the server cannot continue. If one model fails, the server continues."""
        await self._ended.wait()

    def drain(self, admits_requests: bool = False) -> None:
        self._is_draining = True
        self._rejects_requests = not admits_requests
        if self._rejects_requests:  # a model that is loaded now would refuse those that wait for it
            for model in self._models.values():
                self._fail_waiting(model, shutting_down())
                if not model.spec.entry.is_kept:
                    self.residency.clear_requested(model.name)
        for engine in self._engines:
            engine.drain(admits_requests)

    def fail_all(self, error: ServekitError) -> None:
        for model in self._models.values():
            self._fail_waiting(model, error)
        for engine in self._engines:
            engine.fail_all(error)

    async def stop(self, graceful: bool = True) -> None:
        """End all models."""
        self._is_stopping = True
        for timer in (self._timer, self._collection):
            if timer is not None:
                timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_all(shutting_down())
        engines = [engine for each in self._models.values() for engine in (each.engine, each.starting) if engine]
        await asyncio.gather(*(engine.stop(graceful) for engine in engines))

    # -- waiting ------------------------------------------------------------------------------------------------------

    async def wait_for_use(self, model: ManagedModel, caller: Caller | None) -> ModelUse:
        """Use a model as soon as it is loaded. Raises QueueFull, or WorkerNotReady if it cannot be loaded.

        An operator who loads it (None) waits for as long as that takes.
        """
        if self._rejects_requests or self._is_stopping:
            raise shutting_down()
        residency, name, started_s = self.residency, model.name, self.now()
        tenant = None if caller is None else caller.tenant
        self._check_backoff(model, started_s)
        if caller is not None:
            self._check_wait(model, caller, started_s)
            model.places.take(caller.tenant, 1)
        is_first = model.load_state in (State.COLD, State.FAILED)
        residency.mark_requested(name, started_s, tenant)
        position = residency.position(name)
        future: asyncio.Future[ModelUse] = asyncio.get_running_loop().create_future()
        model.waiting[future] = tenant
        timeout: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
        if caller is not None:
            timeout = pause_tolerant_timeout(self._file.max_load_wait_s)
        self.look()
        try:
            async with timeout:
                use = await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()  # the client left at the same moment
            if not isinstance(error, TimeoutError):
                raise
            model.loads.refused()
            if model.is_removed:  # at the same moment
                raise _removed(model) from None
            raise self._too_long(model, self._file.max_load_wait_s) from None
        finally:
            if caller is not None:
                model.places.release(caller.tenant, 1)
            if future in model.waiting:
                del model.waiting[future]
                if not model.waiting and not model.spec.entry.is_kept:
                    residency.clear_requested(name)
                self.look()
        waited_s = self.now() - started_s
        model.loads.waited("cold" if is_first else "warm", waited_s)
        use.headers = _wait_headers(position, waited_s)
        return use

    def _check_backoff(self, model: ManagedModel, now_s: float) -> None:
        """Raise the failure of a model that failed a moment ago and is not tried again yet."""
        if model.failure is not None and self.residency.retry_s(model.name) > now_s:
            raise _unavailable(model, self.residency.retry_after_s(model.name, now_s))

    def _check_wait(self, model: ManagedModel, caller: Caller, now_s: float) -> None:
        """Refuse a request that would wait for too long, or with too many others."""
        residency, max_wait_s, places = self.residency, self._file.max_load_wait_s, model.places
        if not places.has_room(caller.tenant, 1):
            model.loads.refused()
            raise QueueFull(
                f"{places.total} requests wait until the model {model.name!r} is loaded"
                f"{places.describe_share(caller.tenant)}; the limit is {places.limit} (max_num_queued_reqs). Please "
                "try again later.",
                retry_after_s=self.residency.retry_after_s(model.name, now_s),
            )
        wait_s = residency.expected_wait_s(model.name, now_s)
        if wait_s > max_wait_s:
            # No request may wait for all of such a load, and something must begin it.
            if residency.load_s(model.name) > max_wait_s:
                residency.mark_requested(model.name, now_s, caller.tenant)
                self.look()
            model.loads.refused()
            raise self._too_long(model, wait_s, max_wait_s)

    def _too_long(self, model: ManagedModel, wait_s: float, patience_s: float = 0.0) -> QueueFull:
        now_s = self.now()
        position = self.residency.position(model.name)
        place = f"; it is number {position} of the models that wait" if position else ""
        return QueueFull(
            f"the model {model.name!r} is not loaded, and loading it would take {wait_s:.0f} s or more{place}; a "
            f"request may wait for {self._file.max_load_wait_s:g} s (max_load_wait). Please try again later.",
            retry_after_s=self.residency.retry_after_s(model.name, now_s, patience_s),
        )

    @staticmethod
    def _fail_waiting(model: ManagedModel, error: ServekitError) -> None:
        waiting, model.waiting = model.waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    # -- loading ------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Execute the actions that are due, and set a timer for the next ones."""
        self._has_changed.set()
        if self._is_stopping:
            return
        now_s = self.now()
        for action in self.residency.plan(now_s):
            model = self._models[action.name]
            match action:
                case Load():
                    self._start_task(self._load(model), f"load {model.name}")
                case Unload():
                    self._start_task(self._unload(model), f"unload {model.name}")
                case Admit():
                    self._admit(model)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self.residency.next_s(now_s)
        if next_s < inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, next_s - now_s), self.look)

    def _start_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, model: ManagedModel) -> None:
        """Load a model, and report how that ended."""
        spec, started_s = model.spec, self.now()
        config = spec.config
        log.info("loading the model %s (%s)", model.name, config.model)
        engine: ManagedEngine | None = None
        try:
            engine = model.starting = self._make_engine(model)
            await engine.start()
        except Exception as error:
            if not isinstance(error, ServekitError):
                log.exception("the model %s cannot be loaded", model.name)
            await self._give_up(model, engine, error)
            self.residency.load_failed(model.name, self.now())
            model.loads.load_failed()
            self._report_failure(model)
            return
        model.engine, model.starting, model.failure = engine, None, None
        model.worker = engine.worker
        model.max_prompt_tokens = engine.known_length if isinstance(engine, RemoteModel) else engine.max_prompt_tokens
        if self._is_draining:
            engine.drain(not self._rejects_requests)
        now_s = self.now()
        self.residency.loaded(model.name, now_s)
        model.loads.loaded(now_s - started_s)
        log.info("the model %s is loaded: %.2f s", model.name, now_s - started_s)
        if model.spec is spec:  # otherwise the file was read again, and may name other devices than those in use
            self._note_memory(model)
        self._start_task(self._watch(model, engine), f"watch {model.name}")
        if model.is_removed:
            self.residency.dismiss(model.name)
        elif model.waiting:
            self.residency.mark_requested(model.name, now_s, next(iter(model.waiting.values())))
        self.look()

    def _note_memory(self, model: ManagedModel) -> None:
        """Use the memory that the first worker of a loaded model has measured, if the file does not state it."""
        workers, measured = model.spec.workers, 0 if model.worker is None else model.worker.memory_bytes
        if workers is None or not measured:  # the model runs on another server or in vLLM, or is simulated
            return
        if model.spec.entry.memory_bytes is None:
            model.measured_bytes = measured
            memory = replace(workers, memory_bytes=measured).memory
            self.residency.measured(model.name, memory)
            log.info("the model %s takes %d bytes for each worker", model.name, measured)
            for device, counted in self.residency.memory(model.name).items():
                if counted < memory[device]:
                    log.warning(
                        "the model %s takes %d bytes of %s, and only %d of them are counted, so that all models can "
                        "be loaded: set its memory_bytes, and give %s more in [memory]",
                        *(model.name, memory[device], device, counted, device),
                    )
        elif measured > workers.memory_bytes:
            log.warning(
                "the model %s takes %d bytes for each worker, and its memory_bytes is %d: give it more, or leave "
                "memory_bytes out",
                *(model.name, measured, workers.memory_bytes),
            )

    def _make_engine(self, model: ManagedModel) -> ManagedEngine:
        """Return the engine of a model. Raises ConfigError."""
        spec = model.spec
        match spec.server:
            case VllmSettings():
                return VllmEngine(spec.config, spec.server, list(spec.memory), self._clock, model.metrics)
            case OpenAISettings():
                return RemoteEngine(spec.config, spec.server, self._clock, model.metrics)
            case TritonSettings():
                return TritonEngine(spec.config, spec.server, self._clock, model.metrics)
            case PredictorServerSettings():
                return RemotePredictor(spec.config, spec.server, self._clock, model.metrics)
        return make_engine(spec.config, self._clock, model.metrics, self._result_budget)

    async def _give_up(self, model: ManagedModel, engine: ManagedEngine | None, error: Exception) -> None:
        """End an engine that has failed."""
        model.failure = error if isinstance(error, ServekitError) else InternalError(f"internal error: {error}")
        if engine is not None:
            with contextlib.suppress(Exception):
                await engine.stop(graceful=False)
            model.metrics.forget_engine()
            self._collect_soon()
        model.engine = model.starting = None

    def _report_failure(self, model: ManagedModel) -> None:
        assert model.failure is not None
        now_s = self.now()
        retry_after_s = self.residency.retry_after_s(model.name, now_s)
        log.error("the model %s has failed, and is tried again in %d s: %s", model.name, retry_after_s, model.failure)
        self._fail_waiting(model, _unavailable(model, retry_after_s))
        self._forget_removed(model)
        self.look()

    async def _watch(self, model: ManagedModel, engine: ManagedEngine) -> None:
        """Report when a loaded model fails."""
        await engine.wait_until_failed()
        if model.engine is not engine or engine.failure is None:
            return  # it was unloaded
        self.residency.failing(model.name)
        await self._give_up(model, engine, engine.failure)
        self.residency.lost(model.name, self.now())
        self._report_failure(model)

    async def _unload(self, model: ManagedModel) -> None:
        engine, model.engine = model.engine, None
        assert engine is not None
        await engine.stop()
        model.metrics.forget_engine()
        self._collect_soon()
        self.residency.unloaded(model.name)
        model.loads.unloaded()
        log.info("the model %s is unloaded", model.name)
        self._forget_removed(model)
        self.look()

    def _collect_soon(self) -> None:
        """Free the memory of an engine that has ended.

        Its objects refer to each other in cycles, and the server's collector hardly ever looks at old objects
        (`GC_THRESHOLDS`). Without this, each time that a model makes room, its tokenizer and its tables would stay.
        """
        if self._collection is not None:
            self._collection.cancel()
        if not self._is_stopping:
            # The C library keeps what is freed, and the next engine uses it. `malloc_trim` would return it to the
            # kernel, but it locks the heap: for 13 to 144 ms after a tokenizer of 50 MiB, and all streams would wait.
            self._collection = asyncio.get_running_loop().call_later(COLLECT_DELAY_S, gc.collect)

    def _admit(self, model: ManagedModel) -> None:
        """Let waiting requests use the model."""
        waiting, model.waiting = model.waiting, {}
        for future, tenant in waiting.items():
            if not future.done():
                assert model.engine is not None
                self.residency.add_use(model.name, self.now(), tenant)
                future.set_result(ModelUse(model, model.engine, tenant))


def _names(file: ModelFile) -> Names:
    return Names([spec.id for spec in file.models], file.aliases, file.splits)


def _wait_headers(position: int, waited_s: float) -> Sequence[tuple[bytes, bytes]]:
    """Return headers that tell a client that its model had to be loaded: its place in the queue, and the time."""
    return ((b"x-model-position", b"%d" % position), (b"x-model-wait-ms", b"%d" % round(waited_s * 1e3)))


def _removed(model: ManagedModel) -> ModelNotFound:
    """Return the error for requests that wait for a model which is no longer in the file."""
    return ModelNotFound(f"The model {model.name!r} is no longer in the models file of this server.", param="model")


def _unavailable(model: ManagedModel, retry_after_s: int) -> WorkerNotReady:
    """Return the error for requests that name a model which has failed."""
    assert model.failure is not None
    return WorkerNotReady(
        f"the model {model.name!r} cannot be used at present: {model.failure.message}", retry_after_s=retry_after_s
    )
