"""Run one workload manager and its worker: plan a step, send it, receive its result, commit it, deliver the output."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from servekit.config import ServeConfig
from servekit.engine.output_processor import OutputProcessor
from servekit.engine.request_registry import RequestRegistry
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import InternalError, RequestCrashesWorker, ServekitError, WorkerError
from servekit.executor.model_executor import ModelExecutor
from servekit.latency.latency_predictor import LatencyPredictor
from servekit.observability.metrics import SchedulerStats
from servekit.observability.observer import Observer, StepSummary
from servekit.protocol.messages import BlocksListed, ListBlocks, StepFailed
from servekit.scheduler.commands import (
    AddSequence,
    AnnounceBlocks,
    Commit,
    Expire,
    Finish,
    Operation,
    Outcome,
    Plan,
    Restart,
)
from servekit.scheduler.crash_quarantine import CRASHES_TO_FAIL
from servekit.scheduler.sequence import NEVER, Sequence
from servekit.scheduler.workload_manager import WorkloadManager

log = logging.getLogger("servekit")

STALL_TIMEOUT_S = 10.0  # limit of one main loop iteration, in addition to the time of a step
MAX_ANNOUNCED_BLOCKS = 2**17  # by a new worker; one that joined may go on for ever
KEYS_PER_COMMAND = 1024  # a journal hashes them, which takes 1 µs for each
ENDS_PER_TURN = 32  # ends of sequences; this many take about 2 ms, and then other callbacks run before the next plan
RETRY_AFTER_S = 5  # for clients, while it is not known when the next worker will be ready


class Peers(Protocol):
    """The calls of a core to its engine that concern the engine's other cores."""

    async def core_lost(self, core: EngineCore, loss: WorkerError) -> bool:
        """Continue the sequences of a core elsewhere: its worker is lost, and the core has reset them.

        Returns whether the worker is to be replaced.
        """

    async def core_ready(self, core: EngineCore) -> None:
        """Let a core take over sequences that wait elsewhere: its worker has been replaced."""

    def hand_over(self, core: EngineCore) -> None:
        """Let decode replicas go on with its sequences that have tokens: it is for prefill."""

    def has_other_worker(self, core: EngineCore) -> bool:
        """Whether another core has a worker."""

    def finish(self, commands: Iterable[Finish]) -> None:
        """End sequences, which may be on any core."""


class EngineCore:
    """One workload manager, the executor of its steps, and the main loop that drives both.

    Everything runs on the event loop's thread. `apply` is the only place that sends commands to the manager, so a
    recording of its arguments is a complete record of the manager's inputs.
    """

    def __init__(
        self,
        config: ServeConfig,
        manager: WorkloadManager,
        executor: ModelExecutor,
        output: OutputProcessor,
        registry: RequestRegistry,
        observers: list[Observer],
        clock: Callable[[], float],
        peers: Peers,
        replica: int = 0,
    ) -> None:
        """`executor` has a worker that is ready. `replica` is the number of this core in log lines."""
        self.manager = manager
        self.latency = LatencyPredictor()  # learns from the steps, and predicts what the manager will do
        self._config = config
        self._executor = executor
        self._output = output
        self._registry = registry
        self._observers = observers
        self._clock = clock
        self._peers = peers
        self._replica = replica
        self._wake = asyncio.Event()  # wakes an idle main loop
        self._is_idle = False
        self._knows_blocks = not manager.kv_connector.is_on  # whether it knows what the KV connector holds
        self._iteration_began_s = clock()
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._warned_of_latency_target = False

    # -- commands -----------------------------------------------------------------------------------------------------

    def apply(self, command: Operation[Outcome]) -> Outcome:
        """Apply one command to the workload manager, and return its answer."""
        return self.manager.apply(command)

    def _finish_all(self, commands: Iterable[Finish]) -> None:
        for command in commands:
            self.apply(command)

    def add(self, request: RequestState, output: SequenceOutput) -> None:
        """Begin to deliver the tokens of a request's sequence that has been added to the manager."""
        self._output.add(request, output)
        self._watch_deadlines()
        self.wake()

    def resume(self, command: AddSequence) -> Sequence:
        """Continue a sequence of another core. Its tokens are delivered as before."""
        sequence = self.apply(command)
        self._watch_deadlines()
        self.wake()
        return sequence

    def worker_started(self) -> None:
        """Note that the executor has another worker, before `run` is called again."""
        self._iteration_began_s = self._clock()
        for observer in self._observers:
            observer.worker_ready(None, self._iteration_began_s)

    def worker_start_failed(self, why: str) -> None:
        """Note that a worker did not start in place of one that was lost."""
        log.error("replica %d: no worker started: %s", self._replica, why)
        for observer in self._observers:
            observer.worker_start_failed()

    def wake(self) -> None:
        """Make an idle main loop look for work, or for the loss of its worker."""
        self._wake.set()

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def plans_steps(self) -> bool:
        """Whether there is a worker that executes steps, and that does not leave."""
        return self._executor.is_ready and not self._executor.is_leaving

    @property
    def is_stalled(self) -> bool:
        """Whether the main loop has work and has made no iteration for longer than a step may take."""
        limit_s = self._config.step_timeout + STALL_TIMEOUT_S
        return not self._is_idle and self._clock() - self._iteration_began_s >= limit_s

    def stats(self) -> SchedulerStats:
        """The state of the scheduler, for metrics."""
        manager, pool = self.manager, self.manager.kv_cache.pool
        return SchedulerStats(
            now_s=self._clock(),
            num_running=manager.num_running,
            num_waiting=manager.num_waiting,
            num_followers=manager.num_followers,
            num_waiting_tokens=manager.queued.total.num_tokens,
            num_preemptions=manager.num_preemptions,
            num_share_preemptions=manager.num_share_preemptions,
            num_stale_results=manager.num_stale_results,
            num_deferrals=manager.num_deferrals,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_available,
            num_prompt_tokens=manager.num_prompt_tokens,
            num_cached_tokens=manager.num_cached_tokens,
            prefill_limit=manager.prefill_limiter.prefill_limit(),
            step_token_limit=manager.step_token_limit,
            num_quarantined=len(manager.quarantine),
            predicted_wait_s=self.latency.waiting_time.seconds(manager, manager.num_waiting),
            step_time_error=self.latency.model.relative_error,
            num_predicted_first_tokens=self.latency.quality.num_first_tokens,
            num_first_tokens_in_band=self.latency.quality.num_in_band,
            first_token_error=self.latency.quality.first_token_error,
            end_error=self.latency.quality.end_error,
        )

    # -- the main loop ------------------------------------------------------------------------------------------------

    async def run(self) -> ServekitError:
        """Serve until the engine fails, and return the failure. Cancel this to stop serving."""
        try:
            while True:
                try:
                    await self._step()
                except WorkerError as loss:
                    await self._replace_worker(loss)
        except ServekitError as error:
            return error
        except Exception as error:
            log.exception("the main loop failed")
            return InternalError(f"the main loop failed: {error}")
        finally:
            if self._deadline_timer is not None:
                self._deadline_timer.cancel()

    async def _step(self) -> None:
        """One iteration: wait for work, send all steps that can be planned, commit one result. Raises WorkerError."""
        manager, executor = self.manager, self._executor
        if executor.loss is not None:
            raise executor.loss
        if executor.is_leaving and not manager.num_in_flight:
            raise executor.mark_left()
        if not self._knows_blocks:
            await self._ask_for_blocks()
        if not manager.has_work:
            await self._wait_for_work()
            return
        began_s = self._iteration_began_s = self._clock()
        self._expire(began_s)
        while not executor.is_leaving and (plan := self.apply(Plan(began_s))) is not None:
            executor.send(plan)
            step, sent_s, is_alone = StepSummary.of(plan), self._clock(), manager.num_in_flight == 1
            self.latency.planned(manager, plan, sent_s)
            for observer in self._observers:
                observer.step_sent(step, is_alone, sent_s)
        if not manager.num_in_flight:
            assert not manager.has_work, "there is work, nothing is in flight, and no step was planned"
            return
        result = await executor.receive()
        now_s = self._clock()
        if isinstance(result, StepFailed):
            self._retry_in_smaller_steps(result)
            return
        try:
            tokens = self.apply(Commit(result, now_s))
        except WorkerError:
            raise executor.mark_lost("sent a result that does not match its step") from None
        self.latency.committed(manager, tokens, now_s)
        ended, num_delivered = self._output.process(tokens, now_s)
        self._finish_all(ended)
        if manager.kv_connector.sends:
            self._peers.hand_over(self)
        self._check_accounting()
        self._warn_of_latency_target()
        loop_time_s = self._clock() - began_s
        for observer in self._observers:
            observer.step_done(result, num_delivered, loop_time_s, now_s)
        if len(ended) >= ENDS_PER_TURN:
            await asyncio.sleep(0)

    async def _ask_for_blocks(self) -> None:
        """Tell the manager which blocks a new worker's KV connector holds. Raises WorkerError."""
        start = 0
        while True:
            listed = await self._executor.ask(ListBlocks(start))
            assert isinstance(listed, BlocksListed)
            if not listed.keys:
                break
            start += len(listed.keys)
            for first in range(0, len(listed.keys), KEYS_PER_COMMAND):
                self.apply(AnnounceBlocks(listed.keys[first : first + KEYS_PER_COMMAND]))
                await asyncio.sleep(0)
            if start >= MAX_ANNOUNCED_BLOCKS:
                break
        self._knows_blocks = True

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        self._check_accounting()
        idle_since_s = self._clock()
        for observer in self._observers:
            observer.idle_began(idle_since_s)
        self._is_idle = True
        await self._wake.wait()
        self._is_idle, self._iteration_began_s = False, self._clock()
        for observer in self._observers:
            observer.idle_ended(self._iteration_began_s)

    def _check_accounting(self) -> None:
        """Check that every KV block and slot is accounted for. If not, servekit has a bug; serving continues."""
        num_leaked = self.manager.num_leaked
        if num_leaked:
            log.error("KV accounting error: %d blocks or slots leaked; resetting the scheduler's state", num_leaked)
            for observer in self._observers:
                observer.accounting_error()
            self._restart_sequences()

    def _warn_of_latency_target(self) -> None:
        if self.manager.prefill_limiter.is_out_of_reach and not self._warned_of_latency_target:
            self._warned_of_latency_target = True
            log.warning(
                "--itl-target-ms %g cannot be met: steps take longer even with the minimum of prefill; raise it, or "
                "lower --max-num-seqs",
                self._config.itl_target_ms,
            )

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        """End sequences whose deadline has passed."""
        self._output.expire(self.apply(Expire(now_s)), now_s)

    def _watch_deadlines(self) -> None:
        """Expire sequences now, and set a timer for the next deadline: a step may take longer than a deadline."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        now_s = self._clock()
        self._expire(now_s)
        if self.manager.next_deadline_s != NEVER:
            delay_s = self.manager.next_deadline_s - now_s + 1e-3  # timers may fire early; then nothing would expire
            self._deadline_timer = asyncio.get_running_loop().call_later(delay_s, self._watch_deadlines)

    # -- lost workers -------------------------------------------------------------------------------------------------

    async def _replace_worker(self, loss: WorkerError) -> None:
        """Start another worker. All sequences continue from their tokens: on other cores, or there when it is ready.

        Raises WorkerLost if none starts.
        """
        lost_s = self._clock()
        has_left = self._executor.cause == "left"
        log.log(
            logging.INFO if has_left else logging.ERROR,
            "replica %d: worker %s %s; resuming %s on %s",
            self._replica,
            self._executor.worker_name,
            "has left" if has_left else "is lost",
            self._registry.describe(self.manager.sequence_ids),
            "others" if self._peers.has_other_worker(self) else "its replacement",
        )
        for observer in self._observers:
            observer.worker_lost(self._executor.cause)
        self._restart_sequences(is_out_of_memory=self._executor.cause == "out_of_memory")
        if not await self._peers.core_lost(self, loss):
            raise loss
        await self._executor.replace(self.worker_start_failed)
        now_s = self._clock()
        self._iteration_began_s = now_s
        for observer in self._observers:
            observer.worker_ready(now_s - lost_s, now_s)
        what = "replica %d: worker %s is ready, %.1f s after the loss"
        log.info(what, self._replica, self._executor.worker_name, now_s - lost_s)
        await self._peers.core_ready(self)

    def _retry_in_smaller_steps(self, failed: StepFailed) -> None:
        """Compute all sequences again in smaller steps, because a step did not fit into the device's memory."""
        if failed.epoch != self.manager.epoch:
            return  # the step that was in flight after one that failed
        self._restart_sequences(is_out_of_memory=True)
        log.error(
            "%s; all sequences restart, with at most %d tokens a step for a while",
            failed.message,
            self.manager.step_token_limit,
        )

    def _restart_sequences(self, is_out_of_memory: bool = False) -> None:
        """Reset all running sequences, because the worker's KV is gone. Fail requests that crash workers repeatedly."""
        self._knows_blocks = is_out_of_memory or not self.manager.kv_connector.is_on
        what = "ran out of memory" if is_out_of_memory else "was lost"
        for sequence in self.apply(Restart(is_out_of_memory)):
            output = self._registry.output(sequence.sequence_id)
            if output is None:
                continue  # a sibling in the same list, which failed with the request
            error = RequestCrashesWorker(
                f"the model worker {what} {CRASHES_TO_FAIL} times while this request ran, the last time while it ran "
                "alone; the request is not retried"
            )
            log.error("request %s failed: the model worker %s each time it ran", output.request_id, what)
            self._peers.finish(self._output.fail_request_of(sequence.sequence_id, error, self._clock()))
