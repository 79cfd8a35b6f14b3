"""Serve a model that generates text on another server: admit requests, send them there, deliver what comes back.

It has the same methods as the engine of a local model. `Sender` decides when a request is sent, and whether it is sent
again. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.client_queue import ParsedDelta, TokenDelta
from servekit.engine.model_kind import GENERATE
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import (
    DeadlineExceeded,
    InternalError,
    RemoteFailed,
    RemoteTimeout,
    ServekitError,
    shutting_down,
)
from servekit.observability.metrics import ModelMetrics
from servekit.protocol.frames import Bytes
from servekit.protocol.messages import TokenLogprobs, WorkerReady
from servekit.remote.circuit_breaker import Outcome
from servekit.remote.failure import Failure
from servekit.remote.openai_request import RemoteRequest, check_supported, is_long, write_requests
from servekit.remote.openai_stream import DONE, AnswerReader, EventReader, NamedToken, Piece
from servekit.remote.remote_model import RemoteModel
from servekit.remote.request_state import RemoteState
from servekit.remote.sender import Attempt
from servekit.remote.server_client import encode
from servekit.remote.settings import OpenAISettings
from servekit.remote.token_texts import UNKNOWN_TOKEN_ID, TokenTexts, refusal
from servekit.requests.generation import GenerationRequest
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason
from servekit.shared_budget import SharedBudget

log = logging.getLogger("servekit")

UNKNOWN_LENGTH = 2**20  # in tokens: upper bound until the server has reported the length of its longest sequence
DRAIN_S = 1.0  # wait for the end of a complete response, so that its connection can be used again


class _Places:
    """The places in the queue that a request holds until it is submitted. After that, its state holds them."""

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


class RemoteEngine(RemoteModel):
    """Serves one remote model that generates text. Call `start`, then `submit` any number of requests, then `stop`."""

    kind = GENERATE
    takes_messages = True
    adapters = None  # its server may have adapters, with their own names
    worker: WorkerReady | None = None  # no worker of this server

    def __init__(
        self,
        config: ServeConfig,
        settings: OpenAISettings,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
        *,
        socket: str | None = None,
    ) -> None:
        """Raises ConfigError if the API key is missing."""
        super().__init__(config, settings, clock, metrics, socket=socket)
        self.settings = settings
        self.tokenizer = TokenTexts(config.model_name)
        self._live: set[RemoteState] = set()  # requests with answers that have not ended
        self._tasks: set[asyncio.Task[Any]] = set()
        self.known_length = config.max_model_len

    # -- state --------------------------------------------------------------------------------------------------------

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

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest sequence, if the server has reported it."""
        return self.known_length or UNKNOWN_LENGTH

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to serve. The server need not answer yet: it is asked for its models, with a short timeout."""
        await self.server.start()
        await self._begin()

    async def _begin(self) -> None:
        self.metrics.watch_remote(self.sender.stats)
        assert self.metrics.remote  # its metrics are exported from now on
        length = await self.server.look_up(self.config.model, self.settings.connect_timeout)
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
        await self.server.close()
        self._ended.set()

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests."""
        if self._live:
            log.warning("failing %d requests to %s: %s", len(self._live), self.settings.url, error.message)
        for state in list(self._live):
            self._fail(state, error)

    # -- requests -----------------------------------------------------------------------------------------------------

    async def take_places(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> _Places:
        """Take a place in the queue for each prompt. Raises InvalidRequest, QueueFull or RemoteUnavailable."""
        check_supported(request, self.config.model_name, self.settings.dialect)
        budget, tenant, num_places = self.sender.places, caller.tenant, len(request.prompts)
        self.check_admission(caller, request.num_sequences, num_places)
        budget.take(tenant, num_places)
        return _Places(budget, tenant, num_places, self._clock())

    async def submit(self, request: GenerationRequest, caller: Caller, places: _Places) -> RequestState:
        """Send a request, and return when the server has begun to answer. Raises RequestError or WorkerError."""
        check_supported(request, self.config.model_name, self.settings.dialect)
        arguments = request, self.config.model, self.settings.dialect
        if is_long(request):
            requests = await asyncio.to_thread(write_requests, *arguments)
        else:
            requests = write_requests(*arguments)
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
        """End a request whose deadline has passed: its client gets the tokens that have come."""
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
        """Remove a request whose answers have ended.

        Its tasks that still run are cancelled, so its connection closes.
        """
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
        async with self.sender.connection(state.caller.tenant, lambda: state.release_places(1)):
            body = await encode(request)

            async def exchange(attempt: Attempt) -> None:
                for output in state.outputs_of(number):
                    output.sequence.first_scheduled_s = self._clock()
                await _Exchange(self, state, number, attempt).run(request.path, body)

            await self.sender.send(state.caller.tenant, exchange)

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
        index, is_chat = output.index, state.request.chat is not None
        tokens: list[tuple[int, TokenLogprobs | None]] = [self._numbered(token) for token in piece.tokens]
        *first, (token_id, known) = tokens or [(UNKNOWN_TOKEN_ID, None)]
        for each_id, each in first:  # the last token has the text of all of them
            state.queue.put(TokenDelta(index, each_id, "", False, logprobs=each))
        if is_chat:
            state.queue.put(ParsedDelta(index, token_id, piece.text, False, logprobs=known, events=piece.events))
        else:
            state.queue.put(TokenDelta(index, token_id, piece.text, False, logprobs=known))
        for _ in range(1 + len(first)):
            output.num_tokens += 1
            if output.count_token is not None and not output.count_token():  # the client's key has no tokens left
                self._finish(state, output, FinishReason.LENGTH)
                if not state.num_unfinished:
                    self._drop(state)
                return

    def _numbered(self, token: NamedToken) -> tuple[int, TokenLogprobs]:
        """Return a token in the form that local models have. Raises RemoteFailed."""
        id_of = self.tokenizer.id_of
        top = [id_of(text) for text, _ in token.top], [logprob for _, logprob in token.top]
        return id_of(token.text), TokenLogprobs.of(token.logprob, *top)

    def complete(self, state: RemoteState, number: int, reader: AnswerReader) -> None:
        """Note that all answers to a prompt are complete."""
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
        """Remove a request whose answers are complete. Its task goes on to read the ends of its responses."""
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

    def __init__(self, engine: RemoteEngine, state: RemoteState, number: int, attempt: Attempt) -> None:
        self._attempt = attempt
        self._engine = engine
        self._state = state
        self._number = number
        self._events = EventReader()
        self._answers = AnswerReader(state.request.n, state.request.chat is not None, state.request.logprobs)
        self._is_complete = False

    async def run(self, path: str, body: list[Bytes]) -> None:
        """Send the request, and deliver the response. Raises Failure or RemoteFailed."""
        engine = self._engine
        settings, started_s = engine.settings, engine.now()
        try:
            async with (
                pause_tolerant_timeout(settings.first_token_timeout) as timeout,
                engine.server.open(path, body, self._state.caller.request_id) as response,
            ):
                engine.metrics.remote.answer_began(engine.now() - started_s)
                self._state.has_begun()
                async for received in response.aiter_raw():
                    was_complete = self._is_complete
                    has_more = self._read(self._events.feed(received))
                    if self._is_complete and not was_complete:
                        timeout.restart(DRAIN_S)
                    elif has_more and self._attempt.has_delivered and not was_complete:
                        timeout.restart(settings.token_timeout)
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
        if self._attempt.has_delivered:
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
                if not self._attempt.has_delivered:
                    self._attempt.note_answering()
                self._attempt.has_delivered = True
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
        self._attempt.report(Outcome.ANSWERED, "answered")
        self._engine.complete(self._state, self._number, self._answers)
