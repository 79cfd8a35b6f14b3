"""Serve a model that embeds or reranks on another server: admit requests, send their inputs there, deliver the results.

It has the same methods as the engine of a local predictor. Texts are not tokenized here, so their tokens are estimated
until the server has counted them. `Sender` decides when a request is sent, and whether it is sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.prediction_state import PredictionState
from servekit.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    RemoteFailed,
    RemoteTimeout,
    ServekitError,
    shutting_down,
)
from servekit.observability.metrics import ModelMetrics
from servekit.protocol.prediction import Modality, PredictorInfo, PredictorKind
from servekit.remote.circuit_breaker import Outcome
from servekit.remote.failure import Failure
from servekit.remote.prediction_format import (
    Json,
    RemotePart,
    check_lengths,
    check_supported,
    read_answer,
    read_result,
    write_requests,
)
from servekit.remote.remote_model import RemoteModel
from servekit.remote.sender import Attempt
from servekit.remote.server_client import read_up_to
from servekit.remote.settings import PredictorServerSettings
from servekit.requests.prediction import PredictionRequest

log = logging.getLogger("servekit")

MAX_ANSWER_BYTES = 2**24  # of one request to the server
BYTES_PER_SLICE = 2**16  # of an answer, whose numbers are read without a pause; that takes less than a millisecond
UNKNOWN_LENGTH = 2**20  # tokens: the server knows how long an input may be
MAX_TOKENS_ON_LOOP = 2**16  # of a request that is encoded on the event loop: a million token ids take 5 ms
ASSUMED_DIMENSIONS = 4096  # of an embedding, until one has come: for the memory of answers
CHARACTERS_PER_TOKEN = 4  # of texts, estimated


class _RunningRequest(PredictionState):
    """A request that was sent, or waits for a connection."""

    def __init__(self, caller: Caller, request: PredictionRequest, abort: Callable[[_RunningRequest], None]) -> None:
        num_tokens = sum(map(_estimated_tokens, request.inputs))
        super().__init__(caller, len(request.inputs), num_tokens, abort)
        self.task: asyncio.Task[None] | None = None
        self.num_counted = 0  # tokens, by the server
        self.num_places = 0  # in the queue of requests that wait for a connection
        self.outcome = "aborted"  # for the metrics


class RemotePredictor(RemoteModel):
    """Serves one remote model. Call `start`, then `submit` any number of requests, then `stop`."""

    worker = None  # no worker of this server
    max_prompt_tokens = UNKNOWN_LENGTH

    def __init__(
        self,
        config: ServeConfig,
        settings: PredictorServerSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
    ) -> None:
        """Raises ConfigError if the API key is missing."""
        super().__init__(config, settings, clock, metrics)
        self.settings = settings
        self.kind: str = config.kind
        self._kind = PredictorKind(config.kind)
        # Its scores are as the server sends them, so they have no activation here.
        self.model = PredictorInfo(
            kind=self._kind,
            modality=Modality.TEXT,
            architecture="",
            num_parameters=0,
            vocab_size=0,
            max_model_len=UNKNOWN_LENGTH,
            dimensions=ASSUMED_DIMENSIONS if self._kind is PredictorKind.EMBED else 0,
        )
        self._live: set[_RunningRequest] = set()

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve. The server need not answer yet: it is asked for its models, with a short timeout."""
        await self.server.start()
        self.metrics.watch_remote(self.sender.stats)
        assert self.metrics.remote  # its metrics are exported from now on
        if self.settings.dialect != "tei":  # which serves one model, and lists none
            await self.server.look_up(self.config.model, self.settings.connect_timeout)
        self._has_started = True

    async def stop(self, graceful: bool = True) -> None:
        """Fail the requests that still run, and close all connections."""
        self._rejects_requests = True
        tasks = [live.task for live in self._live if live.task is not None]
        self.fail_all(shutting_down())
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.close()
        self._ended.set()

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests."""
        if self._live:
            log.warning("failing %d requests to %s: %s", len(self._live), self.settings.url, error.message)
        for live in list(self._live):
            self._fail(live, error)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def submit(self, request: PredictionRequest, caller: Caller = ANONYMOUS) -> PredictionState:
        """Admit all inputs of a request, or none. Raises RequestError or WorkerError."""
        settings = self.settings
        check_supported(request, self._kind, self.config.model_name, settings.dialect)
        parts = write_requests(request, self._kind, self.config.model, settings.dialect, settings.max_batch_size)
        self.check_admission(caller, len(request.inputs), len(parts))
        live, started_s = _RunningRequest(caller, request, self._abort), self._clock()
        self.sender.places.take(caller.tenant, len(parts))
        live.num_places = len(parts)
        self._live.add(live)
        self.metrics.predictions.admitted(live.num_inputs, live.num_tokens)
        running = self._run(live, parts, request.deadline_ms)
        live.task = asyncio.create_task(running, name="servekit remote prediction")
        live.task.add_done_callback(lambda _: self._end(live, started_s))  # also if it is cancelled before it began
        return live

    def _end(self, live: _RunningRequest, started_s: float) -> None:
        self._live.remove(live)
        self._leave_queue(live, live.num_places)
        for _ in range(live.num_inputs):
            self.metrics.predictions.ended(live.outcome, self._clock() - started_s)

    def _leave_queue(self, live: _RunningRequest, num_places: int) -> None:
        live.num_places -= num_places
        self.sender.places.release(live.caller.tenant, num_places)

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End the unfinished inputs of a tenant's requests with this id; return how many there were."""
        num_aborted = 0
        for live in list(self._live):
            if (live.caller.tenant, live.caller.request_id) == (tenant, request_id):
                num_aborted += live.num_inputs
                self._fail(live, InvalidRequest("the request was aborted by POST /abort_request", code="aborted"))
        return num_aborted

    def _abort(self, live: _RunningRequest) -> None:
        """End a request whose client no longer waits. Does nothing if it has its results, or has ended."""
        if live.num_missing and live.task is not None:
            live.task.cancel()

    def _fail(self, live: _RunningRequest, error: ServekitError) -> None:
        if live.num_missing:
            live.outcome = "failed"
        live.fail(error)
        self._abort(live)

    # -- the exchange with the server ---------------------------------------------------------------------------------

    async def _run(self, live: _RunningRequest, parts: list[RemotePart], deadline_ms: int | None) -> None:
        """Send all parts of a request, and report the first failure."""
        deadline_s = None if deadline_ms is None else deadline_ms / 1e3
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._answer(live, part))
            live.outcome = "computed"
        except TimeoutError:
            live.outcome = "expired"
            live.fail(
                DeadlineExceeded(
                    f"the deadline passed before the model's server had answered (deadline_ms {deadline_ms})"
                )
            )
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if not isinstance(first, ServekitError):
                log.error("a request to %s failed", self.settings.url, exc_info=first)
                first = InternalError("internal error; the server's log has the details")
            live.outcome = "failed"
            live.fail(first)

    async def _answer(self, live: _RunningRequest, part: RemotePart) -> None:
        """Wait for a connection, and send one request."""
        try:
            is_long = live.num_tokens > MAX_TOKENS_ON_LOOP
            body = await asyncio.to_thread(_encode, part.fields) if is_long else _encode(part.fields)
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the request cannot be sent to the model's server: a text has characters that are not valid Unicode "
                "(surrogates); remove them"
            ) from None

        async def exchange(attempt: Attempt) -> None:
            results, num_tokens = await self._exchange(attempt, part, body, live.caller.request_id)
            live.num_counted += num_tokens
            if live.num_missing == part.num_inputs and live.num_counted:
                live.num_tokens = live.num_counted
            for index, result in enumerate(results, part.first):
                live.put(index, result)

        async with self.sender.connection(live.caller.tenant, lambda: self._leave_queue(live, 1)):
            await self.sender.send(live.caller.tenant, exchange)

    async def _exchange(
        self, attempt: Attempt, part: RemotePart, body: bytes, request_id: str
    ) -> tuple[list[bytes], int]:
        """Send a request once. Raises Failure or RemoteFailed."""
        timeout_s, started_s = self.settings.answer_timeout, self._clock()
        try:
            async with (
                pause_tolerant_timeout(timeout_s),
                self.server.open(part.path, [body], request_id) as response,
            ):
                self.metrics.remote.answer_began(self._clock() - started_s)
                attempt.note_answering()
                answer = await read_up_to(response, MAX_ANSWER_BYTES + 1)
        except TimeoutError:
            raise Failure(
                RemoteTimeout(
                    f"the server of the model {self.config.model_name!r} did not answer within {timeout_s:g} s "
                    "(answer_timeout); the operator can raise this limit in the model file"
                ),
                "timeout",
            ) from None
        if len(answer) > MAX_ANSWER_BYTES:
            error = RemoteFailed(
                f"the model's server sent an answer of more than {MAX_ANSWER_BYTES} bytes; the operator can lower "
                f"max_batch_size ({self.settings.max_batch_size}) in the model file"
            )
            raise Failure(error, "failed", Outcome.ANSWERED)  # the server works: others' requests must not suffer
        values, num_tokens = read_answer(answer, part, self._kind, self.settings.dialect)
        results, num_bytes = [], 0
        for value in values:
            results.append(read_result(value, self._kind))
            num_bytes += len(value)
            if num_bytes > BYTES_PER_SLICE:
                await asyncio.sleep(0)
                num_bytes = 0
        check_lengths(results)
        attempt.report(Outcome.ANSWERED, "answered")
        if self._kind is PredictorKind.EMBED and "dimensions" not in part.fields:
            self.model = replace(self.model, dimensions=len(results[0]) // 4)
        return results, num_tokens


def _encode(fields: Json) -> bytes:
    return msgspec.json.encode(fields, enc_hook=array.tolist)


def _estimated_tokens(value: object) -> int:
    if isinstance(value, str):
        return max(1, len(value) // CHARACTERS_PER_TOKEN)
    if isinstance(value, tuple):
        return sum(map(_estimated_tokens, value))
    return len(value)  # type: ignore[arg-type]  # token ids
