"""Stand in for the engine in an API process: `EngineClient` has the methods of `LLMEngine` that the API calls.

Prompts are encoded, chats rendered, and grammars compiled in this process. Tokens become text here, too, except in
requests with stop strings: a stop string ends a sequence, so the engine process must see the text. Limits of the whole
server are counted in the engine process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.api_processes import messages as ms
from servekit.api_processes.remote_adapters import RemoteAdapters
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.detokenizer import Detokenizer, NullDetokenizer
from servekit.engine.engine_core import RETRY_AFTER_S
from servekit.engine.input_processor import InputProcessor, PreparedPrompt, prepare_in_time
from servekit.engine.live_view import LiveView
from servekit.engine.one_model import OneModel
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.engine.tokenizer import Tokenizer, load_tokenizer
from servekit.errors import InternalError, ServekitError, WorkerNotReady
from servekit.protocol.messages import Profiled, WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Sequence

ANSWER_TIMEOUT_S = 300.0  # of the engine process; it answers within milliseconds, but a profile takes minutes to write
TOKENS_PER_SLICE = 2**15  # of prompts that are sent without a pause
TOKENS_PER_ANSWER = 2**8  # added per answer: its parameters take as long as so many tokens

Answer = TypeVar("Answer")


class RemoteRequestState(RequestState):
    """A request that was admitted by the engine process.

    Its sequences are copies: they have the tokens that have arrived here, and no KV blocks.
    """

    number: int
    num_unfinished: int  # sequences

    @property
    def sequences(self) -> list[Sequence]:
        return [output.sequence for output in self.outputs]

    def end(self, reason: FinishReason) -> None:
        """Note that all unfinished sequences have ended."""
        for sequence in self.sequences:
            sequence.finish_reason = sequence.finish_reason or reason
        self.num_unfinished = 0


class RemotePlaces:
    """The places in the waiting queue that the engine process holds for a request."""

    __slots__ = ("_client", "_is_held", "arrival_s", "number")

    def __init__(self, client: EngineClient, number: int, arrival_s: float) -> None:
        self.number = number  # of the request
        self.arrival_s = arrival_s
        self._client = client
        self._is_held = True

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._client.send(ms.ReleaseRequest(self.number))

    def hand_over(self) -> None:
        """Note that the sequences are in the queue: `release_result` of their request frees the rest."""
        self._is_held = False


class EngineClient(OneModel):
    """Stands in for the engine. Give it all messages from the engine process that are about requests."""

    def __init__(self, config: ServeConfig, send: Callable[[Struct], None]) -> None:
        """`send` sends a message to the engine process, and never waits."""
        self.config = config
        self.send = send
        self.http_counters = _HttpCounters(send)
        self.profiling = _Profiler(self)
        self.adapters: RemoteAdapters | None = RemoteAdapters(self) if config.has_adapters else None
        self._status = ms.EngineStatus("loading", "starting", True)
        self._heard_s = self.now()  # time of the last message
        self._question_ids = itertools.count()
        self._request_numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._requests: dict[int, RemoteRequestState] = {}
        self._tokenizer: Tokenizer | None = None
        self._input_processor: InputProcessor | None = None
        self._looking: asyncio.Task[LiveView] | None = None
        self._handlers: dict[type[Struct], Callable[[Any], None]] = {
            ms.EngineStatus: self._on_status,
            ms.AdapterChanges: self._on_adapters,
            ms.Reply: self._on_reply,
            ms.Output: self._on_output,
            ms.PromptLogprobsPart: self._on_prompt_logprobs,
            ms.RequestFailed: self._on_failure,
        }

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        has_loaded = self._input_processor is not None or self._status.state != "ready"
        return self._status.state if has_loaded else "loading"

    @property
    def stage(self) -> str:
        return self._status.stage if self._input_processor is not None else "loading the tokenizer"

    @property
    def is_healthy(self) -> bool:
        return self._status.is_healthy and self.now() - self._heard_s < ms.SILENCE_TIMEOUT_S

    @property
    def has_free_slots(self) -> bool:
        return self._status.has_free_slots

    @property
    def worker(self) -> WorkerReady | None:
        return self._status.worker

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise self._not_ready()
        return self._tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        if self._input_processor is None or self.state == "failed":
            raise self._not_ready()
        return self._input_processor

    @property
    def scheduler_config(self) -> SchedulerConfig:
        limits = self._status.limits
        if limits is None or self._input_processor is None:
            raise self._not_ready()
        return limits

    @property
    def max_prompt_tokens(self) -> int:
        return self.scheduler_config.max_total_tokens

    def _not_ready(self) -> ServekitError:
        return WorkerNotReady(f"the model is not ready to serve: {self.stage}", retry_after_s=RETRY_AFTER_S)

    def now(self) -> float:
        return time.monotonic()  # one clock for all processes of a machine

    async def probe_readiness(self) -> bool:
        question = ms.ProbeReadiness(question_id=self.next_question_id())
        return self._input_processor is not None and await self.ask(question, bool)

    async def live_view(self) -> LiveView:
        """One frame of the live view. Viewers that ask at the same time get the same frame."""
        if self._looking is None or self._looking.done():
            question = ms.LookAtScheduler(question_id=self.next_question_id())
            self._looking = asyncio.create_task(self.ask(question, LiveView), name="live view")
        return await asyncio.shield(self._looking)

    async def render_metrics(self) -> bytes:
        return await self.ask(ms.RenderMetrics(question_id=self.next_question_id()), bytes)

    async def describe(self) -> dict[str, Any]:
        return await self.ask(ms.DescribeEngine(question_id=self.next_question_id()), dict[str, Any])

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def load(self, loaded: ms.Loaded) -> None:
        """Prepare requests from now on: the engine process has loaded the model. Raises ConfigError."""
        assert self.worker is not None
        path, model = Path(loaded.path), self.worker.model
        self._tokenizer = await run_in_daemon_thread(load_tokenizer, path)
        processor = InputProcessor(
            self.config, path, self._tokenizer, loaded.template, model, lambda: self.scheduler_config
        )
        processor.start()
        self._input_processor = processor

    async def stop(self) -> None:
        """End the processes and threads that prepare requests."""
        if self._input_processor is not None:
            await self._input_processor.stop()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def drain(self, admits_requests: bool = False) -> None:
        """Do nothing: the engine process has begun to drain, and told this one."""

    def fail_all(self, error: ServekitError) -> None:
        if self._input_processor is not None:
            self._input_processor.cancel_all()
        for state in list(self._requests.values()):
            state.queue.fail(error)
            self._end(state, FinishReason.ERROR)

    # -- questions -----------------------------------------------------------------------------------------------------

    def next_question_id(self) -> int:
        return next(self._question_ids)

    async def ask(self, question: ms.Question[Answer], kind: Any) -> Answer:
        """Return the engine process's answer, of type `kind`. Raises the error that it answers with."""
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._answers[question.question_id] = answer
        self.send(question)
        try:
            async with pause_tolerant_timeout(ANSWER_TIMEOUT_S):
                raw = await answer
        except TimeoutError:
            raise InternalError(f"the engine process did not answer within {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            del self._answers[question.question_id]
        decoded: Answer = msgspec.msgpack.decode(raw, type=kind)
        return decoded

    # -- requests ------------------------------------------------------------------------------------------------------

    async def take_places(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> RemotePlaces:
        number = next(self._request_numbers)
        question = ms.ReservePlaces(
            question_id=self.next_question_id(),
            request=number,
            options=ms.RequestOptions.of(request),
            caller=caller,
        )
        try:
            return RemotePlaces(self, number, await self.ask(question, float))
        except BaseException:  # the client has left, or the engine process is slow: it may give places all the same
            self.send(ms.ReleaseRequest(number))
            raise

    async def submit(self, request: GenerationRequest, caller: Caller, places: RemotePlaces) -> RequestState:
        number = places.number
        try:
            prepared = await prepare_in_time(self.input_processor, request, caller.tenant, places.arrival_s, self.now())
            # Output may arrive before the answer.
            state = self._requests[number] = self._new_state(number, request, caller, prepared, places.arrival_s)
            await self._send_prompts(number, prepared)
            question_id = self.next_question_id()
            await self.ask(ms.Submit(question_id=question_id, request=number, adapter=request.adapter), None)
        except BaseException:
            self._requests.pop(number, None)
            places.release()
            raise
        places.hand_over()
        request.mark(TimeCause.ADMISSION)
        return state

    async def abort_request(self, tenant: str, request_id: str) -> int:
        question_id = self.next_question_id()
        return await self.ask(ms.AbortRequest(question_id=question_id, tenant=tenant, request_id=request_id), int)

    async def _send_prompts(self, number: int, prepared: list[PreparedPrompt]) -> None:
        num_tokens = 0
        for prompt in prepared:
            self.send(ms.AddPrompt.of(number, prompt))
            num_tokens += len(prompt.token_ids) + TOKENS_PER_ANSWER * len(prompt.sampling)
            if num_tokens >= TOKENS_PER_SLICE:
                await asyncio.sleep(0)
                num_tokens = 0

    def _new_state(
        self,
        number: int,
        request: GenerationRequest,
        caller: Caller,
        prepared: list[PreparedPrompt],
        arrival_s: float,
    ) -> RemoteRequestState:
        interval = request.stream_interval or self.config.stream_interval
        queue = ClientQueue(interval)
        state = RemoteRequestState(request, caller, [], queue, interval, self._abort)
        state.number = number
        state.hold_result(lambda: self.send(ms.ReleaseRequest(number)))
        for prompt in prepared:
            leader: Sequence | None = None
            for sampling in prompt.sampling:
                index = len(state.outputs)
                sequence = Sequence(index, prompt.token_ids, sampling, arrival_s, tenant=caller.tenant, leader=leader)
                detokenizer = self._make_detokenizer(sampling)
                state.outputs.append(SequenceOutput(sequence, index, detokenizer, queue, caller.request_id))
                leader = leader or sequence
        state.num_unfinished = len(state.outputs)
        return state

    def _make_detokenizer(self, sampling: SamplingParams) -> Detokenizer:
        """Return the detokenizer of a sequence; None if the engine process makes the text."""
        return NullDetokenizer() if sampling.stop else self.tokenizer.make_detokenizer(sampling)

    def _abort(self, state: RequestState) -> None:
        assert isinstance(state, RemoteRequestState)
        self._end(state, FinishReason.ABORT)

    def _end(self, state: RemoteRequestState, reason: FinishReason) -> None:
        """Deliver no more output of a request, and end its unfinished sequences in the engine process."""
        if self._requests.pop(state.number, None) is not None and state.num_unfinished:
            state.end(reason)
            self.send(ms.Abort(state.number))

    # -- messages from the engine process ------------------------------------------------------------------------------

    def receive(self, message: Struct) -> None:
        """Handle a message about the engine's state or about requests."""
        self._heard_s = self.now()
        self._handlers[type(message)](message)

    def _on_status(self, status: ms.EngineStatus) -> None:
        self._status = status

    def _on_adapters(self, changes: ms.AdapterChanges) -> None:
        assert self.adapters is not None
        self.adapters.change(changes)

    def _on_reply(self, reply: ms.Reply) -> None:
        answer = self._answers.get(reply.question_id)
        if answer is None or answer.done():
            return  # the caller does not wait any more
        if reply.failure is None:
            answer.set_result(reply.answer)
        else:
            answer.set_exception(reply.failure.error())

    def _on_output(self, output: ms.Output) -> None:
        requests = self._requests
        for times in output.times:
            if (state := requests.get(times.request)) is not None:
                _apply(times, state.outputs[times.index])
        for number, delta in output.deltas:
            if (state := requests.get(number)) is not None:
                self._deliver(state, delta)

    def _deliver(self, state: RemoteRequestState, delta: TokenDelta) -> None:
        output = state.outputs[delta.index]
        sequence, reason = output.sequence, delta.finish_reason
        if delta.token_id is not None:
            sequence.token_ids.append(delta.token_id)
            output.num_tokens += 1
        if reason is not None:
            sequence.finish_reason = reason
            output.ended_s = self._heard_s
            state.num_unfinished -= 1
        else:
            # For the trace if the client leaves. Otherwise the last message sets it.
            output.last_token_s = self._heard_s
        state.queue.put(delta if sequence.sampling.stop else _with_text(delta, output))

    def _on_prompt_logprobs(self, part: ms.PromptLogprobsPart) -> None:
        state = self._requests.get(part.request)
        if state is not None:
            state.outputs[part.index].sequence.prompt_logprobs.extend(part.logprobs)

    def _on_failure(self, failed: ms.RequestFailed) -> None:
        state = self._requests.get(failed.request)
        if state is not None:
            state.end(FinishReason.ERROR)
            state.queue.fail(failed.failure.error())


def _with_text(delta: TokenDelta, output: SequenceOutput) -> TokenDelta:
    """Return a token with the text that it completes, as the engine's OutputProcessor makes it."""
    detokenizer, reason, token_id = output.detokenizer, delta.finish_reason, delta.token_id
    if token_id is None:
        text = detokenizer.finish()
    else:
        is_in_text = reason is not FinishReason.STOP or output.sequence.sampling.include_stop
        text = detokenizer.text_of(token_id, is_in_text, reason is not None)
    return TokenDelta(delta.index, token_id, text, delta.special, reason, delta.stop_reason, delta.logprobs)


def _apply(times: ms.SequenceTimes, output: SequenceOutput) -> None:
    """Copy the engine process's times of a sequence."""
    sequence = output.sequence
    sequence.num_cached_tokens = times.num_cached_tokens
    sequence.num_preemptions = times.num_preemptions
    sequence.first_scheduled_s = times.first_scheduled_s
    sequence.num_drafted_tokens = times.num_drafted_tokens
    sequence.num_accepted_tokens = times.num_accepted_tokens
    output.first_token_s = times.first_token_s
    output.last_token_s = times.last_token_s


class _HttpCounters:
    """Counts HTTP requests in the engine process."""

    def __init__(self, send: Callable[[Struct], None]) -> None:
        self._send = send

    def request_refused(self, code: str) -> None:
        self._send(ms.RequestRefused(code))

    def request_ended(self, handler: str, method: str, status: int) -> None:
        self._send(ms.RequestEnded(handler, method, status))


class _Profiler:
    """Records the worker's steps, by asking the engine process to do it."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def start(self) -> int:
        return await self._client.ask(ms.ProfileStart(question_id=self._client.next_question_id()), int)

    async def stop(self) -> Profiled:
        question = ms.ProfileStop(question_id=self._client.next_question_id())
        profiled: Profiled = await self._client.ask(question, Profiled)
        return profiled
