"""Define the messages between an API process and the engine process.

A *question* has an id and gets one `Reply`. A *note* gets no reply. An API process numbers its requests and its
accounts; the engine process keeps what each of them holds, and frees all of it when the connection ends.
"""

from __future__ import annotations

from array import array
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from servekit.api.auth.keys import Key
from servekit.api.auth.rate_limits import Limits
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.engine.client_queue import TokenDelta
from servekit.engine.input_processor import PreparedPrompt
from servekit.engine.model_files import ChatTemplate
from servekit.errors import InternalError, ServekitError
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import TokenLogprobs, WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.scheduler_config import SchedulerConfig

Answer = TypeVar("Answer")

HEARTBEAT_S = 1.0  # between the heartbeats of each side
SILENCE_TIMEOUT_S = 30.0  # after which an API process is killed and replaced, or an engine process counts as unhealthy


class Failure(Struct, frozen=True):
    """An error of the tree in servekit.errors, as a value."""

    kind: str  # the name of its class
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an error. An error that is not in the tree is a bug in servekit."""
        if not isinstance(error, ServekitError):
            return cls(InternalError.__name__, f"internal error ({type(error).__name__})")
        return cls(type(error).__name__, error.message, error.param, error.answer_code, error.retry_after_s)

    def error(self) -> ServekitError:
        """Return the error that this describes."""
        kind = _kinds(ServekitError).get(self.kind, InternalError)
        return kind(self.message, param=self.param, code=self.code, retry_after_s=self.retry_after_s)


def _kinds(root: type[ServekitError]) -> dict[str, type[ServekitError]]:
    """Return a class of the tree and all below it, by name."""
    kinds = {root.__name__: root}
    for kind in root.__subclasses__():
        kinds |= _kinds(kind)
    return kinds


# -- from the engine process -------------------------------------------------------------------------------------------


class Start(Struct, frozen=True, tag=True):
    """The first message: serve HTTP with these settings and keys, and report that the model is loading."""

    config: ServeConfig
    keys: list[Key]  # of the keys file
    created_s: int  # when the server began, in seconds since 1970
    is_replacement: bool = False  # the model is loaded: let clients wait until this process can serve it


class Loaded(Struct, frozen=True, tag=True):
    """The model is loaded: prepare requests for it. An EngineStatus with a worker has come before."""

    path: str  # of the model's directory
    template: ChatTemplate


class EngineStatus(Struct, frozen=True, tag=True):
    """The state of the engine. It is sent when it has changed, and every HEARTBEAT_S."""

    state: str
    stage: str
    is_healthy: bool
    worker: WorkerReady | None = None  # may change: when its replica was given up and another worker has joined
    limits: SchedulerConfig | None = None  # they change with the workers; None while the engine does not run
    has_free_slots: bool = True


class AdapterChanges(Struct, frozen=True, tag=True):
    """LoRA adapters that were loaded and unloaded since the last of these messages. An AdaptersKnown answers it.

    An API process gets the first one, with all adapters, before Loaded.
    """

    version: int
    loaded: dict[str, str]  # the directory of each, by name
    unloaded: list[str] = []


class ReplaceKeys(Struct, frozen=True, tag=True):
    """Use these keys, and not the old ones of the keys file."""

    keys: list[Key]


class Drain(Struct, frozen=True, tag=True):
    """The server drains: answer what has begun, and exit."""


class Stop(Struct, frozen=True, tag=True):
    """Fail the remaining requests, and exit."""

    at_once: bool = False  # do not wait until the errors are written


class Reply(Struct, frozen=True, tag=True):
    """The answer to a question, or the reason why there is none."""

    question_id: int
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")  # msgpack of what the question's class says; by default None
    failure: Failure | None = None


class SequenceTimes(Struct, frozen=True, array_like=True, gc=False):
    """What the engine knows of a sequence, besides its tokens. Sent with its first token and with its end."""

    request: int
    index: int
    num_cached_tokens: int | None
    num_preemptions: int
    first_scheduled_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


class Output(Struct, frozen=True, tag=True):
    """What one turn of the engine's event loop put into the queues of all requests of this API process."""

    deltas: list[
        tuple[int, TokenDelta]
    ]  # with the numbers of their requests; without text, unless the request has stop strings
    times: list[SequenceTimes] = []  # they apply before the deltas


class PromptLogprobsPart(Struct, frozen=True, tag=True):
    """The next logprobs of the prompt of a sequence."""

    request: int
    index: int
    logprobs: list[TokenLogprobs]


class RequestFailed(Struct, frozen=True, tag=True):
    """An admitted request has failed."""

    request: int
    failure: Failure


FromEngine = (
    Start
    | Loaded
    | EngineStatus
    | AdapterChanges
    | ReplaceKeys
    | Drain
    | Stop
    | Reply
    | Output
    | PromptLogprobsPart
    | RequestFailed
)


# -- from an API process: notes ----------------------------------------------------------------------------------------


class Alive(Struct, frozen=True, tag=True):
    """A heartbeat, sent every HEARTBEAT_S by the event loop, with what the metrics add up over all processes."""

    num_tasks: int  # of the event loop
    num_dropped_log_lines: int  # since the process began


class Serving(Struct, frozen=True, tag=True):
    """Answer Loaded: the process listens, and is ready to prepare requests."""


class CannotServe(Struct, frozen=True, tag=True):
    """Report that the process cannot start, because of its settings or another lasting reason."""

    failure: Failure


class AdaptersKnown(Struct, frozen=True, tag=True):
    """Report that the process knows the adapters of the AdapterChanges with this version."""

    version: int


class ReleaseAdapter(Struct, frozen=True, tag=True):
    """Report that a request does not use its adapter any more, or does not wait for it any more."""

    use: int


class AddPrompt(Struct, frozen=True, tag=True):
    """One prepared prompt of a request that is submitted next."""

    request: int
    token_ids: bytes  # 32-bit integers of this machine
    sampling: list[SamplingParams]
    block_hashes: list[bytes]

    @classmethod
    def of(cls, request: int, prompt: PreparedPrompt) -> AddPrompt:
        return cls(request, prompt.token_ids.tobytes(), prompt.sampling, prompt.block_hashes)

    def prompt(self) -> PreparedPrompt:
        return PreparedPrompt(array("i", self.token_ids), self.sampling, self.block_hashes)


class Abort(Struct, frozen=True, tag=True):
    """End the sequences of a request."""

    request: int


class ReleaseRequest(Struct, frozen=True, tag=True):
    """End the sequences of a request, and free all that it holds: places in the queue, and memory for its result."""

    request: int


class ChargeTokens(Struct, frozen=True, tag=True):
    """Charge the tokens of an admitted request to an account."""

    account: int
    request: int


class UncountRequest(Struct, frozen=True, tag=True):
    """Report that a request that counted against its key's limits has ended."""

    account: int


class RequestRefused(Struct, frozen=True, tag=True):
    """Count a refusal for the metrics."""

    code: str


class RequestEnded(Struct, frozen=True, tag=True):
    """Count an HTTP request for the metrics."""

    handler: str
    method: str
    status: int


class EventLoopLag(Struct, frozen=True, tag=True):
    """Observe for the metrics how late a timer of the event loop fired, in seconds."""

    lag_s: float


# -- from an API process: questions ------------------------------------------------------------------------------------


class Question(Struct, Generic[Answer], frozen=True, tag=True, kw_only=True):
    """The base of all questions. `Answer` is the type of the answer."""

    question_id: int


class CountRequest(Question[None], frozen=True, tag=True, kw_only=True):
    """Let a request count against the limits of the key with this digest. Fails with RateLimited."""

    account: int
    digest: bytes
    limits: Limits


class ReserveOfKey(Question[None], frozen=True, tag=True, kw_only=True):
    """Reserve what a request may use of its key's limits. Fails with InvalidRequest or RateLimited."""

    account: int
    num_sequences: int
    max_tokens: int | None
    num_prompt_tokens: int


class RequestOptions(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `GenerationRequest` without what is prepared in the API process: prompts, sampling parameters, grammar."""

    num_prompts: int
    param: str  # of the first prompt
    max_tokens: int | None
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    ttft_ms: int | None = None
    deadline_ms: int | None = None
    max_drafts: int | None = None

    @classmethod
    def of(cls, request: GenerationRequest) -> RequestOptions:
        return cls(
            num_prompts=len(request.prompts),
            param=request.prompts[0].param,
            max_tokens=request.max_tokens,
            n=request.n,
            best_of=request.best_of,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            priority=request.priority,
            ttft_ms=request.ttft_ms,
            deadline_ms=request.deadline_ms,
            max_drafts=request.max_drafts,
        )

    def request(self) -> GenerationRequest:
        """Return the request, with empty prompts."""
        return GenerationRequest(
            prompts=[Prompt("", self.param)] * self.num_prompts,
            sampling=Sampling(),
            max_tokens=self.max_tokens,
            n=self.n,
            best_of=self.best_of,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            priority=self.priority,
            ttft_ms=self.ttft_ms,
            deadline_ms=self.deadline_ms,
            max_drafts=self.max_drafts,
        )


class ReservePlaces(Question[float], frozen=True, tag=True, kw_only=True):
    """Take a request's places in the waiting queue. The answer is when it arrived, on the engine's clock."""

    request: int
    options: RequestOptions
    caller: Caller


class Submit(Question[None], frozen=True, tag=True, kw_only=True):
    """Admit the prompts of a request that were added, or none."""

    request: int
    adapter: LoraAdapter | None = None


class UseAdapter(Question[LoraAdapter], frozen=True, tag=True, kw_only=True):
    """Let a request use an adapter as soon as it has a place. Fails with ModelNotFound or QueueFull."""

    use: int  # numbered by the API process
    name: str
    tenant: str  # who waits for the place


class LoadAdapter(Question[None], frozen=True, tag=True, kw_only=True):
    """Load an adapter. When this is answered, all API processes find it. Fails with InvalidRequest or WorkerError."""

    name: str
    path: str


class UnloadAdapter(Question[None], frozen=True, tag=True, kw_only=True):
    """Unload an adapter. When this is answered, no API process finds it any more. Fails with ModelNotFound."""

    name: str


class AbortRequest(Question[int], frozen=True, tag=True, kw_only=True):
    """End the unfinished sequences of a tenant's requests with this id. The answer is how many there were."""

    tenant: str
    request_id: str


class ProbeReadiness(Question[bool], frozen=True, tag=True, kw_only=True):
    """Say whether the engine generates tokens."""


class RenderMetrics(Question[bytes], frozen=True, tag=True, kw_only=True):
    """Return all metrics in Prometheus' text format."""


class DescribeEngine(Question[dict[str, Any]], frozen=True, tag=True, kw_only=True):
    """Return what /info says of the running engine."""


class LookAtScheduler(Question[Any], frozen=True, tag=True, kw_only=True):
    """Return a `LiveView`."""


class ProfileStart(Question[int], frozen=True, tag=True, kw_only=True):
    """Start recording the worker's steps. The answer is the limit on recorded steps."""


class ProfileStop(Question[Any], frozen=True, tag=True, kw_only=True):
    """Stop recording, and write the profile. The answer is `Profiled`."""


FromApiProcess = (
    Alive
    | Serving
    | CannotServe
    | AdaptersKnown
    | ReleaseAdapter
    | AddPrompt
    | Abort
    | ReleaseRequest
    | ChargeTokens
    | UncountRequest
    | RequestRefused
    | RequestEnded
    | EventLoopLag
    | CountRequest
    | ReserveOfKey
    | ReservePlaces
    | Submit
    | UseAdapter
    | LoadAdapter
    | UnloadAdapter
    | AbortRequest
    | ProbeReadiness
    | RenderMetrics
    | DescribeEngine
    | LookAtScheduler
    | ProfileStart
    | ProfileStop
)
