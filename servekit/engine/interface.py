"""What the API asks of an engine, whether it runs in this process or in another one.

`LLMEngine` is the engine itself. With `--api-processes`, several processes serve HTTP, and in each of them an
`EngineClient` (servekit.api_processes) answers in its place. Methods that may have to ask another process are
coroutines; in the engine's own process they return without waiting.
"""

from __future__ import annotations

from typing import Any, Protocol

from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.input_processor import InputProcessor
from servekit.engine.live_view import LiveView
from servekit.engine.request_state import RequestState
from servekit.engine.tokenizer import Tokenizer
from servekit.errors import ServekitError
from servekit.protocol.messages import Profiled, WorkerReady
from servekit.request import GenerationRequest
from servekit.scheduler.scheduler_config import SchedulerConfig


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


class Engine(Protocol):
    """An engine as the API sees it. `tokenizer` and the others raise WorkerNotReady until the model is loaded."""

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
        """Whether a slot would be free if all waiting sequences had theirs. If not, what is not urgent should wait."""

    @property
    def worker(self) -> WorkerReady | None:
        """What the first worker reported; None until it is ready."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def input_processor(self) -> InputProcessor: ...

    @property
    def scheduler_config(self) -> SchedulerConfig: ...

    @property
    def http_counters(self) -> HttpCounters: ...

    @property
    def profiling(self) -> Profiler: ...

    def now(self) -> float:
        """The time on the clock that all times of the engine are measured with."""

    async def probe_readiness(self) -> bool:
        """Whether the engine generates tokens."""

    async def live_view(self) -> LiveView:
        """One frame of the live view."""

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""

    async def describe_replicas(self) -> list[dict[str, Any]]:
        """What /info says of each replica."""

    async def take_places(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> Places:
        """Take a request's places in the queue. The prompts' contents may still be missing.

        Raises WorkerNotReady, QueueFull or InvalidRequest.
        """

    async def submit(self, request: GenerationRequest, caller: Caller, places: Any) -> RequestState:
        """Admit all prompts of a request, or none. `places` is what `take_places` returned.

        Raises RequestError or WorkerError.
        """

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End the unfinished sequences of a tenant's requests with this id; return how many there were."""

    def drain(self, admits_requests: bool = False) -> None:
        """Begin to drain: admitted requests continue, and new ones are rejected unless `admits_requests` is set."""

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests, admitted or still in preparation."""
