"""Run an engine for programs without an event loop, and for notebooks."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from servekit.config import DEMO_MODEL
from servekit.embedded.async_llm import AsyncLLM, check_process
from servekit.embedded.event_loop_thread import EventLoopThread, LoopClosed
from servekit.embedded.outputs import RequestOutput
from servekit.embedded.progress import progress_bar
from servekit.embedded.prompts import PromptInput, is_one_prompt
from servekit.embedded.sampling_params import SamplingParams
from servekit.errors import InvalidRequest, WorkerNotReady

Message = Mapping[str, Any]


class LLM:
    """A model that answers prompts: `LLM("demo").generate(["What color is the sky?"])`.

    The engine has a thread and an event loop of its own, so this works in scripts, in notebooks and in any thread, and
    several threads may call it at the same time. The model runs in worker processes. `close`, the end of a `with`
    block, the garbage collector or the end of the program end them. Methods raise the classes of servekit.errors.
    """

    def __init__(self, model: str | os.PathLike[str] = DEMO_MODEL, **settings: Any) -> None:
        """Load a model: a directory, a GGUF file or a Hugging Face id. `settings` are those of `servekit serve`.

        docs/settings.md lists them. Raises ConfigError or WorkerError; then nothing is left running.
        """
        self._pid = os.getpid()
        self._llm = AsyncLLM(model, **settings)
        self._thread = EventLoopThread("servekit")
        # This also runs at the end of the program, and when nothing refers to this object any more.
        self._finalizer = weakref.finalize(self, _close, self._pid, self._thread, self._llm)
        try:
            self._call(self._llm.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and its processes. Calls of other threads raise WorkerNotReady. Idempotent.

        In a process that was forked from the engine's it does nothing.
        """
        if os.getpid() == self._pid:
            self._finalizer()

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return the answers to each prompt, in the order of the prompts.

        A prompt is a text, a list of token ids, or a dictionary with `prompt` or `prompt_token_ids`. `sampling_params`
        is one value for all prompts, or a list with one for each. The engine takes prompts as it has room for them, so
        there may be any number. The first prompt that fails ends all others, and its error is raised. Ctrl-C ends them,
        too; the engine can be used again. With `use_tqdm` there is a progress bar in terminals and notebooks.
        """
        items = [prompts] if is_one_prompt(prompts) else list(prompts)
        return self._answer(items, sampling_params, partial(self._llm.generate, stream=False), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return the next message of one conversation, or of each of several; like `generate`.

        `messages` and `options` are as in /v1/chat/completions: tools, tool_choice, chat_template_kwargs,
        add_generation_prompt, continue_final_message and others.
        """
        items = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        return self._answer(items, sampling_params, partial(self._llm.chat, stream=False, **options), use_tqdm)

    def _answer(
        self,
        items: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        ask: Callable[[Any, SamplingParams | None], AsyncIterator[RequestOutput]],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if isinstance(sampling_params, Sequence) and len(sampling_params) != len(items):
            raise InvalidRequest(
                f"there are {len(items)} prompts and {len(sampling_params)} sampling_params; give one for each prompt, "
                "or one for all"
            )
        check_process(self._pid)
        batch = Batch(items, sampling_params, ask)
        with progress_bar(len(items), use_tqdm) as show:
            self._call(batch.run(self._llm), lambda: show(batch.num_done, batch.num_tokens))
        return batch.outputs

    def _call(self, coroutine: Coroutine[Any, Any, None], on_tick: Callable[[], None] = lambda: None) -> None:
        try:
            self._thread.call(coroutine, on_tick)
        except LoopClosed:
            raise WorkerNotReady("this LLM is closed; make another one") from None


class Batch:
    """Prompts that are answered together. The event loop's thread fills it; another thread may look at its numbers."""

    def __init__(
        self,
        items: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        ask: Callable[[Any, SamplingParams | None], AsyncIterator[RequestOutput]],
    ) -> None:
        self._items = items
        self._sampling_params = sampling_params
        self._ask = ask
        self._outputs: list[RequestOutput | None] = [None] * len(items)
        self.num_done = 0
        self.num_tokens = 0  # in the answers that have ended

    @property
    def outputs(self) -> list[RequestOutput]:
        """The answers, in the order of their prompts, when all have ended."""
        return [each for each in self._outputs if each is not None]

    async def run(self, llm: AsyncLLM) -> None:
        """Answer all. A fixed number of tasks take the next prompt each, so memory does not grow with their number.

        Raises the first error, when all tasks have ended.
        """
        indices = iter(range(len(self._items)))
        num_tasks = min(llm.max_concurrency, len(self._items))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(num_tasks):
                    group.create_task(self._answer_next(indices))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer_next(self, indices: Iterator[int]) -> None:
        for index in indices:
            params = self._sampling_params
            if isinstance(params, Sequence):
                params = params[index]
            async for output in self._ask(self._items[index], params):
                self._outputs[index] = output
                self.num_done += 1
                self.num_tokens += output.usage.completion_tokens


def _close(pid: int, thread: EventLoopThread, llm: AsyncLLM) -> None:
    if os.getpid() == pid:  # a forked process has no such thread, and the engine is its parent's
        thread.close(llm.close)
