"""Define the methods by which the API calls a server's models and engines, in this process or in another one.

An `Engine` serves one model, whatever the model does. A `GeneratingEngine` generates text: `LLMEngine`. A
`PredictingEngine` embeds, reranks or classifies: `PredictorEngine`. `generates` and `predicts` tell which one an engine
is. A `ManagedEngine` is one in this process, which its owner starts and stops.

With `--api-processes`, several processes serve HTTP, and in each of them an `EngineClient` (servekit.api_processes)
implements the same methods. Methods that may have to ask another process are coroutines; in the engine's own process
they return without waiting.

`Models` has all models of a server. In a server with one model, its engine implements it (`OneModel`), and with several
models, SeveralModels (servekit.models).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard

from servekit.config import ServeConfig
from servekit.engine.adapter_registry import AdapterUse
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.input_processor import InputProcessor
from servekit.engine.live_view import LiveView
from servekit.engine.model_kind import GENERATE
from servekit.engine.prediction_state import PredictionState
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer
from servekit.errors import ServekitError
from servekit.protocol.messages import Profiled, WorkerReady
from servekit.protocol.prediction import PredictorInfo, PredictorKind, PredictorReady
from servekit.requests.generation import GenerationRequest
from servekit.requests.inference import INFER, DecodeOutputs, InferenceRequest, Tensor
from servekit.requests.prediction import PredictionRequest
from servekit.scheduler.scheduler_config import SchedulerConfig

WorkerReport = WorkerReady | PredictorReady  # what a worker reports of the model that it has loaded


class Places(Protocol):
    """The places in the waiting queue that a request holds until its sequences are in it."""

    def release(self) -> None:
        """Give back what is left of them. Idempotent."""


class HttpCounters(Protocol):
    """Counts HTTP requests for the metrics."""

    def request_refused(self, code: str) -> None:
        """Count a request that was refused with this error code."""

    def request_ended(self, handler: str, method: str, status: int) -> None:
        """Count an HTTP request that has ended."""


class Profiler(Protocol):
    """Records the worker's steps."""

    async def start(self) -> int:
        """Start recording; return the limit on recorded steps. Raises ProfilerRefuses or WorkerError."""

    async def stop(self) -> Profiled:
        """Stop recording and write the profile. Raises ProfilerRefuses, WorkerError or InternalError."""


class Service(Protocol):
    """The methods that the server calls, of one engine or of all its models together."""

    @property
    def config(self) -> ServeConfig: ...

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, draining, failed."""

    @property
    def stage(self) -> str:
        """What a server that is not ready is doing, as text for people."""

    @property
    def is_healthy(self) -> bool:
        """False if only a new process can help."""

    @property
    def has_free_slots(self) -> bool:
        """Whether a slot would be free if all waiting sequences had theirs. If not, less urgent work should wait."""

    @property
    def http_counters(self) -> HttpCounters: ...

    def now(self) -> float:
        """The time on the clock that all times are measured with."""

    async def probe_readiness(self) -> bool:
        """Whether tokens are generated."""

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End the unfinished sequences of a tenant's requests with this id; return how many there were."""

    def drain(self, admits_requests: bool = False) -> None:
        """Begin to drain: admitted requests continue, and new ones are rejected unless `admits_requests` is set."""

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests, admitted or still in preparation."""


class Engine(Service, Protocol):
    """The engine of one model of any kind."""

    @property
    def kind(self) -> str:
        """What the model does: GENERATE, INFER, or a PredictorKind."""

    @property
    def worker(self) -> WorkerReport | None:
        """What the first worker reported; None until it is ready."""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest sequence, or of the longest input. Raises WorkerNotReady until the model is loaded."""

    @property
    def has_spare_connections(self) -> bool:
        """Whether one more request leaves a connection to the model's own server free. True if it has none."""

    async def live_view(self) -> LiveView:
        """One frame of the live view."""

    async def describe(self) -> dict[str, Any]:
        """What /info says of the running engine. Raises WorkerNotReady until the model is loaded."""


class Adapters(Protocol):
    """The LoRA adapters of one model."""

    @property
    def paths(self) -> Mapping[str, str]:
        """The directory of each adapter, by name."""

    async def load(self, name: str, path: str) -> None:
        """Load an adapter at run time. Raises InvalidRequest or WorkerError."""

    async def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it go on. Raises ModelNotFound."""

    def begin_use(self, name: str, tenant: str) -> AdapterUse | None:
        """Use an adapter if it can be used at once. May raise ModelNotFound."""

    async def wait_for_use(self, name: str, tenant: str) -> AdapterUse:
        """Use an adapter as soon as it has a place. Raises ModelNotFound or QueueFull."""


class GeneratingEngine(Engine, Protocol):
    """The engine of a model that generates text.

    `tokenizer` and the properties after it raise WorkerNotReady until the model is loaded.
    """

    @property
    def worker(self) -> WorkerReady | None: ...

    @property
    def adapters(self) -> Adapters | None:
        """The model's LoRA adapters; None if it takes none."""

    @property
    def takes_messages(self) -> bool:
        """Whether chats are submitted as `GenerationRequest.chat`, because another server renders and tokenizes them.

        Then there is no input processor, and the tokenizer knows no tokens.
        """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def input_processor(self) -> InputProcessor: ...

    @property
    def scheduler_config(self) -> SchedulerConfig: ...

    @property
    def profiling(self) -> Profiler: ...

    async def take_places(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> Places:
        """Take a request's places in the queue. The prompts' contents may still be missing.

        Raises WorkerNotReady, QueueFull or InvalidRequest.
        """

    async def submit(self, request: GenerationRequest, caller: Caller, places: Any) -> RequestState:
        """Admit all prompts of a request, or none. `places` is what `take_places` returned.

        This is the end of the request's admission. Raises RequestError or WorkerError.
        """


class PredictingEngine(Engine, Protocol):
    """The engine of a model that embeds, reranks or classifies."""

    @property
    def worker(self) -> PredictorReady | None: ...

    @property
    def model(self) -> PredictorInfo:
        """What is known of the loaded model. Raises WorkerNotReady until then."""

    async def submit(self, request: PredictionRequest, caller: Caller = ANONYMOUS) -> PredictionState:
        """Admit all inputs of a request, or none. Raises RequestError or WorkerError."""


def generates(engine: Engine) -> TypeGuard[GeneratingEngine]:
    """Return whether the engine's model generates text."""
    return engine.kind == GENERATE


def predicts(engine: Engine) -> TypeGuard[PredictingEngine]:
    """Return whether the engine's model embeds, reranks or classifies."""
    return engine.kind in list(PredictorKind)


class InferringEngine(Engine, Protocol):
    """The engine of a model that computes tensors, which another server runs."""

    async def infer(
        self, request: InferenceRequest, caller: Caller = ANONYMOUS, decode: DecodeOutputs | None = None
    ) -> list[Tensor]:
        """Return the outputs of one inference. Large ones are decoded by `decode`, so that the event loop stays free.

        Raises RequestError or WorkerError.
        """


def infers(engine: Engine) -> TypeGuard[InferringEngine]:
    """Return whether the engine's model computes tensors."""
    return engine.kind == INFER


class ManagedEngine(Engine, Protocol):
    """An engine in this process, which its owner starts and stops."""

    failure: ServekitError | None  # why it has ended, if it did

    @property
    def worker_pids(self) -> list[int | None]:
        """The process id of each worker; None before its first start."""

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError or WorkerError."""

    async def stop(self, graceful: bool = True) -> None:
        """End the engine and its workers, and fail the requests that still run.

        If graceful, workers may exit by themselves before they are killed.
        """

    async def wait_until_failed(self) -> None:
        """Return when the engine has ended by itself, which it does only on failure."""


# -- models ------------------------------------------------------------------------------------------------------------


class ModelUse(Protocol):
    """A model that one request uses. It stays loaded until `release`."""

    @property
    def engine(self) -> Engine: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """What the request's answer says of how its model was chosen and loaded."""

    def release(self) -> None:
        """End the use. Idempotent."""


class ServedModel(Protocol):
    """A model that a request may name, loaded or not."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str:
        """What it does: GENERATE, INFER, or a PredictorKind."""

    @property
    def config(self) -> ServeConfig: ...

    @property
    def state(self) -> str: ...

    @property
    def engine(self) -> Engine | None:
        """Its engine, if the model is loaded."""

    @property
    def worker(self) -> WorkerReport | None:
        """What its worker reported when it was loaded last; None if it was never loaded."""

    def adapters_for(self, caller: Caller) -> Mapping[str, str]:
        """The directory of each of its LoRA adapters that the caller may use, by name."""

    @property
    def max_prompt_tokens(self) -> int | None:
        """Tokens of the longest sequence; None if the model was never loaded."""

    def now(self) -> float: ...

    async def live_view(self) -> LiveView:
        """One frame of its live view."""

    def begin_use(self, caller: Caller) -> ModelUse | None:
        """Use the model, if it can be used at once."""

    async def wait_for_use(self, caller: Caller) -> ModelUse:
        """Use the model as soon as it is loaded. Raises QueueFull, or WorkerError if it cannot be loaded."""


class Models(Service, Protocol):
    """All models of a server. These methods hide models that the caller's tenant may not use."""

    @property
    def has_choice(self) -> bool:
        """Whether there may be several models."""

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt that any of them takes, or an upper bound."""

    def served(self, caller: Caller) -> Sequence[ServedModel]:
        """The models that the caller may use."""

    def find(
        self,
        name: str | None,
        caller: Caller,
        conversation: Callable[[], bytes] | None = None,
        kind: str | None = None,
    ) -> ServedModel:
        """Return the model that a request names; without a name, the default one. Raises ModelNotFound.

        `conversation` returns bytes that stay the same for all requests of a conversation. Without a name, `kind` is
        what the model should do: if the default one does something else, the first one that does it is returned.
        """

    # For operators, who may use all models. These methods raise InvalidRequest where there is one model.

    async def load_model(self, model_id: str) -> ServedModel:
        """Load a model, and return it when it is loaded. Raises ModelNotFound, and what `wait_for_use` raises."""

    def unload_model(self, model_id: str) -> ServedModel:
        """Unload a model as soon as no request uses it, and return it. Raises ModelNotFound or InvalidRequest."""

    def divide(
        self,
        alias: str,
        weights: Mapping[str, float],
        sticky: Literal["key", "conversation"] | None = None,
        mirror: str | None = None,
        mirror_percent: float = 100.0,
    ) -> None:
        """Let an alias divide requests among models, from the next request on. Raises InvalidRequest.

        `sticky` says which requests stay at one model: those of a key, or those of a conversation. Without it, the
        alias keeps what it had, or uses the key. The model `mirror` gets copies of `mirror_percent` of the requests.
        """

    def remove_alias(self, alias: str) -> None:
        """Remove an alias that divides requests. Raises ModelNotFound or InvalidRequest."""

    def sticky(self) -> Mapping[str, Literal["key", "conversation"]]:
        """Return, for each alias, whether a key or a conversation decides at which model its requests stay."""

    def divided(self) -> Mapping[str, Mapping[str, float]]:
        """Return the weights of the models of each alias."""

    def mirrored(self) -> Mapping[str, Mapping[str, float]]:
        """Return, for each alias, the model that gets copies, and the percentage of requests that are copied."""

    # For copies of requests, whose answers are thrown away.

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait until a model is loaded."""

    def mirror_of(self, name: str | None, caller: Caller, kind: str) -> str | None:
        """Return the id of the model that gets a copy of a request, if one does.

        `name` is what the request named, and `kind` is what the model does, as for `find`.
        """

    def note_mirrored(self, model_id: str, result: str) -> None:
        """Count a copy: answered, failed or dropped."""
