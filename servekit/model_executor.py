"""Keep one worker running: start it, carry plans to it and results back, and put another in its place when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import chain

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ServekitError, WorkerLost, WorkerNotReady
from servekit.messages import (
    LoadModel,
    Profiled,
    StartProfile,
    StepFailed,
    StepPlan,
    StepResult,
    StopProfile,
    WorkerReady,
)
from servekit.patience import StepPatience, backoff_s
from servekit.simulated_model import is_simulated
from servekit.worker_process import WorkerProcess

log = logging.getLogger("servekit")

WELL_AFTER_S = 10.0  # a worker that was ready for so long did not fail to start


class ModelExecutor:
    """One worker after another. Call everything from the event loop's thread, which must be the main one."""

    def __init__(self, config: ServeConfig, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called when the worker is lost, also while nobody waits for it."""
        self.ready: WorkerReady | None = None  # what the first worker told of itself; the others must say the same
        self._config = config
        self._on_loss = on_loss
        self._model: LoadModel | None = None
        self._process: WorkerProcess | None = None
        self._is_ready = False
        self._patience = StepPatience(config.step_timeout)
        self._sent: dict[tuple[int, int], int] = {}  # by (epoch, step_id) not answered yet: how many tokens
        self._num_losses = 0  # in a row, without a step or some seconds of readiness between them
        self._ready_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether there is a worker that takes steps, as far as anybody knows."""
        return self._is_ready and self.loss is None

    @property
    def stage(self) -> str:
        """What a worker that is not ready is doing."""
        if self._process is None:
            return "looking at the model"
        return self._process.stage if self._process.loss is None else "replacing the worker"

    @property
    def pid(self) -> int | None:
        """The worker's process, or what is left of it."""
        return None if self._process is None else self._process.pid

    @property
    def loss(self) -> ServekitError | None:
        """Why the worker is lost, if it is."""
        return None if self._process is None else self._process.loss

    @property
    def cause(self) -> str:
        """The loss in a word, for metrics."""
        return "other" if self._process is None else self._process.cause

    async def start(self, model: LoadModel) -> WorkerReady:
        """Start a worker and load the model. Raises ConfigError, WorkerLost or WorkerTimeout."""
        self._model = model
        arguments = ["--log-level", self._config.log_level, "--log-format", self._config.log_format]
        self._process = WorkerProcess(arguments, self._config.heartbeat_timeout, self._on_loss)
        self._process.send(model)
        message = await self._process.receive(self._config.load_timeout)
        if not isinstance(message, WorkerReady):
            raise self.lose(f"answered {type(message).__name__} to its first message")
        self.ready = self.ready or message
        # Its successors' sequences go on where the first one's were: in as many blocks, with the same vocabulary.
        if (message.model, message.num_blocks) != (self.ready.model, self.ready.num_blocks):
            raise self.lose("found another model than the one before it; the files have changed")
        self._is_ready = True
        self._ready_s = asyncio.get_running_loop().time()
        return message

    def send(self, plan: StepPlan) -> None:
        """Hand the worker a step. Does not wait."""
        assert self._process is not None
        self._sent[plan.epoch, plan.step_id] = plan.num_tokens
        self._process.send(plan.with_grammars_apart())

    async def receive(self) -> StepResult | StepFailed:
        """The next result, normally of the oldest step that was sent. Raises WorkerLost or WorkerTimeout.

        Whether anybody waits for it is the manager's to say: a worker may repeat itself.
        """
        assert self._process is not None and self.ready is not None
        oldest = next(iter(self._sent.values()), 1)
        message = await self._process.receive(self._patience.limit_s(oldest))
        if not isinstance(message, StepResult | StepFailed):
            raise self.lose(f"answered {type(message).__name__} to a step plan")
        num_tokens = self._sent.pop((message.epoch, message.step_id), None)
        if isinstance(message, StepFailed):
            return message
        token_ids = message.token_ids or (0,)
        vocab_size = self.ready.model.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size or not all(_are_tops_within(message, vocab_size)):
            raise self.lose("sampled a token that its vocabulary does not have")
        if num_tokens is not None:
            self._patience.observe(num_tokens, message.step_time_s)
            self._num_losses = 0
        return message

    async def ask(self, question: StartProfile | StopProfile) -> Profiled:
        """The worker's answer to what is no step. Raises WorkerNotReady, WorkerLost or WorkerTimeout."""
        if self._process is None or not self.is_ready:
            raise WorkerNotReady(f"there is no model worker at the moment: {self.stage}", retry_after_s=5)
        return await self._process.ask(question)

    async def replace(self, on_failed_start: Callable[[], None]) -> None:
        """End the worker, whatever is left of it, and start others until one is ready.

        Raises WorkerLost when `max_worker_restarts` of them in a row did not get that far.
        """
        assert self._process is not None and self._model is not None and self.ready is not None
        self._is_ready = False
        if asyncio.get_running_loop().time() - self._ready_s > WELL_AFTER_S:
            self._num_losses = 0
        # As many blocks as before, whatever a measurement would give now: the old process's memory may not be free yet.
        model, most = replace(self._model, num_kv_blocks=self.ready.num_blocks), self._config.max_worker_restarts
        for attempt in range(1, most + 1):
            self._sent.clear()
            await self._process.end()
            self._num_losses += 1
            await asyncio.sleep(backoff_s(self._num_losses))
            try:
                await self.start(model)
                return
            except (ServekitError, OSError) as error:
                on_failed_start()
                wait_s = backoff_s(self._num_losses + 1)
                log.error("no new worker, attempt %d of %d, the next in %g s: %s", attempt, most, wait_s, error)
        await self._process.end()
        # The reasons are in the log; they name files, which are nobody's business who is told this.
        raise WorkerLost(f"the model worker was lost, and {most} others in a row did not start (max_worker_restarts)")

    async def stop(self, kindly: bool = True) -> None:
        """End the worker; kindly, it gets a moment to do so by itself."""
        is_ready, self._is_ready = self._is_ready, False
        if self._process is not None:
            await self._process.end(kindly and is_ready)  # one that loads would not listen
            self._process = None

    def lose(self, what: str) -> ServekitError:
        """Take the worker for lost, because of what it did; gives the loss, for whoever wants to raise it."""
        assert self._process is not None
        self._process.lose(WorkerLost(f"the model worker {what}"), "garbage")
        assert self._process.loss is not None
        return self._process.loss


def _are_tops_within(result: StepResult, vocab_size: int) -> Iterator[bool]:
    """Whether the tokens beside the chosen ones exist, for each that has any."""
    of_prompts = (told.logprobs for told in result.prompt_logprobs)
    for told in chain(result.logprobs, *of_prompts):
        if told is not None:
            yield all(0 <= token_id < vocab_size for token_id, _ in told.top)


def load_message(config: ServeConfig, path: str) -> LoadModel:
    """What a worker is told first. Of a simulated model there are no weights at `path`, but times in its name."""
    return LoadModel(
        model_path=config.model if is_simulated(config.model) else path,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        load_format=config.load_format,
        kv_cache_dtype=config.kv_cache_dtype,
    )
