"""Serve a model of a Triton server: load it there, send inferences, return the tensors that come back.

It uses KServe's protocol V2 over HTTP, so other servers with this protocol work, too. With `model_control_mode =
"explicit"` the model is loaded there when it is loaded here, and unloaded there when it is unloaded here. A server that
does not have the model any more ends this engine: SeveralModels loads it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from urllib.parse import quote

from msgspec import Struct

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.errors import (
    DeadlineExceeded,
    InvalidRequest,
    RemoteFailed,
    RemoteTimeout,
    ServekitError,
    WorkerNotReady,
    shutting_down,
)
from servekit.observability.metrics import ModelMetrics
from servekit.protocol.frames import Bytes
from servekit.remote.circuit_breaker import Outcome
from servekit.remote.failure import Failure
from servekit.remote.kserve_format import ModelInfo, read_answer, read_model_info, write_request
from servekit.remote.remote_model import RemoteModel
from servekit.remote.sender import Attempt
from servekit.remote.server_client import read_up_to
from servekit.remote.settings import TritonSettings
from servekit.requests.inference import INFER, DecodeOutputs, InferenceRequest, Tensor

log = logging.getLogger("servekit")

MAX_ANSWER_BYTES = 2**24  # of one inference: all outputs, as JSON
MAX_INLINE_BYTES = 2**16  # of an answer that is decoded on the event loop
MAX_INFO_BYTES = 2**20
UNKNOWN_LENGTH = 2**20  # tokens: tensors have none, and texts are tokenized by the server
FAILED_STATUS = 500  # Triton's, with a message, also for an exception in a model's own code
BUSY_STATUSES = (503,)  # Triton's for a full queue, without a Retry-After


class _Undecoded(Struct):
    """A large answer, and the attempt that it ends."""

    answer: bytearray
    attempt: Attempt


class _Live(Struct, eq=False):
    """An inference that has not ended."""

    caller: Caller
    task: asyncio.Task[list[Tensor]]
    error: ServekitError | None = None  # why this server ended it


class TritonEngine(RemoteModel):
    """Serves one model of a Triton server. Call `start`, then `infer` any number of times, then `stop`."""

    kind = INFER
    worker = None  # no worker of this server
    max_prompt_tokens = UNKNOWN_LENGTH

    def __init__(
        self,
        config: ServeConfig,
        settings: TritonSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
    ) -> None:
        """Raises ConfigError if the API key is missing."""
        super().__init__(config, settings, clock, metrics)
        self.settings = settings
        self.info: ModelInfo | None = None  # the server's description of the model
        self._live: set[_Live] = set()
        self._model_path = f"/v2/models/{quote(config.model, safe='')}"
        self._repository_path = f"/v2/repository/models/{quote(config.model, safe='')}"

    async def describe(self) -> dict[str, object]:
        """What /info says of the server, with the model's inputs and outputs."""
        described = await super().describe()
        return {**described, "model": self.info}

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model there, if that is configured, and read its inputs and outputs.

        Raises ServekitError if it is not there.
        """
        await self.server.start()
        self.metrics.watch_remote(self.sender.stats)
        assert self.metrics.remote  # its metrics are exported from now on
        settings = self.settings
        try:
            if settings.model_control_mode == "explicit":
                await self._ask(f"{self._repository_path}/load", [b"{}"], settings.load_timeout, "load_timeout")
            self.info = read_model_info(
                await self._ask(self._model_path, None, settings.answer_timeout, "answer_timeout")
            )
        except Failure as failure:
            raise self._not_served(failure) from None
        self._has_started = True

    def _not_served(self, failure: Failure) -> ServekitError:
        if not isinstance(failure.error, InvalidRequest) and failure.status != 404:
            return failure.error
        return RemoteFailed(
            f"the server at {self.settings.url} does not serve the model {self.config.model!r}: "
            f"{failure.server_message}; check its model repository, and model_control_mode in the model file"
        )

    async def _ask(self, path: str, body: list[Bytes] | None, timeout_s: float, setting: str) -> bytearray:
        """Send a request that is about the model, and return the answer. Raises Failure."""
        try:
            async with pause_tolerant_timeout(timeout_s), self.server.open(path, body) as response:
                return await read_up_to(response, MAX_INFO_BYTES)
        except TimeoutError:
            raise self._timeout(timeout_s, setting) from None

    def _timeout(self, timeout_s: float, setting: str) -> Failure:
        return Failure(
            RemoteTimeout(
                f"the server of the model {self.config.model_name!r} did not answer within {timeout_s:g} s "
                f"({setting}); the operator can raise this limit in the model file"
            ),
            "timeout",
        )

    async def stop(self, graceful: bool = True) -> None:
        """Fail running inferences, unload the model there if that is configured, and close all connections."""
        self._rejects_requests = True
        self.fail_all(shutting_down())
        await asyncio.gather(*(each.task for each in self._live), return_exceptions=True)
        was_started, self._has_started = self._has_started, False
        if graceful and was_started and self.settings.model_control_mode == "explicit":
            try:
                path = f"{self._repository_path}/unload"
                await self._ask(path, [b"{}"], self.settings.connect_timeout, "connect_timeout")
            except Failure as failure:
                log.warning("the model %s may still be loaded there: %s", self.config.model_name, failure.error.message)
        await self.server.close()
        self._ended.set()

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all inferences."""
        if self._live:
            log.warning("failing %d requests to %s: %s", len(self._live), self.settings.url, error.message)
        for live in self._live:
            self._end(live, error)

    def _end(self, live: _Live, error: ServekitError) -> None:
        live.error = live.error or error
        live.task.cancel()

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End a tenant's inferences with this id; return how many there were."""
        found = [each for each in self._live if (each.caller.tenant, each.caller.request_id) == (tenant, request_id)]
        for live in found:
            self._end(live, InvalidRequest("the request was aborted by POST /abort_request", code="aborted"))
        return len(found)

    # -- inferences ---------------------------------------------------------------------------------------------------

    async def infer(
        self, request: InferenceRequest, caller: Caller = ANONYMOUS, decode: DecodeOutputs | None = None
    ) -> list[Tensor]:
        """Send an inference, and return its outputs. Raises RequestError or WorkerError.

        `decode` gets an answer of more than MAX_INLINE_BYTES, when its connection is free again.
        """
        self.check_admission(caller, request.num_inputs, 1)
        assert self.info is not None, "start was called"
        body = write_request(request, self.info, self.config.model_name)
        metrics, started_s, outcome = self.metrics.predictions, self._clock(), "failed"
        leave_queue = self._enter_queue(caller.tenant)
        metrics.admitted(request.num_inputs, 0)
        computation = self._compute(body, caller, decode, leave_queue)
        live = _Live(caller, asyncio.create_task(computation, name="servekit remote inference"))
        live.task.add_done_callback(lambda _: leave_queue())  # also if it is cancelled before its first step
        self._live.add(live)
        try:
            deadline_s = None if request.deadline_ms is None else request.deadline_ms / 1e3
            async with asyncio.timeout(deadline_s):
                outputs = await live.task
            outcome = "computed"
            return outputs
        except TimeoutError:
            outcome = "expired"
            raise DeadlineExceeded("the deadline passed before the model's server had answered (deadline_ms)") from None
        except asyncio.CancelledError:
            if live.error is None:
                outcome = "aborted"  # the client has left
                raise
            raise live.error from None
        finally:
            self._live.remove(live)
            live.task.cancel()
            for _ in range(request.num_inputs):
                metrics.ended(outcome, self._clock() - started_s)

    def _enter_queue(self, tenant: str) -> Callable[[], None]:
        """Take a place in the queue, and return the function that gives it back, which is idempotent."""
        places, is_held = self.sender.places, True
        places.take(tenant, 1)

        def leave_queue() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                places.release(tenant, 1)

        return leave_queue

    async def _compute(
        self, body: list[Bytes], caller: Caller, decode: DecodeOutputs | None, leave_queue: Callable[[], None]
    ) -> list[Tensor]:
        """Return the outputs. A large answer is decoded when its connection is free again."""
        answer = await self._infer(body, caller, leave_queue)
        if isinstance(answer, list):
            return answer
        try:
            outputs = read_answer(answer.answer) if decode is None else await decode(answer.answer)
            answer.attempt.report(Outcome.ANSWERED, "answered")
            return outputs
        except RemoteFailed:  # it is invalid
            answer.attempt.report(Outcome.FAILED, "failed")
            raise
        finally:
            answer.attempt.report(Outcome.UNKNOWN, "aborted")

    async def _infer(
        self, body: list[Bytes], caller: Caller, leave_queue: Callable[[], None]
    ) -> list[Tensor] | _Undecoded:
        """Return the outputs, or an answer that is not decoded yet."""
        answer: list[Tensor] | _Undecoded = []

        async def exchange(attempt: Attempt) -> None:
            nonlocal answer
            answer = await self._exchange(attempt, body, caller.request_id)

        async with self.sender.connection(caller.tenant, leave_queue):
            await self.sender.send(caller.tenant, exchange)
        return answer

    async def _exchange(self, attempt: Attempt, body: list[Bytes], request_id: str) -> list[Tensor] | _Undecoded:
        """Send an inference once. Raises Failure or RemoteFailed."""
        timeout_s, started_s = self.settings.answer_timeout, self._clock()
        try:
            async with pause_tolerant_timeout(timeout_s):
                path = f"{self._model_path}/infer"
                async with self.server.open(path, body, request_id, busy_statuses=BUSY_STATUSES) as response:
                    self.metrics.remote.answer_began(self._clock() - started_s)
                    attempt.note_answering()
                    answer = await read_up_to(response, MAX_ANSWER_BYTES + 1)
        except TimeoutError:
            raise self._timeout(timeout_s, "answer_timeout") from None
        except Failure as failure:
            # The server's message repeats names that clients chose. Only its beginning is from the server.
            if failure.status == 404 or failure.server_message.startswith("Request for unknown model"):
                self._lose(failure)
            elif failure.status == FAILED_STATUS and failure.server_message:
                # The server reports that the model's code has failed. An input must not open the breaker of its tenant.
                failure.outcome = Outcome.ANSWERED
            raise
        if len(answer) > MAX_ANSWER_BYTES:
            error = RemoteFailed(f"the model's server sent an answer of more than {MAX_ANSWER_BYTES} bytes")
            raise Failure(error, "failed", Outcome.ANSWERED)  # the server works: others' requests must not suffer
        if len(answer) > MAX_INLINE_BYTES:
            return _Undecoded(answer, attempt.hand_over())
        outputs = read_answer(answer)
        attempt.report(Outcome.ANSWERED, "answered")
        return outputs

    def _lose(self, failure: Failure) -> None:
        """The server does not have the model any more: end, so that it is loaded again."""
        log.error(
            "the server at %s does not serve %s: %s", self.settings.url, self.config.model, failure.server_message
        )
        failure.may_repeat = False
        failure.error = self.failure = WorkerNotReady(
            f"the server of the model {self.config.model_name!r} does not serve it any more", retry_after_s=5
        )
        self._ended.set()
