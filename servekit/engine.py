"""The main loop: plan a step, let the worker execute it, commit what it sampled, hand out the text.

The engine is the asyncio shell round the workload manager. It owns the manager, the worker and every client's queue;
all of them are touched from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable

from servekit import __version__
from servekit.caller import ANYBODY, Caller
from servekit.client_queue import ClientQueue, TokenDelta
from servekit.config import ServeConfig
from servekit.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    RequestCrashesWorker,
    ServekitError,
    WorkerError,
    WorkerNotReady,
    shutting_down,
)
from servekit.generation_request import GenerationRequest
from servekit.history import History
from servekit.intake import Intake
from servekit.live_view import LiveState, LiveWorker
from servekit.messages import StepFailed, WorkerReady
from servekit.metrics import Metrics
from servekit.model_executor import ModelExecutor, load_message
from servekit.model_files import find_chat_template, find_model
from servekit.profiling import Profiling
from servekit.proof import Proof
from servekit.sampling_params import SamplingParams
from servekit.scheduler_config import scheduler_config
from servekit.sequence import NEVER, FinishReason, Sequence
from servekit.step import SequenceToken
from servekit.submission import Generation, Submission, make_sequences
from servekit.threads import in_daemon_thread
from servekit.tokenizer import Tokenizer, load_tokenizer
from servekit.viewing import View, look, snapshot
from servekit.waiting_room import WaitingRoom
from servekit.workload_manager import WorkloadManager

log = logging.getLogger("servekit")

STANDSTILL_S = 10.0  # of a main loop, after the time that a step may take
TOLD_TO_COME_BACK_S = 5  # where nothing is known of when
PROBE_ID = "servekit-probe"  # the server's own question has no client
MOST_IDS_TOLD = 5  # of requests, in a line of the log


class LLMEngine:
    """Serve one model. `start`, then `submit` as often as you like, then `stop`."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.metrics = Metrics(config, __version__)
        self.history = History()
        self.worker: WorkerReady | None = None  # what the worker told of itself; None until it is ready
        self.failure: ServekitError | None = None  # why the main loop ended, if it did
        self._clock = clock
        self._wake = asyncio.Event()  # for a main loop that has nothing to do
        self._executor = ModelExecutor(config, on_loss=self._wake.set)
        self.profiling = Profiling(config, self._executor)
        self._tokenizer: Tokenizer | None = None
        self._manager: WorkloadManager | None = None
        self._intake: Intake | None = None
        self._generations: dict[int, Generation] = {}
        self._ids = itertools.count()  # of sequences, in order of arrival
        self._waiting_room = WaitingRoom(config)
        self._proof = Proof(self._sample_one, clock)
        self._turned_s = 0.0  # when the main loop last did
        self._is_idle = False
        self._is_draining = False
        self._outage: ServekitError | None = None  # there has been no worker for longer than anybody should wait
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._warned_of_target = False
        self._main_loop: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """loading | ready | recovering | draining | failed."""
        if self.failure is not None:
            return "failed"
        if self._is_draining:
            return "draining"
        if self._main_loop is None:
            return "loading"
        return "ready" if self._executor.is_ready else "recovering"

    @property
    def stage(self) -> str:
        """What a server that is not ready is doing."""
        return "serving" if self._executor.is_ready else self._executor.stage

    @property
    def worker_pid(self) -> int | None:
        return self._executor.pid

    @property
    def is_healthy(self) -> bool:
        """Whether there is nothing that only a new process could mend.

        Loading is healthy, and so is an outage: workers are tried until they start, or this process ends by itself.
        What is not: a main loop that has ended, or that has not turned for longer than any step may take.
        """
        is_turning = self._clock() - self._turned_s < self.config.step_timeout + STANDSTILL_S
        return self.failure is None and (self.state != "ready" or self._is_idle or is_turning)

    @property
    def manager(self) -> WorkloadManager:
        if self._manager is None or self._main_loop is None or self._main_loop.done():
            raise self._not_ready()
        return self._manager

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise self._not_ready()
        return self._tokenizer

    @property
    def intake(self) -> Intake:
        if self._intake is None or self._main_loop is None or self._main_loop.done():
            raise self._not_ready()
        return self._intake

    def _not_ready(self) -> ServekitError:
        return self.failure or WorkerNotReady(
            f"the model is not ready to serve: {self.stage}", retry_after_s=TOLD_TO_COME_BACK_S
        )

    def let_in(self) -> float:
        """When a request came, on the clock that deadlines are measured with. Raises WorkerNotReady while nobody may.

        To be asked once for each request, before anything is done for it: who is in stays in while the server drains.
        """
        if self._is_draining:
            raise shutting_down()
        if self._outage is not None:
            raise self._outage
        return self._clock()

    async def prove(self) -> bool:
        """Whether it serves: a token was sampled lately, or is now, for a question of its own."""
        return self.state == "ready" and await self._proof.obtain() and self.state == "ready"

    async def _sample_one(self) -> None:
        """One token, as a client would get it; in the line like everybody else's."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        sequence = Sequence(next(self._ids), [0], sampling, self._clock())
        generation = Generation(
            sequence, 0, self.tokenizer.make_detokenizer(sampling), ClientQueue(), PROBE_ID, is_probe=True
        )
        self._admit(generation)
        self._wake.set()
        try:
            await generation.queue.get()
        finally:
            self.finish(generation, FinishReason.ABORT)

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError or WorkerError."""
        self.profiling.prepare()
        path = await in_daemon_thread(find_model, self.config.model)
        self._tokenizer = await in_daemon_thread(load_tokenizer, path)
        template = find_chat_template(path, self.config.chat_template)
        self.worker = await self._executor.start(load_message(self.config, str(path)))
        self._manager = manager = WorkloadManager(scheduler_config(self.config, self.worker))
        self._intake = Intake(self.config, path, self._tokenizer, template, self.worker.model, manager)
        self._intake.start()
        self.metrics.watch(lambda: snapshot(manager, self._clock()))
        self.metrics.workers_alive.set(1)
        self._turned_s = self._clock()
        self._proof.given(self._turned_s)  # the worker has compared its logits just now
        self._main_loop = asyncio.create_task(self._run(manager), name="servekit main loop")

    async def stop(self, kindly: bool = True) -> None:
        """End the main loop and the worker; if kindly, it gets a moment to end by itself. What still runs is failed."""
        if self._main_loop is not None:
            self._main_loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._main_loop
        self._proof.stop()
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self.fail_all(shutting_down())
        await self._executor.stop(kindly)
        if self._intake is not None:
            await self._intake.stop()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def drain(self) -> None:
        """Let nobody in from now on; those who are in go on."""
        self._is_draining = True
        self.metrics.is_draining = True

    async def wait_until_failed(self) -> None:
        """Return when the main loop has ended by itself, which it does only on failure."""
        if self._main_loop is not None:
            await asyncio.wait([self._main_loop])

    # -- the main loop ------------------------------------------------------------------------------------------------

    async def _run(self, manager: WorkloadManager) -> None:
        try:
            while True:
                try:
                    await self._step(manager)
                except WorkerError as loss:
                    await self._replace_worker(manager, loss)
        except ServekitError as error:
            self.failure = error
        except Exception as error:
            log.exception("the main loop failed")
            self.failure = InternalError(f"the main loop failed: {error}")
        self.fail_all(self.failure)  # the process ends with it, and says so

    async def _step(self, manager: WorkloadManager) -> None:
        """One turn: wait for work, dispatch what there is, take in one result. Raises WorkerError for a lost worker."""
        if self._executor.loss is not None:
            raise self._executor.loss
        if not manager.has_work:
            self._wake.clear()
            self._balance(manager)
            self.metrics.idle_began(self._clock())
            self._is_idle = True
            await self._wake.wait()
            self._is_idle, self._turned_s = False, self._clock()
            self.metrics.idle_ended(self._turned_s)
            return
        started = self._turned_s = self._clock()
        self._expire(manager, started)
        while (plan := manager.plan(started)) is not None:
            self._executor.send(plan)
            step = self.history.step_sent(plan, self._clock())
            self.metrics.step_sent(step, plan.epoch, manager.num_in_flight == 1)
        if not manager.num_in_flight:
            assert not manager.has_work, "there is work, nothing is in flight, and no step was planned"
            return
        result = await self._executor.receive()
        now = self._clock()
        if isinstance(result, StepFailed):
            self._retry_smaller(manager, result)
            return
        try:
            tokens = manager.commit(result, now)
        except WorkerError:
            raise self._executor.lose("sent a result that does not fit its step") from None
        for token in tokens:
            self._deliver(token, now)
        if result.epoch == manager.epoch:
            self._proof.given(now)
        self._balance(manager)
        self._warn_if_out_of_reach(manager)
        self.history.step_done(result, len(tokens), now)
        self.metrics.step_done(result, now, self._clock() - started)

    def _balance(self, manager: WorkloadManager) -> None:
        """Every block and slot is somebody's. Were it not so, the mistake is ours, and the service outlives it."""
        if (num_lost := manager.num_lost) != 0:
            log.error("%d KV blocks or slots are nobody's; the accounts begin anew", num_lost)
            self.metrics.accounting_faults.inc()
            self._begin_again(manager)

    # -- workers that are lost ----------------------------------------------------------------------------------------

    async def _replace_worker(self, manager: WorkloadManager, loss: WorkerError) -> None:
        """All there is goes on with the next worker, from its tokens. Raises WorkerLost if there is to be none."""
        lost_s = self._clock()
        log.error("what goes on with the next worker: %s", self._describe_work())
        self.metrics.workers_alive.set(0)
        self.metrics.worker_restarted(self._executor.cause)
        self._begin_again(manager)
        telling = asyncio.get_running_loop().call_later(self.config.worker_restart_timeout, self._tell_of_outage, loss)
        try:
            await self._executor.replace(lambda: self.metrics.worker_restarted("no_start"))
        finally:
            telling.cancel()
        now = self._clock()
        self._outage = None
        self._turned_s = now
        self._proof.given(now)
        self.metrics.workers_alive.set(1)
        self.metrics.worker_recovery.observe(now - lost_s)
        log.info("the next worker is ready after %.1f s", now - lost_s)

    def _retry_smaller(self, manager: WorkloadManager, failed: StepFailed) -> None:
        """The device's memory did not hold a step: all begin again, in smaller ones."""
        if failed.epoch != manager.epoch:
            return  # the step behind one that failed
        self._begin_again(manager, is_out_of_memory=True)
        log.error("%s; steps have at most %d tokens for a while", failed.message, manager.step_token_limit)

    def _begin_again(self, manager: WorkloadManager, is_out_of_memory: bool = False) -> None:
        """What the worker held counts for nothing. Who loses workers ends here, with all of its request."""
        what = "ran out of memory" if is_out_of_memory else "was lost"
        for sequence in manager.restart(is_out_of_memory):
            queue = self._generations[sequence.sequence_id].queue
            queue.fail(
                RequestCrashesWorker(
                    f"{sequence.num_losses} times the model worker {what} over this request, the last time with "
                    "nothing else to do; it is not tried again"
                )
            )
            for generation in [each for each in self._generations.values() if each.queue is queue]:
                log.error("request %s is given up: workers are lost over it", generation.request_id)
                self._forget(generation, FinishReason.ERROR, self._clock())
        self.metrics.suspects.set(len(manager.quarantine))
        self.metrics.step_token_limit.set(manager.step_token_limit)

    def _tell_of_outage(self, loss: WorkerError) -> None:
        """There has been no worker for too long: nobody waits any longer, and nobody is let in until there is one."""
        self._outage = WorkerNotReady(
            f"there has been no model worker for {self.config.worker_restart_timeout:g} s (worker_restart_timeout): "
            f"{loss.message}",
            retry_after_s=TOLD_TO_COME_BACK_S,
        )
        log.error("%s; nobody is let in until there is one; told so: %s", self._outage.message, self._describe_work())
        self._fail_generations(self._outage)

    def _describe_work(self) -> str:
        """What is waiting or running, by the requests' ids."""
        request_ids = list(dict.fromkeys(generation.request_id for generation in self._generations.values()))
        told = ", ".join(request_ids[:MOST_IDS_TOLD]) + (", …" if len(request_ids) > MOST_IDS_TOLD else "")
        return f"{len(self._generations)} sequences of {len(request_ids)} requests" + (f" ({told})" if told else "")

    def _warn_if_out_of_reach(self, manager: WorkloadManager) -> None:
        if manager.pacer.is_out_of_reach and not self._warned_of_target:
            self._warned_of_target = True
            told = "steps take longer even without prefill, which is at its least now; raise it or lower --max-num-seqs"
            log.warning("--itl-target-ms %g is out of reach: %s", self.config.itl_target_ms, told)

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
        generation = self._generations.get(token.sequence.sequence_id)
        if generation is None:
            return  # of two results that were settled together, the first ended it with a stop string
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
        log.debug("%s of request %s: %s", sequence, generation.request_id, reason)
        self._waiting_room.left(now)
        if not generation.is_probe:
            self.history.ended(sequence, reason, generation.first_token_s, now)
            self.metrics.ended(sequence, reason, now, generation.first_token_s, generation.last_token_s)

    def finish(self, generation: Generation, reason: FinishReason) -> None:
        """End one generation early. Does nothing if it has ended already."""
        if generation.sequence.sequence_id in self._generations:
            self._forget(generation, reason, self._clock())

    def fail_all(self, error: ServekitError) -> None:
        """Tell every client, and those who are still being made ready; there is no way back from here."""
        if self._generations:
            log.warning("cut off (%s): %s", error.message, self._describe_work())
        if self._intake is not None:
            self._intake.give_up()
        self._fail_generations(error)

    def _fail_generations(self, error: ServekitError) -> None:
        for generation in list(self._generations.values()):
            generation.queue.fail(error)
            self._forget(generation, FinishReason.ERROR, self._clock())

    # -- admission ----------------------------------------------------------------------------------------------------

    async def submit(
        self, request: GenerationRequest, caller: Caller = ANYBODY, arrival_s: float | None = None
    ) -> Submission:
        """Admit all prompts of a request, or none. Raises RequestError or WorkerError.

        Deadlines count from `arrival_s`, which `let_in` gave, unless this is the first that is done for the request.
        """
        if arrival_s is None:
            arrival_s = self.let_in()
        self._waiting_room.check_answers(request, self.manager.num_waiting, self._clock())
        try:
            async with asyncio.timeout(self._time_left_s(request, arrival_s)):
                prepared = await self.intake.prepare(request)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed while the prompt or the grammar was prepared") from None
        if self._outage is not None:
            raise self._outage
        # Others may have come meanwhile; from here on nothing awaits.
        now, manager = self._clock(), self.manager
        self._waiting_room.check_answers(request, manager.num_waiting, now)
        num_tokens = sum(len(prompt.token_ids) * len(prompt.sampling) for prompt in prepared)
        self._waiting_room.check_tokens(num_tokens, manager.num_queued_tokens, manager.num_waiting, now)
        interval = request.stream_interval or self.config.stream_interval
        queue = ClientQueue(interval)
        generations: list[Generation] = []
        for prompt in prepared:
            first = len(generations)
            sequences = make_sequences(request, caller, prompt.token_ids, prompt.sampling, arrival_s, self._ids)
            for index, sequence in enumerate(sequences, first):
                detokenizer = self.tokenizer.make_detokenizer(sequence.sampling)
                generations.append(Generation(sequence, index, detokenizer, queue, caller.request_id))
        for generation in generations:
            self._admit(generation)
        self._watch_deadlines()
        self._wake.set()
        return Submission(request, caller, generations, queue, interval, self.finish)

    def _time_left_s(self, request: GenerationRequest, arrival_s: float) -> float | None:
        """Until the first of the request's deadlines, if it has any."""
        deadlines = [each for each in (request.ttft_ms, request.deadline_ms) if each is not None]
        return max(0.0, arrival_s + min(deadlines) / 1e3 - self._clock()) if deadlines else None

    def _admit(self, generation: Generation) -> None:
        self.manager.add(generation.sequence)
        self._generations[generation.sequence.sequence_id] = generation
        if not generation.is_probe:
            self.metrics.admitted(generation.sequence)

    # -- what operators see -------------------------------------------------------------------------------------------

    def now(self) -> float:
        """On the clock that everything here is measured with."""
        return self._clock()

    def look(self) -> View:
        """What whoever watches is told."""
        known = () if (ready := self.worker) is None else (ready.device, ready.dtype, ready.attention)
        worker = LiveWorker(self.stage, *known)
        server = LiveState(self._clock(), self.state, self.stage, self.config.model_name, __version__, [worker])
        if self._manager is None:
            return View(server)
        return look(server, self._manager, self._generations.values(), self.history)

    def _observe_token(self, generation: Generation, now: float) -> None:
        if generation.first_token_s is None:
            generation.first_token_s = now
            if not generation.is_probe:
                self.metrics.first_token(latency_s := now - generation.sequence.arrival_s)
                self.history.first_token(latency_s, now)
        elif generation.last_token_s is not None:
            self.metrics.next_token(now - generation.last_token_s)
        generation.last_token_s = now
