"""Serve a model that runs on another server: admit requests, send them there, and deliver what comes back.

The verbs are those of the engine of a local model. What is bounded: requests that wait (`max_num_queued_reqs`),
connections (`max_connections`, which tenants get in turns), each wait, the retries of one request and of all requests
together. A server that fails is not asked for a while (`CircuitBreaker`). Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any, NoReturn

from servekit import __version__
from servekit.aio.round_robin_semaphore import RoundRobinSemaphore
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.client_queue import ParsedDelta, TokenDelta
from servekit.engine.live_view import LiveView
from servekit.engine.model_kind import GENERATE
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.engine.tokenizer import Tokenizer
from servekit.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    QueueFull,
    RemoteFailed,
    RemoteTimeout,
    RemoteUnavailable,
    ServekitError,
    shutting_down,
)
from servekit.observability.live_frames import LiveState, LiveWorker
from servekit.observability.metrics import HttpMetrics, ModelMetrics, RemoteStats
from servekit.protocol.messages import WorkerReady
from servekit.remote.circuit_breaker import CircuitBreaker, Outcome, Permit, State
from servekit.remote.failure import Failure
from servekit.remote.openai_request import RemoteRequest, check_supported, write_requests
from servekit.remote.openai_stream import DONE, AnswerReader, EventReader, Piece
from servekit.remote.request_state import UNKNOWN_TOKEN_ID, RemoteState
from servekit.remote.retry_budget import RetryBudget
from servekit.remote.server_client import ServerClient, encode
from servekit.remote.settings import RemoteSettings
from servekit.request import GenerationRequest
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason
from servekit.shared_budget import SharedBudget
from servekit.time_causes import TimeCause

log = logging.getLogger("servekit")

UNKNOWN_LENGTH = 2**20  # tokens: an upper bound while the server has not told the length of its longest sequence
FIRST_BACKOFF_S = 0.1  # before a retry; doubled for each further one, and less by up to half, at random
MAX_WAIT_S = 2.0  # that a server may ask for before a retry; for longer, the client is told to come back
DRAIN_S = 1.0  # for the end of a response that is complete, so that its connection can be used again
RETRY_AFTER_S = 5


class NoTokenizer(Tokenizer):
    """Stands for the tokenizer of a remote model, which is not here. It refuses what needs one."""

    def __init__(self, model: str) -> None:
        self._model = model

    def decode(self, *_: Any, **__: Any) -> NoReturn:
        raise refusal(self._model)

    check_queue = token_bytes_of = decode

    def is_special(self, token_id: int) -> bool:
        return False


def refusal(model: str) -> InvalidRequest:
    """Return the error for what needs the tokenizer of a remote model."""
    return InvalidRequest(
        f"the model {model!r} runs on another server, and its tokenizer is not known here; ask that server",
        code="not_supported",
    )


class _Places:
    """The places in the queue that a request holds until it is submitted. Then its state holds them."""

    def __init__(self, budget: SharedBudget, tenant: str, num_places: int, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self._budget = budget
        self._tenant = tenant
        self._num_places = num_places

    def release(self) -> None:
        self.hand_over()(self._num_places)
        self._num_places = 0

    def hand_over(self) -> Callable[[int], None]:
        """Return the function that gives places back, which the caller calls for all of them from now on."""
        return lambda num_places: self._budget.release(self._tenant, num_places)

    def forget(self) -> None:
        """Note that the request's state holds the places."""
        self._num_places = 0


class RemoteEngine:
    """Serves one remote model. Call `start`, then `submit` any number of requests, then `stop`."""

    kind = GENERATE
    takes_messages = True
    worker: WorkerReady | None = None  # it is not this server's
    failure: ServekitError | None = None  # a remote model never ends the engine
    worker_pids: list[int | None] = []  # noqa: RUF012  # there are none
    is_healthy = True

    def __init__(
        self,
        config: ServeConfig,
        settings: RemoteSettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
    ) -> None:
        """Raises ConfigError if the API key is missing."""
        self.config = config
        self.settings = settings
        self.metrics = metrics or ModelMetrics(config)
        self.tokenizer = NoTokenizer(config.model_name)
        self.breaker = CircuitBreaker(settings.failures_to_open, settings.cooldown)
        self._server = ServerClient(config.model_name, settings)
        self._clock = clock
        self._retries = RetryBudget(settings.retry_ratio)
        self._places = SharedBudget(config.max_num_queued_reqs)
        self._slots = RoundRobinSemaphore(settings.max_connections)
        self._num_connections = 0
        self._num_waiting = 0
        self._live: set[RemoteState] = set()  # whose answers have not all ended
        self._tasks: set[asyncio.Task[Any]] = set()
        self.known_length = config.max_model_len  # tokens of the longest sequence, if the server has told
        self._has_started = False
        self._is_draining = False
        self._rejects_requests = False
        self._stopped = asyncio.Event()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, draining."""
        if self._is_draining:
            return "draining"
        if not self._has_started:
            return "loading"
        return "recovering" if self._refuses_requests else "ready"

    @property
    def _refuses_requests(self) -> bool:
        """Whether the breaker is open. When its cooldown is over, it is not: it waits for a request to try."""
        return self.breaker.state is State.OPEN and self.breaker.retry_after_s(self._clock()) > 1

    @property
    def stage(self) -> str:
        """What it is doing, as text for people."""
        if self._refuses_requests:
            return "sends no requests to its server for now, because that server failed too often in a row"
        return "serving"

    @property
    def has_free_slots(self) -> bool:
        """True: what is not urgent waits for a connection, if it is for this model, and never for another model."""
        return True

    @property
    def http_counters(self) -> HttpMetrics:
        return self.metrics.http

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The length of the longest sequence, as far as it is known."""
        length = self.max_prompt_tokens
        return SchedulerConfig(
            num_blocks=1,
            block_size=length,
            max_model_len=length,
            max_num_seqs=self.settings.max_connections,
            max_num_batched_tokens=length,
        )

    @property
    def input_processor(self) -> Any:
        raise refusal(self.config.model_name)

    @property
    def profiling(self) -> Any:
        raise refusal(self.config.model_name)

    def now(self) -> float:
        return self._clock()

    def stats(self) -> RemoteStats:
        """The state at this moment."""
        return RemoteStats(self.breaker.state, self._num_connections, self._num_waiting)

    async def probe_readiness(self) -> bool:
        """Whether requests are sent to the server. None is sent for this call: it could cost money."""
        return self.state == "ready"

    async def render_metrics(self) -> bytes:
        raise NotImplementedError("a remote model is one of several")

    async def live_view(self) -> LiveView:
        """One frame of the live view, without sequences and blocks."""
        worker = LiveWorker(self.stage)
        return LiveView(LiveState(self.now(), self.state, self.stage, self.config.model_name, __version__, [worker]))

    async def describe(self) -> dict[str, Any]:
        """What /info says of the server."""
        replica = {"replica": 0, "state": self.stage, "breaker": self.breaker.state}
        return {"replicas": [replica]}

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest sequence, as far as the server has told."""
        return self.known_length or UNKNOWN_LENGTH

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve. The server need not answer yet: it is asked for its models, but not for long."""
        await self._server.start()
        self.metrics.watch_remote(self.stats)
        assert self.metrics.remote  # its metrics are exported from now on
        length = await self._server.look_up(self.config.model, self.settings.connect_timeout)
        self.known_length = self.config.max_model_len or length
        self._has_started = True

    def _start_task(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=f"servekit remote {name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self, graceful: bool = True) -> None:
        """Fail the requests that still run, and close all connections."""
        self._rejects_requests = True
        self.fail_all(shutting_down())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()
        self._stopped.set()

    def drain(self, admits_requests: bool = False) -> None:
        """Begin to drain: admitted requests continue, and new ones are rejected unless `admits_requests` is set."""
        self._is_draining = True
        self._rejects_requests = not admits_requests
        self.metrics.engine.is_draining = True

    async def wait_until_failed(self) -> None:
        """Return when it has been stopped: a server that fails is no reason to end."""
        await self._stopped.wait()

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests."""
        if self._live:
            log.warning("failing %d requests to %s: %s", len(self._live), self.settings.url, error.message)
        for state in list(self._live):
            self._fail(state, error)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def take_places(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> _Places:
        """Take a place in the queue for each prompt. Raises InvalidRequest, QueueFull or RemoteUnavailable."""
        if self._rejects_requests:
            raise shutting_down()
        most = self.config.max_client_batch_size if caller.max_answers is None else caller.max_answers
        if request.num_sequences > most:
            raise InvalidRequest(
                f"the request asks for {request.num_sequences} answers (prompts times n); the limit is {most} "
                "(max_client_batch_size)"
            )
        check_supported(request, self.config.model_name, self.settings.dialect)
        now_s = self._clock()
        if self._refuses_requests:
            self.metrics.remote.rejected()
            raise self._breaker_open_error(now_s)
        budget, tenant, num_places = self._places, caller.tenant, len(request.prompts)
        if not budget.has_room(tenant, num_places):
            raise QueueFull(
                f"the queue is full: {budget.total} requests wait for the server of the model "
                f"{self.config.model_name!r}{budget.describe_share(tenant)}, and the request adds {num_places}; the "
                f"limit is {budget.limit} (max_num_queued_reqs). Please try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        budget.take(tenant, num_places)
        return _Places(budget, tenant, num_places, now_s)

    def _breaker_open_error(self, now_s: float) -> RemoteUnavailable:
        retry_after_s = self.breaker.retry_after_s(now_s)
        return RemoteUnavailable(
            f"the server of the model {self.config.model_name!r} has failed {self.settings.failures_to_open} times or "
            f"more in a row (failures_to_open), so no request is sent to it for about {retry_after_s} s; please try "
            "again later",
            retry_after_s=retry_after_s,
        )

    async def submit(self, request: GenerationRequest, caller: Caller, places: _Places) -> RequestState:
        """Send a request, and return when the server has begun to answer. Raises RequestError or WorkerError."""
        check_supported(request, self.config.model_name, self.settings.dialect)
        requests = write_requests(request, self.config.model, self.settings.dialect)
        interval = request.stream_interval or self.config.stream_interval
        state = RemoteState(request, caller, interval, places.arrival_s, self._abort, places.hand_over())
        places.forget()
        self._live.add(state)
        self._set_deadlines(state)
        state.task = self._start_task(self._run(state, requests), f"request {caller.request_id}")
        state.task.add_done_callback(lambda _: state.release_places())
        request.mark(TimeCause.ADMISSION)  # what follows is the server's time
        try:
            await state.begun
        except BaseException:
            state.abort()
            raise
        return state

    def _set_deadlines(self, state: RemoteState) -> None:
        request, loop, now_s = state.request, asyncio.get_running_loop(), self._clock()
        for milliseconds, expire in ((request.deadline_ms, self._expire), (request.ttft_ms, self._expire_silent)):
            if milliseconds is not None:
                delay_s = max(0.0, state.arrival_s + milliseconds / 1e3 - now_s)
                state.timers.append(loop.call_later(delay_s, expire, state))

    def _expire(self, state: RemoteState) -> None:
        """The request's deadline has passed: its client gets the answers as far as they are."""
        if not state.begun.done():
            self._fail(state, DeadlineExceeded("the deadline passed before the model's server had begun to answer"))
            return
        self._cut(state, FinishReason.DEADLINE)

    def _expire_silent(self, state: RemoteState) -> None:
        if any(output.first_token_s is None for output in state.unfinished()):
            self._expire(state)

    def _cut(self, state: RemoteState, reason: FinishReason) -> None:
        """End the unfinished answers of a request whose client still reads."""
        for output in state.unfinished():
            self._finish(state, output, reason)
        self._drop(state)

    def _abort(self, state: RequestState) -> None:
        """End a request whose client no longer reads. Does nothing if it has ended."""
        assert isinstance(state, RemoteState)
        for output in state.unfinished():
            self._note_end(state, output, FinishReason.ABORT)
        self._drop(state)

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End the unfinished answers of a tenant's requests with this id; return how many there were."""
        num_aborted = 0
        for state in list(self._live):
            if (state.caller.tenant, state.caller.request_id) == (tenant, request_id):
                num_aborted += state.num_unfinished
                state.has_begun()
                self._cut(state, FinishReason.ABORT)
        return num_aborted

    def _fail(self, state: RemoteState, error: ServekitError) -> None:
        """Report an error to the client of a request."""
        if state not in self._live:
            return
        for output in state.unfinished():
            self._note_end(state, output, FinishReason.ERROR)
        if state.begun.done():
            state.queue.fail(error)
        else:
            state.begun.set_exception(error)
        self._drop(state)

    def _drop(self, state: RemoteState) -> None:
        """Forget a request whose answers have ended. What of it still runs is cancelled, so its connection closes."""
        if state not in self._live:
            return
        self._live.remove(state)
        for timer in state.timers:
            timer.cancel()
        if state.task is not None and state.task is not asyncio.current_task():
            state.task.cancel()

    # -- the exchange with the server ---------------------------------------------------------------------------------

    async def _run(self, state: RemoteState, requests: list[RemoteRequest]) -> None:
        """Send all requests that one client's request needs, and report the first failure."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, request in enumerate(requests):
                    group.create_task(self._answer(state, number, request))
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            if not isinstance(first, ServekitError):
                log.error("a request to %s failed", self.settings.url, exc_info=first)
                first = InternalError("internal error; the server's log has the details")
            self._fail(state, first)

    async def _answer(self, state: RemoteState, number: int, request: RemoteRequest) -> None:
        """Wait for a connection, and send one request."""
        tenant, timeout_s = state.caller.tenant, self.settings.first_token_timeout
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire(tenant)
        except TimeoutError:
            raise RemoteUnavailable(
                f"all {self.settings.max_connections} connections to the server of the model "
                f"{self.config.model_name!r} were in use for {timeout_s:g} s; send fewer requests at a time, or let "
                "the operator raise max_connections or first_token_timeout in the model file",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        finally:
            self._num_waiting -= 1
            state.release_places(1)
        self._num_connections += 1
        try:
            await self._send_until_answered(state, number, request.path, await encode(request))
        finally:
            self._num_connections -= 1
            self._slots.release(tenant)

    async def _send_until_answered(self, state: RemoteState, number: int, path: str, body: bytes) -> None:
        """Send a request, again if that fails before anything of the answer has come."""
        self._retries.request_began()
        for attempt in itertools.count():
            try:
                await self._exchange(state, number, path, body)
                return
            except Failure as failure:
                if not self._may_repeat(failure, attempt):
                    raise failure.error from None
                backoff_s = FIRST_BACKOFF_S * 2**attempt * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(backoff_s, failure.wait_s))

    def _may_repeat(self, failure: Failure, attempt: int) -> bool:
        if not failure.may_repeat or failure.wait_s > MAX_WAIT_S or attempt >= self.settings.max_retries:
            return False
        if self.breaker.state is not State.CLOSED:
            return False
        if not self._retries.take():
            self.metrics.remote.retry_refused()
            return False
        self.metrics.remote.retried()
        return True

    async def _exchange(self, state: RemoteState, number: int, path: str, body: bytes) -> None:
        """Send a request once, and deliver the answers. Raises Failure, or RemoteUnavailable if it must not be sent."""
        now_s, breaker, metrics = self._clock(), self.breaker, self.metrics.remote
        permit = breaker.begin(now_s)
        if permit is None:
            metrics.rejected()
            raise self._breaker_open_error(now_s)
        for output in state.outputs_of(number):
            output.sequence.first_scheduled_s = now_s
        exchange = _Exchange(self, state, number, permit)
        try:
            await exchange.run(path, body)
        except Failure as failure:
            failure.may_repeat &= not exchange.has_delivered
            exchange.report(failure.outcome, failure.result)
            raise
        except RemoteFailed as error:  # it sent an invalid answer
            exchange.report(Outcome.FAILED, "failed")
            raise Failure(error, "failed") from None
        finally:
            exchange.report(Outcome.UNKNOWN, "aborted")

    def note_answering(self, permit: Permit) -> None:
        """Note that an answer has begun. It ends a probe: a long answer must not keep other requests waiting."""
        if self.breaker.state is State.HALF_OPEN:
            self.breaker.end(permit, Outcome.ANSWERED, self._clock())

    def note_outcome(self, permit: Permit, outcome: Outcome, result: str) -> None:
        """Note how a request to the server has ended."""
        before, metrics = self.breaker.state, self.metrics.remote
        self.breaker.end(permit, outcome, self._clock())
        metrics.request_ended(result)
        if self.breaker.state is State.OPEN and before is not State.OPEN:
            metrics.breaker_opened()
            log.warning(
                "the server of the model %s (%s) has failed too often in a row (failures_to_open: %d): no request is "
                "sent to it for %d s; check that it runs",
                self.config.model_name,
                self.settings.url,
                self.settings.failures_to_open,
                self.breaker.retry_after_s(self._clock()),
            )

    # -- delivery -----------------------------------------------------------------------------------------------------

    def deliver(self, state: RemoteState, output: SequenceOutput, piece: Piece) -> None:
        """Put a piece of an answer into the client's queue."""
        now_s, requests = self._clock(), self.metrics.requests
        if output.first_token_s is None:
            output.first_token_s = now_s
            requests.tokens_delivered([now_s - state.arrival_s], [], now_s)
        elif output.last_token_s is not None:
            requests.tokens_delivered([], [now_s - output.last_token_s], now_s)
        output.last_token_s = now_s
        output.num_tokens += 1
        index = output.index
        if state.request.chat is not None:
            parsed = ParsedDelta(index, UNKNOWN_TOKEN_ID, piece.text, False, events=piece.events)
            state.queue.put(parsed)
        else:
            state.queue.put(TokenDelta(index, UNKNOWN_TOKEN_ID, piece.text, False))
        if output.count_token is not None and not output.count_token():  # the client's key may have no more
            self._finish(state, output, FinishReason.LENGTH)
            if not state.num_unfinished:
                self._drop(state)

    def complete(self, state: RemoteState, number: int, reader: AnswerReader) -> None:
        """All answers to a prompt are complete."""
        outputs = state.outputs_of(number)
        if reader.usage is not None:
            state.usage[number] = reader.usage
            num_more = reader.usage.num_completion_tokens - sum(output.num_tokens for output in outputs)
            self.metrics.requests.tokens_reported(max(0, num_more))
            if len(outputs) == 1:
                outputs[0].num_tokens += num_more
        for place, output in enumerate(outputs):
            if output.sequence.finish_reason is None:
                ending = reader.endings[place]
                self._finish(state, output, ending.reason, ending.stop_reason)
        if not state.num_unfinished:
            self._drop_when_read(state)

    def _drop_when_read(self, state: RemoteState) -> None:
        """Forget a request whose answers are complete, but let the ends of its responses be read."""
        state.task, task = None, state.task
        self._drop(state)
        state.task = task

    def _finish(
        self,
        state: RemoteState,
        output: SequenceOutput,
        reason: FinishReason,
        stop_reason: str | int | None = None,
    ) -> None:
        """Deliver the end of an answer."""
        self._note_end(state, output, reason)
        state.queue.put(TokenDelta(output.index, None, "", False, reason, stop_reason))

    def _note_end(self, state: RemoteState, output: SequenceOutput, reason: FinishReason) -> None:
        state.note_end(output, reason)
        output.ended_s = self._clock()
        sequence, requests = output.sequence, self.metrics.requests
        sequence.prompt_length = state.prompt_tokens_of(output.index // state.request.n)
        requests.sequence_admitted(sequence)
        requests.sequence_ended(
            sequence, reason, output.num_tokens, output.first_token_s, output.last_token_s, self._clock()
        )


class _Exchange:
    """One request to the server and its response."""

    def __init__(self, engine: RemoteEngine, state: RemoteState, number: int, permit: Permit) -> None:
        self._permit: Permit | None = permit  # until the outcome is reported
        self.has_delivered = False
        self._engine = engine
        self._state = state
        self._number = number
        self._events = EventReader()
        self._answers = AnswerReader(state.request.n, state.request.chat is not None)
        self._is_complete = False

    def report(self, outcome: Outcome, result: str) -> None:
        """Report how it ended. What is reported first counts."""
        permit, self._permit = self._permit, None
        if permit is not None:
            self._engine.note_outcome(permit, outcome, result)

    async def run(self, path: str, body: bytes) -> None:
        """Send the request, and deliver the response. Raises Failure or RemoteFailed."""
        engine, loop = self._engine, asyncio.get_running_loop()
        settings, started_s = engine.settings, engine.now()
        try:
            async with asyncio.timeout(settings.first_token_timeout) as timeout:
                async with engine._server.open(path, body, self._state.caller.request_id) as response:
                    engine.metrics.remote.answer_began(engine.now() - started_s)
                    self._state.has_begun()
                    async for received in response:
                        was_complete = self._is_complete
                        has_more = self._read(self._events.feed(received))
                        if self._is_complete and not was_complete:
                            timeout.reschedule(loop.time() + DRAIN_S)
                        elif has_more and self.has_delivered and not was_complete:
                            timeout.reschedule(loop.time() + settings.token_timeout)
                    self._read(self._events.finish())
        except TimeoutError:
            if not self._answers.is_complete:
                raise self._timeout() from None
        except Failure:
            if not self._answers.is_complete:
                raise
        if not self._is_complete:
            self._end()

    def _timeout(self) -> Failure:
        settings, model = self._engine.settings, self._engine.config.model_name
        if self.has_delivered:
            what = f"sent nothing more for {settings.token_timeout:g} s (token_timeout)"
        else:
            what = f"sent nothing within {settings.first_token_timeout:g} s (first_token_timeout)"
        return Failure(
            RemoteTimeout(
                f"the server of the model {model!r} {what}; the operator can raise this limit in the model file"
            ),
            "timeout",
        )

    def _read(self, events: list[bytes]) -> bool:
        """Deliver what these events contain. Returns whether there was anything."""
        for data in events:
            if self._is_complete:
                break
            if data == DONE:
                self._end()
                break
            for piece in self._answers.read(data):
                if not self.has_delivered and self._permit is not None:
                    self._engine.note_answering(self._permit)
                self.has_delivered = True
                output = self._state.outputs_of(self._number)[piece.index]
                if output.sequence.finish_reason is None:
                    self._engine.deliver(self._state, output, piece)
            if self._answers.is_complete and self._answers.usage is not None:
                self._end()
        return bool(events)

    def _end(self) -> None:
        """The response is complete. Raises Failure if an answer is not."""
        if not self._answers.is_complete:
            model = self._engine.config.model_name
            raise Failure(
                RemoteFailed(f"the server of the model {model!r} ended its response before the answer was complete"),
                "failed",
                may_repeat=True,
            )
        self._is_complete = True
        self.report(Outcome.ANSWERED, "answered")
        self._engine.complete(self._state, self._number, self._answers)
