"""Run an engine on the caller's event loop."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from servekit.config import DEMO_MODEL
from servekit.embedded.conversation import PLACEHOLDER, Conversation
from servekit.embedded.outputs import OutputReader, RequestOutput
from servekit.embedded.prompts import PromptInput, to_prompt
from servekit.embedded.sampling_params import SamplingParams
from servekit.embedded.settings import embedded_config
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.request_state import RequestState
from servekit.errors import InvalidRequest, QueueFull, WorkerNotReady
from servekit.parsing.chat_format import AnswerFormat
from servekit.requests.generation import GenerationRequest

DEFAULT_PARAMS = SamplingParams()
FULL_QUEUE_INTERVAL_S = 0.02  # how soon a request that found the queue full tries again
WHOLE_ANSWER = 4096  # tokens of an event, where only the last event is wanted


class AsyncLLM:
    """A model that answers prompts, on the event loop that starts it: `async with AsyncLLM("demo") as llm:`.

    The model runs in worker processes. Whatever blocks the event loop delays the answers, as everywhere in asyncio.
    Methods raise the classes of servekit.errors. Call them on that event loop only.
    """

    def __init__(self, model: str | os.PathLike[str] = DEMO_MODEL, **settings: Any) -> None:
        """Check the settings, which are those of `servekit serve` (docs/settings.md), and start nothing yet.

        `model` is a directory, a GGUF file or a Hugging Face id. Raises ConfigError.
        """
        self.config = embedded_config(model, settings)
        self._engine: LLMEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._is_aborted: dict[str, bool] = {}  # by request id, of the requests that have not ended
        self._numbers = itertools.count()
        self._full_queue = asyncio.Lock()  # held by the request that waits for room; the others wait behind it

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model. Raises ConfigError or WorkerError; then nothing is left running."""
        assert self._engine is None, "it was started already"
        self._loop = asyncio.get_running_loop()
        engine = LLMEngine(self.config)
        try:
            await engine.start()
        except BaseException:
            await engine.stop(graceful=False)
            raise
        self._engine = engine

    async def close(self) -> None:
        """End the engine and its processes. Unfinished requests raise WorkerNotReady. Idempotent.

        In a process that was forked from the engine's it does nothing.
        """
        if os.getpid() == self._pid and self._engine is not None:
            engine, self._engine = self._engine, None
            await engine.stop()

    def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the answers to one prompt as they grow; without `stream`, once when all have ended.

        Each output has all text so far, and in `delta` what is new. The last one has `finished` set. With `best_of`
        there is one output, because the best answer is known at the end. To leave the loop ends the request, and so
        does to cancel the task. A request waits for room in the queue; it is not refused because the queue is full.
        """
        request = (sampling_params or DEFAULT_PARAMS).answering([to_prompt(prompt)])
        return self._outputs(request, None, request_id, stream)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        stream: bool = True,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the next message of a conversation as it grows; like `generate`.

        `messages` and `options` are as in /v1/chat/completions: tools, tool_choice, parallel_tool_calls,
        chat_template_kwargs, add_generation_prompt, continue_final_message, reasoning_effort, thinking_token_budget.
        """
        request = (sampling_params or DEFAULT_PARAMS).answering([PLACEHOLDER])
        return self._outputs(request, Conversation(messages, options), request_id, stream)

    async def abort(self, request_id: str) -> None:
        """End a request: its next output is the last one, with the finish reason `abort`. Ignores unknown ids."""
        if request_id in self._is_aborted:
            self._is_aborted[request_id] = True
            await self._running().abort_request(ANONYMOUS.tenant, request_id)

    @property
    def max_concurrency(self) -> int:
        """Requests at the same time that keep all workers busy: twice as many as can run."""
        return min(2 * self.config.max_num_seqs * len(self._running().replicas.all), self.config.max_num_queued_reqs)

    # -- one request --------------------------------------------------------------------------------------------------

    async def _outputs(
        self, wanted: GenerationRequest, conversation: Conversation | None, request_id: str | None, stream: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        self._running()
        request_id = request_id or f"req-{next(self._numbers)}"
        if request_id in self._is_aborted:
            raise InvalidRequest(f"request_id = {request_id!r} is that of a request that runs; choose another one")
        if not stream:
            wanted = replace(wanted, stream_interval=WHOLE_ANSWER)  # no reader is woken for parts that it does not read
        self._is_aborted[request_id] = False
        try:
            state, answer_format = await self._submit(wanted, conversation, Caller(request_id=request_id))
            try:
                if self._is_aborted[request_id]:  # while it was prepared
                    await self.abort(request_id)
                reader = OutputReader(request_id, state, self._running().tokenizer, answer_format)
                streams = stream and wanted.best_of == wanted.n
                while not reader.is_finished:
                    reader.add(await state.queue.get())
                    if streams or reader.is_finished:
                        yield reader.output()
            finally:
                state.abort()
                state.release_result()
        finally:
            del self._is_aborted[request_id]

    async def _submit(
        self, wanted: GenerationRequest, conversation: Conversation | None, caller: Caller
    ) -> tuple[RequestState, AnswerFormat | None]:
        """Admit a request, when there is room for it.

        The request that waits longest tries again every 20 ms: few others try meanwhile, and none prepares its prompt
        again and again.
        """
        try:
            return await self._try_submit(wanted, conversation, caller)
        except QueueFull:
            pass
        async with self._full_queue:
            while True:
                try:
                    return await self._try_submit(wanted, conversation, caller)
                except QueueFull:
                    await asyncio.sleep(FULL_QUEUE_INTERVAL_S)

    async def _try_submit(
        self, wanted: GenerationRequest, conversation: Conversation | None, caller: Caller
    ) -> tuple[RequestState, AnswerFormat | None]:
        engine, answer_format = self._running(), None
        places = engine.reserve(wanted, caller)
        try:
            if conversation is not None:
                wanted, answer_format = await conversation.render(engine.input_processor, caller.tenant, wanted)
            return await engine.submit(wanted, caller, places), answer_format
        finally:
            places.release()

    def _running(self) -> LLMEngine:
        """Return the engine. Raises WorkerNotReady if this process or this event loop has none."""
        check_process(self._pid)
        if self._engine is None:
            raise WorkerNotReady("this AsyncLLM is not started, or it is closed; use it inside `async with`")
        if asyncio.get_running_loop() is not self._loop:
            raise WorkerNotReady("this AsyncLLM belongs to another event loop; make one on the loop that uses it")
        return self._engine


def check_process(pid: int) -> None:
    """Raise WorkerNotReady in a process that was forked from the one of this id."""
    if os.getpid() != pid:
        raise WorkerNotReady(
            f"this engine belongs to process {pid}, and this is process {os.getpid()}, which was forked from it; make "
            "an engine in the process that uses it"
        )
