"""Keep one model worker running: start it, send plans, receive results, and replace it when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError, ServekitError, WorkerLost, WorkerNotReady
from servekit.executor.joined_worker import JoinedWorker
from servekit.executor.placement import ANYWHERE, Placement
from servekit.executor.step_timeout import StepTimeout, backoff_s
from servekit.executor.worker_connection import Answer, Question, WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.messages import (
    BlocksFetched,
    LoadModel,
    Shutdown,
    StepFailed,
    StepPlan,
    StepResult,
    WorkerReady,
)
from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.simulation.model import is_simulated

MAX_STEP_TIME_S = 1e6  # the longest time that a worker may report; the clock also runs while a machine sleeps
STABLE_AFTER_S = 10.0  # a worker that was ready for this long does not count as a failed start


class WorkerSource(Protocol):
    """The source of workers that have joined and loaded the model."""

    @property
    def stage(self) -> str:
        """What `next_worker` waits for, as text for log lines and errors."""

    async def next_worker(self, accepts: Callable[[JoinedWorker], bool]) -> JoinedWorker:
        """Wait for the next worker that the caller accepts, and return it.

        All have the same model and the same number of KV blocks.
        """

    def take_worker(self, accepts: Callable[[JoinedWorker], bool]) -> JoinedWorker | None:
        """Return the next worker that the caller accepts; None if there is none now."""


class ModelExecutor:
    """Runs steps in one worker at a time. All methods must be called on the event loop's thread, the main thread.

    The worker is a child process, or one that has joined: given by `adopt`, or taken from a source.
    """

    def __init__(
        self,
        config: ServeConfig,
        on_loss: Callable[[], None],
        on_leaving: Callable[[], None] = lambda: None,
        source: WorkerSource | None = None,
        placement: Placement = ANYWHERE,
        shared_fds: tuple[int, ...] = (),
    ) -> None:
        """`on_loss` is called when the worker is lost, even while no call waits for a result.

        `on_leaving` is called when a worker that has joined wants to leave (`is_leaving`). With a `source`, no child
        process is started. Child processes run where `placement` says, and inherit `shared_fds`.
        """
        self.ready: WorkerReady | None = None  # what the first worker reported; its replacements must report the same
        self.host = ""  # machine of a worker that joined, by its own report; empty for child processes
        self.offered_role = ""  # prefill or decode, if a worker that joined is for that only
        self.accepts: Callable[[JoinedWorker], bool] = lambda _: True  # whether a worker that joins may serve here
        self.on_fetched: Callable[[BlocksFetched], None] = lambda _: None  # gets what a worker's agent has fetched
        self._config = config
        self._on_loss = on_loss
        self._on_leaving = on_leaving
        self._source = source
        self._placement = placement
        self._shared_fds = shared_fds
        self._model: LoadModel | None = None
        self._worker: WorkerConnection | WorkerGroup | None = None
        self._is_ready = False
        self._timeout = StepTimeout(config.step_timeout)
        # Number of tokens by (epoch, step_id), oldest first; 0 if it does not say how long the step takes.
        self._in_flight: dict[tuple[int, int], int] = {}
        self._num_losses = 0  # losses in a row, without a step or STABLE_AFTER_S of readiness between them
        self._ready_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether there is a worker that accepts steps, as far as is known."""
        return self._is_ready and self.loss is None

    @property
    def stage(self) -> str:
        """What a worker that is not ready is doing, as text for people."""
        if self._worker is not None:
            return self._worker.stage if self._worker.loss is None else "replacing the worker"
        if self._source is not None:
            return self._source.stage
        return "reading the model's configuration" if self.ready is None else "waiting before the worker starts again"

    @property
    def worker(self) -> WorkerConnection | WorkerGroup | None:
        """The worker, ready or not; None if there is none."""
        return self._worker

    @property
    def worker_name(self) -> str | None:
        """The worker's name in log lines; None if there is none."""
        return None if self._worker is None else self._worker.name

    @property
    def pid(self) -> int | None:
        """The worker's process id; None before the first start."""
        return None if self._worker is None else self._worker.pid

    @property
    def loss(self) -> ServekitError | None:
        """Why the worker is lost; None if it is not."""
        return None if self._worker is None else self._worker.loss

    @property
    def is_leaving(self) -> bool:
        """Whether the worker wants to leave: send it no more steps, receive those in flight, and `stop` it."""
        return self._worker is not None and self._worker.is_leaving

    @property
    def cause(self) -> str:
        """The reason for the loss as a metric's label value."""
        return "other" if self._worker is None else self._worker.cause

    async def start(self, model: LoadModel) -> WorkerReady:
        """Start a worker and load the model, or wait for one that joins.

        Raises ConfigError, WorkerLost or WorkerTimeout.
        """
        if self._source is not None:
            worker = await self._source.next_worker(self.accepts)
            self.adopt(worker)
            return worker.ready
        self._in_flight.clear()
        self._model = model
        if model.num_ranks > 1:
            result_rank = model.num_ranks - model.tensor_parallel_size
            self._worker = WorkerGroup(model.num_ranks, result_rank, self._start_rank, self._on_loss)
        else:
            self._worker = self._start_rank(0, self._on_loss)
        self._worker.send(model)
        message = await self._worker.receive(self._config.load_timeout)
        if not isinstance(message, WorkerReady):
            raise self.mark_lost(f"answered {type(message).__name__} to its first message")
        self.ready = self.ready or message
        # Sequences continue on the new worker: it needs as many blocks, and must compute the same tokens.
        if message.num_blocks != self.ready.num_blocks:
            raise self.mark_lost(
                f"has {message.num_blocks} KV blocks, and its predecessor had {self.ready.num_blocks}; set "
                "--num-kv-blocks"
            )
        if (why := message.difference(self.ready)) is not None:
            raise self.mark_lost(f"cannot replace its predecessor: {why}")
        # Its successors get this number. Measuring again could give less: the old one's memory may not be free yet.
        self._model = replace(model, num_kv_blocks=message.num_blocks)
        self._is_ready = True
        self._ready_s = asyncio.get_running_loop().time()
        return message

    async def start_again(self) -> None:
        """Start a child process again after `stop`, once. Raises ServekitError or OSError; then it is stopped again."""
        assert self._model is not None
        try:
            await self.start(self._model)
        except Exception:
            await self.stop(graceful=False)
            raise

    def adopt(self, worker: JoinedWorker) -> None:
        """Run steps in a worker that has joined and loaded the model.

        The worker may be lost or leaving already; `loss` and `is_leaving` say so.
        """
        assert self._worker is None
        self._in_flight.clear()
        self.ready, self._worker, self._is_ready = worker.ready, worker.connection, True
        self.host, self.offered_role = worker.offer.host, worker.offer.role
        self._ready_s = asyncio.get_running_loop().time()
        worker.connection.on_loss, worker.connection.on_leaving = self._on_loss, self._on_leaving
        worker.connection.on_fetched = self.on_fetched

    def _start_rank(self, rank: int, on_loss: Callable[[], None]) -> WorkerConnection:
        arguments = ["--log-level", self._config.log_level, "--log-format", self._config.log_format]
        arguments += self._placement.arguments(rank)
        process = WorkerProcess(arguments, self._placement.environment(rank), self._shared_fds)
        return WorkerConnection(process, self._config.heartbeat_timeout, on_loss)

    def send(self, plan: StepPlan) -> None:
        """Send a step to the worker. Does not wait."""
        assert self._worker is not None
        # A step that loads blocks takes as long as the disk needs for them.
        self._in_flight[plan.epoch, plan.step_id] = 0 if plan.loads else plan.num_tokens
        self._worker.send(plan.pack_grammars())

    def fetch(self, number: int, addresses: Sequence[str], keys: tuple[bytes, ...]) -> None:
        """Ask the agent of a worker that joined to fetch blocks. Does not wait; `on_fetched` gets its answer."""
        assert self._worker is not None
        self._worker.fetch(number, addresses, keys)

    async def receive(self) -> StepResult | StepFailed:
        """The next result, normally of the oldest step in flight. Raises WorkerLost or WorkerTimeout.

        A worker may repeat a result; the workload manager decides whether a result is still expected.
        """
        assert self._worker is not None and self.ready is not None
        oldest = next(iter(self._in_flight.values()), 1)
        message = await self._worker.receive(self._timeout.limit_s(oldest) if oldest else self._timeout.max_s)
        if not isinstance(message, StepResult | StepFailed):
            raise self.mark_lost(f"answered {type(message).__name__} to a step plan")
        num_tokens = self._in_flight.pop((message.epoch, message.step_id), None)
        if isinstance(message, StepFailed):
            return message
        token_ids = message.token_ids or (0,)
        vocab_size = self.ready.model.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size or not all(_top_tokens_exist(message, vocab_size)):
            raise self.mark_lost(f"returned a token id outside its vocabulary of {vocab_size} tokens")
        if not 0.0 <= message.step_time_s <= MAX_STEP_TIME_S:  # NaN is neither; it would stay in the sums of metrics
            raise self.mark_lost(f"reported a step of {message.step_time_s:g} s")
        for draft_time_s in (message.draft_time_s, message.draft_prompt_time_s):
            if not 0.0 <= draft_time_s <= MAX_STEP_TIME_S:
                raise self.mark_lost(f"reported {draft_time_s:g} s for the drafts of a step")
        if num_tokens:
            self._timeout.observe(num_tokens, message.step_time_s)
        if num_tokens is not None:
            self._num_losses = 0
        return message

    async def ask(self, request: Question) -> Answer:
        """Send a request that is not a step, and return its answer.

        Raises WorkerNotReady, WorkerLost or WorkerTimeout.
        """
        if self._worker is None or not self.is_ready:
            raise WorkerNotReady(f"no model worker is ready: {self.stage}", retry_after_s=5)
        return await self._worker.ask(request)

    async def replace(self, on_failed_start: Callable[[str], None]) -> None:
        """End the current worker, and start new ones until one is ready. `on_failed_start` gets why one did not start.

        A worker that had joined comes back by itself, as another worker. So the next one of the source replaces it.
        Raises WorkerLost after `max_worker_restarts` failed starts in a row.
        """
        assert self._worker is not None
        self._is_ready = False
        if self._source is not None:
            await self._worker.end()
            self._worker = None
            self.adopt(await self._source.next_worker(self.accepts))
            return
        assert self._model is not None
        if asyncio.get_running_loop().time() - self._ready_s > STABLE_AFTER_S:
            self._num_losses = 0
        max_attempts = self._config.max_worker_restarts
        for attempt in range(1, max_attempts + 1):
            await self._worker.end()
            self._num_losses += 1
            await asyncio.sleep(backoff_s(self._num_losses))
            try:
                await self.start(self._model)
                return
            except (ServekitError, OSError) as error:
                delay_s = backoff_s(self._num_losses + 1)
                on_failed_start(f"attempt {attempt} of {max_attempts}, next in {delay_s:g} s: {error}")
        await self._worker.end()
        # Clients get this message. The log has the reasons, which are not sent because they name files of the server.
        raise WorkerLost(
            f"the model worker was lost, and {max_attempts} replacements in a row did not start (max_worker_restarts)"
        )

    async def stop(self, graceful: bool = True) -> None:
        """End the worker. If graceful, a ready worker is asked to exit before it is killed."""
        is_ready, self._is_ready = self._is_ready, False
        if self._worker is not None:
            await self._worker.end(graceful and is_ready)  # a worker that is loading does not read messages
            self._worker = None

    def mark_left(self) -> ServekitError:
        """Let go of a worker that `is_leaving`, when no step is in flight. Returns the loss that `replace` handles."""
        assert self._worker is not None and self._worker.is_leaving
        self._worker.send(Shutdown())
        self._worker.mark_lost(WorkerLost("the model worker has left"), "left")
        assert self._worker.loss is not None
        return self._worker.loss

    def mark_lost(self, what: str) -> ServekitError:
        """Declare the worker lost because of what it did. Returns the loss, for callers that raise it."""
        assert self._worker is not None
        self._worker.mark_lost(WorkerLost(f"the model worker {what}"), "garbage")
        assert self._worker.loss is not None
        return self._worker.loss


def _top_tokens_exist(result: StepResult, vocab_size: int) -> Iterator[bool]:
    """For each position with logprobs: whether the ids of its top tokens are in the vocabulary."""
    of_prompts = (prompt.logprobs for prompt in result.prompt_logprobs)
    for logprobs in chain(result.logprobs, *of_prompts):
        if logprobs is not None:
            try:
                yield all(0 <= token_id < vocab_size for token_id, _ in logprobs.top)
            except ValueError:
                yield False


def load_model_message(config: ServeConfig, path: str, speculative: SpeculativeConfig) -> LoadModel:
    """The first message to a worker. A simulated model has no weights at `path`; its name specifies the step times.

    Raises ConfigError for what cannot be divided among ranks.
    """
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1 and is_simulated(config.model):
        raise ConfigError(
            f"the simulated model {config.model!r} cannot be divided: leave out --tensor-parallel-size and "
            "--pipeline-parallel-size"
        )
    if config.kv_offload_dir == "":
        raise ConfigError("--kv-offload-dir is empty; name a folder, or leave it out to keep blocks in memory only")
    if config.kv_offload_dir is not None and config.kv_offload_memory_bytes is None:
        raise ConfigError(
            f"kv_offload_dir = {config.kv_offload_dir!r} needs --kv-offload-memory-bytes: blocks come from the disk "
            "through the host's memory"
        )
    if config.kv_offload_memory_bytes is not None and not config.enable_prefix_caching:
        raise ConfigError(
            "--kv-offload-memory-bytes needs the prefix cache, whose blocks it keeps; leave out "
            "--no-enable-prefix-caching"
        )
    hands_over_by_network = config.prefill_replicas is not None and config.lets_workers_join
    return LoadModel(
        model_path=config.model if is_simulated(config.model) else path,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(""),
        max_model_len=config.max_model_len,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        load_format=config.load_format,
        kv_cache_dtype=config.kv_cache_dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        load_timeout_s=config.load_timeout,
        heartbeat_timeout_s=config.heartbeat_timeout,
        quantization=config.quantization,
        quantization_group_size=config.quantization_group_size,
        speculative=speculative,
        max_loras=config.max_loras if config.has_adapters else 0,
        max_lora_rank=config.max_lora_rank if config.has_adapters else 0,
        kv_offload_memory_bytes=config.kv_offload_memory_bytes or 0,
        kv_offload_dir=config.kv_offload_dir or "",
        kv_offload_disk_bytes=config.kv_offload_disk_bytes,
        kv_transfer_bytes=config.kv_transfer_memory_bytes if hands_over_by_network else 0,
    )
