"""The main loop: plan a step, let the worker execute it, commit what it sampled, hand out the text.

The engine is the asyncio shell round the workload manager. It owns the manager, the worker and every client's queue;
all of them are touched from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from servekit import __version__
from servekit.caller import ANYBODY, Caller
from servekit.client_queue import ClientQueue, TokenDelta
from servekit.config import ServeConfig
from servekit.detokenizer import Detokenizer
from servekit.errors import DeadlineExceeded, InternalError, InvalidRequest, QueueFull, ServekitError, WorkerNotReady
from servekit.generation_request import GenerationRequest
from servekit.intake import Intake, PreparedPrompt
from servekit.messages import LoadModel, TokenLogprobs, WorkerReady
from servekit.metrics import Metrics, Snapshot
from servekit.model_executor import ModelExecutor
from servekit.model_files import find_chat_template, find_model
from servekit.sampling_params import SamplingParams
from servekit.sequence import NEVER, FinishReason, Sequence
from servekit.threads import in_daemon_thread
from servekit.tokenizer import Tokenizer, load_tokenizer
from servekit.workload_manager import SchedulerConfig, SequenceToken, WorkloadManager

log = logging.getLogger("servekit")


class Generation:
    """One sequence as its client sees it: the text so far, and where it goes."""

    __slots__ = ("detokenizer", "first_token_s", "index", "is_fork", "last_token_s", "queue", "sequence")

    def __init__(self, sequence: Sequence, index: int, detokenizer: Detokenizer, queue: ClientQueue) -> None:
        self.sequence = sequence
        self.is_fork = sequence.leader is not None  # its prompt is computed, and counted, with another one
        self.index = index
        self.detokenizer = detokenizer
        self.queue = queue
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None


class Submission:
    """A request that was admitted: read its `queue`, or `abort` it."""

    def __init__(
        self,
        engine: LLMEngine,
        request: GenerationRequest,
        caller: Caller,
        generations: list[Generation],
        queue: ClientQueue,
    ) -> None:
        self._engine = engine
        self._generations = generations
        self.request = request
        self.caller = caller
        self.queue = queue
        self.interval = request.stream_interval or engine.config.stream_interval

    @property
    def num_answers(self) -> int:
        """That are computed."""
        return len(self._generations)

    def prompt_token_ids(self, index: int) -> list[int]:
        """Of the request's prompt at `index`."""
        sequence = self._leader(index)
        return sequence.token_ids[: sequence.prompt_length]

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """Of all its tokens but the first; there when its first answer has begun."""
        return self._leader(index).prompt_logprobs

    def seed(self, index: int) -> int:
        """Of the sequence at `index`."""
        return self._generations[index].sequence.sampling.seed

    def _leader(self, index: int) -> Sequence:
        return self._generations[index * self.request.best_of].sequence

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, however many answers it gets."""
        return sum(sequence.prompt_length for sequence in self._leaders())

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was there already."""
        return sum(sequence.num_cached_tokens or 0 for sequence in self._leaders())

    def _leaders(self) -> Iterator[Sequence]:
        return (generation.sequence for generation in self._generations if not generation.is_fork)

    def abort(self) -> None:
        """Free everything that this request still holds. Does not await, so that it may run in a `finally`."""
        for generation in self._generations:
            self._engine.finish(generation, FinishReason.ABORT)


class LLMEngine:
    """Serve one model. `start`, then `submit` as often as you like, then `stop`."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.metrics = Metrics(config, __version__)
        self.worker: WorkerReady | None = None  # what the worker told of itself; None until it is ready
        self.failure: ServekitError | None = None  # why the main loop ended, if it did
        self._clock = clock
        self._executor = ModelExecutor(config.log_level)
        self._tokenizer: Tokenizer | None = None
        self._manager: WorkloadManager | None = None
        self._intake: Intake | None = None
        self._generations: dict[int, Generation] = {}
        self._next_sequence_id = 0
        self._work_arrived = asyncio.Event()
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._warned_of_target = False
        self._main_loop: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self._main_loop is not None and not self._main_loop.done()

    @property
    def manager(self) -> WorkloadManager:
        if self._manager is None or not self.is_ready:
            raise self.failure or WorkerNotReady("the model is not ready to serve", retry_after_s=1)
        return self._manager

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise WorkerNotReady("the model is not ready to serve", retry_after_s=1)
        return self._tokenizer

    @property
    def intake(self) -> Intake:
        if self._intake is None or not self.is_ready:
            raise self.failure or WorkerNotReady("the model is not ready to serve", retry_after_s=1)
        return self._intake

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError or WorkerError."""
        path = await in_daemon_thread(find_model, self.config.model)
        self._tokenizer = await in_daemon_thread(load_tokenizer, path)
        template = find_chat_template(path, self.config.chat_template)
        self.worker = await self._executor.start(self._load_message(str(path)), self.config.load_timeout)
        self._manager = manager = WorkloadManager(self._scheduler_config(self.worker))
        self._intake = Intake(self.config, path, self._tokenizer, template, self.worker.model, manager)
        self._intake.start()
        self.metrics.watch(lambda: _snapshot(manager, self._sequences(), self._clock()))
        self._main_loop = asyncio.create_task(self._run(manager), name="servekit main loop")

    async def stop(self) -> None:
        """End the main loop and the worker; what still runs is failed."""
        if self._main_loop is not None:
            self._main_loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._main_loop
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self.fail_all(WorkerNotReady("the server is shutting down", retry_after_s=5))
        await self._executor.stop()
        if self._intake is not None:
            await self._intake.stop()
        if self._tokenizer is not None:
            self._tokenizer.close()

    async def wait_until_failed(self) -> None:
        """Return when the main loop has ended by itself, which it does only on failure."""
        if self._main_loop is not None:
            await asyncio.wait([self._main_loop])

    def _load_message(self, path: str) -> LoadModel:
        config = self.config
        return LoadModel(
            model_path=path,
            dtype=config.dtype,
            device=config.device,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_kv_blocks=config.num_kv_blocks,
            kv_cache_memory_bytes=config.kv_cache_memory_bytes,
            gpu_memory_utilization=config.gpu_memory_utilization,
        )

    def _scheduler_config(self, worker: WorkerReady) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=worker.num_blocks,
            block_size=self.config.block_size,
            max_model_len=worker.model.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            eos_token_ids=frozenset(worker.model.eos_token_ids),
            max_steps_in_flight=self.config.max_steps_in_flight,
            enable_prefix_caching=self.config.enable_prefix_caching,
            scheduling_policy=self.config.scheduling_policy,
            itl_target_s=None if self.config.itl_target_ms is None else self.config.itl_target_ms / 1e3,
        )

    # -- the main loop ------------------------------------------------------------------------------------------------

    async def _run(self, manager: WorkloadManager) -> None:
        try:
            while True:
                await self._step(manager)
        except ServekitError as error:
            self.failure = error
        except Exception as error:
            log.exception("the main loop failed")
            self.failure = InternalError(f"the main loop failed: {error}")
        log.error("%s", self.failure.message)
        self.fail_all(self.failure)

    async def _step(self, manager: WorkloadManager) -> None:
        """One turn: wait for work, dispatch what there is, take in one result."""
        if not manager.has_work:
            self._work_arrived.clear()
            self.metrics.idle_began(self._clock())
            await self._work_arrived.wait()
            self.metrics.idle_ended(self._clock())
        started = self._clock()
        self._expire(manager, started)
        while (plan := manager.plan(started)) is not None:
            sent_s = self._clock()
            self._executor.send(plan.with_grammars_apart())
            self.metrics.step_sent(plan, sent_s, is_alone=manager.num_in_flight == 1)
        if not manager.num_in_flight:
            assert not manager.has_work, "there is work, nothing is in flight, and no step was planned"
            return
        result = await self._executor.receive(self.config.step_timeout)
        now = self._clock()
        for token in manager.commit(result, now):
            self._deliver(token, now)
        self._warn_if_out_of_reach(manager)
        self.metrics.step_done(result, now, turn_s=self._clock() - started)

    def _warn_if_out_of_reach(self, manager: WorkloadManager) -> None:
        if manager.pacer.is_out_of_reach and not self._warned_of_target:
            self._warned_of_target = True
            log.warning(
                "--itl-target-ms %g is out of reach: steps take longer even without prefill, which is at its "
                "least now; raise the target or lower --max-num-seqs",
                self.config.itl_target_ms,
            )

    def _expire(self, manager: WorkloadManager, now: float) -> None:
        """End what is past its deadline."""
        for sequence in manager.expire(now):
            generation = self._generations[sequence.sequence_id]
            text = generation.detokenizer.finish()
            generation.queue.put(TokenDelta(generation.index, None, text, False, FinishReason.DEADLINE))
            self._forget(generation, FinishReason.DEADLINE, now)

    def _watch_deadlines(self) -> None:
        """See to the next deadline when it comes, also while the worker is slow to answer."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        manager, now = self._manager, self._clock()
        assert manager is not None
        self._expire(manager, now)
        if manager.next_deadline_s != NEVER:
            delay_s = manager.next_deadline_s - now + 1e-3  # rather late than in vain
            self._deadline_timer = asyncio.get_running_loop().call_later(delay_s, self._watch_deadlines)

    def _deliver(self, token: SequenceToken, now: float) -> None:
        """Turn a committed token into text and give it to its client."""
        generation = self._generations[token.sequence.sequence_id]
        if token.failure is not None:
            generation.queue.fail(
                InvalidRequest(
                    f"the answer could not follow its grammar: {token.failure}", param="grammar", code="grammar_failed"
                )
            )
            self._forget(generation, FinishReason.ERROR, now)
            return
        detokenizer = generation.detokenizer
        self._observe_token(generation, now)
        stopped_by_token = token.finish_reason is FinishReason.STOP
        # The token that stops a sequence is not part of its text, unless its client wants it.
        is_told = not stopped_by_token or token.sequence.sampling.include_stop
        text = detokenizer.feed(token.token_id) if is_told else ""
        reason = token.finish_reason
        if reason is not None and detokenizer.stop_string is None:
            text += detokenizer.finish()
        stop_reason: str | int | None = token.sequence.stop_token_id
        if detokenizer.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, detokenizer.stop_string
        special = self.tokenizer.is_special(token.token_id)
        generation.queue.put(
            TokenDelta(generation.index, token.token_id, text, special, reason, stop_reason, token.logprobs)
        )
        if reason is not None:
            self._forget(generation, reason, now)

    def _forget(self, generation: Generation, reason: FinishReason, now: float) -> None:
        """The one way out of the engine: release what the manager may still hold, and count."""
        sequence = generation.sequence
        assert self._manager is not None
        self._manager.finish(sequence, reason)
        del self._generations[sequence.sequence_id]
        log.debug(
            "sequence %d: %s after %d + %d tokens in %.0f ms",
            sequence.sequence_id,
            reason,
            sequence.prompt_length,
            sequence.num_output_tokens,
            1e3 * (now - sequence.arrival_s),
        )
        self.metrics.ended(sequence, reason, now, generation.first_token_s, generation.last_token_s)

    def finish(self, generation: Generation, reason: FinishReason) -> None:
        """End one generation early. Does nothing if it has ended already."""
        if generation.sequence.sequence_id in self._generations:
            self._forget(generation, reason, self._clock())

    def fail_all(self, error: ServekitError) -> None:
        """Tell every client, and those who are still being made ready; there is no way back from here."""
        if self._intake is not None:
            self._intake.give_up()
        for generation in list(self._generations.values()):
            generation.queue.fail(error)
            self._forget(generation, FinishReason.ERROR, self._clock())

    # -- admission ----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """On the clock that deadlines are measured with."""
        return self._clock()

    async def submit(
        self, request: GenerationRequest, caller: Caller = ANYBODY, arrival_s: float | None = None
    ) -> Submission:
        """Admit all prompts of a request, or none. Raises RequestError or WorkerError.

        Deadlines count from `arrival_s`, which is now unless the request has been seen to before.
        """
        if arrival_s is None:
            arrival_s = self._clock()
        self._check_room(request)
        try:
            async with asyncio.timeout(self._time_left_s(request, arrival_s)):
                prepared = await self.intake.prepare(request)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the prompt or the grammar was prepared") from None
        self._check_room(request)  # others may have come meanwhile; from here on nothing awaits
        queue = ClientQueue(request.stream_interval or self.config.stream_interval)
        generations = [
            generation
            for index, prompt in enumerate(prepared)
            for generation in self._make_generations(request, caller, prompt, index * request.best_of, queue, arrival_s)
        ]
        for generation in generations:
            self._admit(generation)
        self._watch_deadlines()
        self._work_arrived.set()
        return Submission(self, request, caller, generations, queue)

    def _time_left_s(self, request: GenerationRequest, arrival_s: float) -> float | None:
        """Until the first of the request's deadlines, if it has any."""
        deadlines = [each for each in (request.ttft_ms, request.deadline_ms) if each is not None]
        return max(0.0, arrival_s + min(deadlines) / 1e3 - self._clock()) if deadlines else None

    def _check_room(self, request: GenerationRequest) -> None:
        num_answers, limit = request.num_sequences, self.config.max_client_batch_size
        param = (
            "n" if request.n > 1 else "best_of" if request.best_of > 1 else request.prompts[0].param.partition("[")[0]
        )
        if num_answers > limit:
            raise InvalidRequest(
                f"{num_answers} answers to one request (prompts times n, or best_of); at most {limit} are computed "
                "(max_client_batch_size)",
                param=param,
            )
        num_waiting, most = self.manager.num_waiting, self.config.max_num_queued_reqs
        if num_answers > most:
            raise InvalidRequest(
                f"{num_answers} answers to one request; at most {most} may wait (max_num_queued_reqs)", param=param
            )
        if num_waiting + num_answers > most:
            raise QueueFull(
                f"{num_waiting} sequences are waiting and {num_answers} more came; at most {most} may wait. "
                "Please try again later.",
                retry_after_s=1,
            )

    def _make_generations(
        self,
        request: GenerationRequest,
        caller: Caller,
        prompt: PreparedPrompt,
        first: int,
        queue: ClientQueue,
        arrival_s: float,
    ) -> Iterator[Generation]:
        """The answers to one prompt, numbered from `first` on; the first one computes it for all."""
        leader: Sequence | None = None
        for index, sampling in enumerate(prompt.sampling, first):
            sequence = Sequence(
                self._next_sequence_id,
                prompt.token_ids,
                sampling,
                arrival_s,
                tenant=caller.tenant,
                priority=request.priority,
                ttft_deadline_s=_deadline(arrival_s, request.ttft_ms),
                deadline_s=_deadline(arrival_s, request.deadline_ms),
                leader=leader,
                has_length_bound=request.max_tokens is not None,
            )
            leader = leader or sequence
            self._next_sequence_id += 1
            yield Generation(sequence, index, self._detokenizer(sampling), queue)

    def _detokenizer(self, sampling: SamplingParams) -> Detokenizer:
        tokenizer = self.tokenizer
        token_bytes = tokenizer.token_bytes if sampling.skip_special_tokens else tokenizer.token_bytes_with_special
        return Detokenizer(token_bytes, sampling.stop, sampling.include_stop, sampling.min_tokens)

    def _admit(self, generation: Generation) -> None:
        self.manager.add(generation.sequence)
        self._generations[generation.sequence.sequence_id] = generation
        self.metrics.admitted(generation.sequence)

    # -- what operators see -------------------------------------------------------------------------------------------

    def _sequences(self) -> list[Sequence]:
        return [generation.sequence for generation in self._generations.values()]

    def _observe_token(self, generation: Generation, now: float) -> None:
        if generation.last_token_s is None:
            generation.first_token_s = now
            self.metrics.first_token(now - generation.sequence.arrival_s)
        else:
            self.metrics.next_token(now - generation.last_token_s)
        generation.last_token_s = now


def _deadline(arrival_s: float, milliseconds: int | None) -> float:
    return NEVER if milliseconds is None else arrival_s + milliseconds / 1e3


def _snapshot(manager: WorkloadManager, sequences: list[Sequence], now: float) -> Snapshot:
    return Snapshot(
        now_s=now,
        num_running=manager.num_running,
        num_waiting=manager.num_waiting,
        num_deferred=sum(each.waits_for_leader for each in sequences),
        num_waiting_tokens=sum(
            each.prompt_length for each in sequences if each.first_scheduled_s is None and each.leader is None
        ),
        num_preemptions=manager.num_preemptions,
        num_stale_results=manager.num_stale_results,
        num_blocks=manager.memory.pool.num_blocks,
        num_free_blocks=manager.memory.pool.num_available,
        num_prompt_tokens=manager.num_prompt_tokens,
        num_cached_tokens=manager.num_cached_tokens,
        prefill_limit=manager.pacer.prefill_limit(),
    )
