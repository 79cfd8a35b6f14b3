"""Serve one model: admit requests, and start and stop the parts that execute them.

InputProcessor converts a request to token ids, EngineCore schedules and executes steps, and OutputProcessor converts
tokens to text and fills the clients' queues. All of them run on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from servekit import __version__
from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.config import ServeConfig
from servekit.engine.adapter_registry import AdapterRegistry, check_adapters
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.client_queue import ClientQueue
from servekit.engine.detokenizer import Detokenizer, NullDetokenizer
from servekit.engine.engine_core import RETRY_AFTER_S, EngineCore
from servekit.engine.input_processor import InputProcessor, PreparedPrompt, num_logprobs, prepare_in_time
from servekit.engine.latency_predictions import LatencyPredictions
from servekit.engine.live_view import LiveView, build_live_view, live_worker
from servekit.engine.model_files import ChatTemplate, find_chat_template, find_served_model
from servekit.engine.one_model import OneModel
from servekit.engine.output_processor import OutputProcessor
from servekit.engine.profiling import Profiling
from servekit.engine.queue_limits import QueueLimits, QueuePlaces
from servekit.engine.readiness_probe import ReadinessProbe
from servekit.engine.replica import Replica
from servekit.engine.replica_supervisor import ReplicaSupervisor
from servekit.engine.replicas import Replicas
from servekit.engine.request_registry import RequestRegistry
from servekit.engine.request_state import RequestState, SequenceOutput, add_commands
from servekit.engine.speculation import choose_drafter
from servekit.engine.tokenizer import Tokenizer, load_tokenizer
from servekit.engine.waiting_times import WaitingTimes
from servekit.engine.worker_scaling import WorkerScaling
from servekit.errors import InvalidRequest, QueueFull, ServekitError, WorkerError, WorkerNotReady, shutting_down
from servekit.executor.model_executor import load_model_message
from servekit.joining.worker_placer import check_placement
from servekit.joining.worker_pool import WorkerPool
from servekit.observability.cost import Cost, CostMeter
from servekit.observability.journal import Journal, JournalCollector, open_journals
from servekit.observability.live_frames import LiveState
from servekit.observability.metrics import HttpMetrics, Metrics, ModelMetrics
from servekit.observability.observer import Observer
from servekit.observability.step_history import StepHistory
from servekit.protocol.lora import AdapterLoaded, LoadAdapter, common_answer
from servekit.protocol.messages import WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.requests.time_causes import TimeCause
from servekit.scheduler.commands import AddSequence, Finish
from servekit.scheduler.kv_connector import ReplicaRole
from servekit.scheduler.scheduler_config import SchedulerConfig, scheduler_config
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.shared_budget import SharedBudget

log = logging.getLogger("servekit")

TOKENS_PER_SLICE = 2**15  # prompt tokens admitted without a pause; looking up their blocks takes about a millisecond
TOKENS_PER_ANSWER = 2**11  # these take as long as adding one sequence
PROBE_CALLER = Caller(request_id="servekit-probe")
PROBE_PROMPT = PreparedPrompt(array("i", [0]), [SamplingParams(max_tokens=1, temperature=0.0)])
PROBE_REQUEST = GenerationRequest(
    prompts=[Prompt(PROBE_PROMPT.token_ids, "prompt")], sampling=Sampling(temperature=0.0, seed=0), max_tokens=1
)


class LLMEngine(OneModel):
    """Serves one model. Call `start`, then `submit` any number of requests, then `stop`."""

    def __init__(
        self,
        config: ServeConfig,
        clock: Callable[[], float] = time.monotonic,
        metrics: ModelMetrics | None = None,
        result_budget: SharedBudget | None = None,
    ) -> None:
        """`metrics` and `result_budget`, in logprobs, are given where the server has several models.

        Raises ConfigError for settings that do not go together.
        """
        check_adapters(config)
        check_placement(config)
        self.config = config
        self.metrics = metrics or Metrics(config, __version__)
        self.history = StepHistory()
        self.failure: ServekitError | None = None  # why the main loop ended, if it did
        self._clock = clock
        count_refused = self.metrics.joins.refused
        self._worker_pool = WorkerPool(config, count_refused) if config.lets_workers_join else None
        self._registry = RequestRegistry()
        self.replicas = Replicas(config.block_size, self._registry, may_grow=config.lets_workers_join)
        self._supervisor = ReplicaSupervisor(config, self.replicas, self._registry, self._worker_pool)
        self.replicas.on_failed_fetch = lambda index: self.metrics.transfers(index).fetch_failed()
        self.profiling = Profiling(config, self.replicas.all[0].executor)
        self.adapters: AdapterRegistry | None = None
        if config.has_adapters:
            self.adapters = registry = AdapterRegistry(config, self._load_adapter)
            if self._worker_pool is not None:
                self._worker_pool.loaded_adapters = lambda: registry.adapters
        self._queue_limits = QueueLimits(config)
        self._waiting_times = WaitingTimes(config, lambda: self.replicas.taking_cores, clock)
        self._predictions = LatencyPredictions(clock) if config.max_predicted_wait else None
        self._cost_meter = None if config.price_per_hour is None else CostMeter(config.price_per_hour)
        self._prediction_tasks: list[asyncio.Task[None]] = []
        self._result_budget = result_budget or SharedBudget(config.max_total_logprobs)
        self._probe = ReadinessProbe(self._generate_token, clock)
        self._output: OutputProcessor | None = None
        self._sequence_ids = itertools.count()  # ids ascend in order of arrival
        self._tokenizer: Tokenizer | None = None
        self.speculative = SpeculativeConfig()  # the chosen drafter
        self._journals: list[Journal] = []  # one for each replica, if there are any
        self._input_processor: InputProcessor | None = None  # with several API processes, each of them has one
        self.model_path: Path | None = None  # these two are known when the engine has started
        self.chat_template: ChatTemplate | None = None
        self._main_loop: asyncio.Task[None] | None = None
        self._is_draining = False
        self._rejects_requests = False

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of loading, ready, recovering, draining, failed."""
        if self.failure is not None:
            return "failed"
        if self._is_draining:
            return "draining"
        if self._main_loop is None:
            return "loading"
        return "ready" if self.replicas.num_ready else "recovering"

    @property
    def stage(self) -> str:
        """What a server that is not ready is doing, as text for people."""
        return "serving" if self.replicas.num_ready else self.replicas.stage

    @property
    def has_free_slots(self) -> bool:
        """Whether a slot would be free if all waiting sequences had theirs."""
        return self.replicas.has_free_slots

    @property
    def worker(self) -> WorkerReady | None:
        """What the first worker reported; None until it is ready."""
        return self.replicas.all[0].worker

    @property
    def worker_pids(self) -> list[int | None]:
        """The process id of each replica's worker; None before its first start."""
        return [replica.executor.pid for replica in self.replicas.all]

    @property
    def workers(self) -> list[tuple[dict[str, str], int | None]]:
        """The labels and the process id of each worker, for metrics."""
        return [({"replica": str(number)}, pid) for number, pid in enumerate(self.worker_pids)]

    @property
    def is_healthy(self) -> bool:
        """False if only a new process can help: the main loop has ended, or one of its cores has stalled.

        Loading is healthy. So is an outage, because workers are started until one is ready, or the process ends.
        """
        return self.failure is None and not (self.state == "ready" and self.replicas.is_stalled)

    async def probe_readiness(self) -> bool:
        """Whether the engine generates tokens: one was sampled recently, or one is sampled for this call."""
        return self.state == "ready" and await self._probe.check() and self.state == "ready"

    def now(self) -> float:
        """The time on the clock that all times of the engine are measured with."""
        return self._clock()

    async def live_view(self) -> LiveView:
        """One frame of the live view."""
        workers = [live_worker(replica) for replica in self.replicas.all]
        server = LiveState(self._clock(), self.state, self.stage, self.config.model_name, __version__, workers)
        if self.adapters is not None:
            server = replace(server, adapters=self.adapters.live())
        managers = [core.manager for core in self.replicas.cores]
        if not managers:
            return LiveView(server)
        return build_live_view(server, managers, self._registry.outputs, self.history)

    async def render_metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.server_metrics.render()

    async def describe(self) -> dict[str, Any]:
        """What /info says of the running engine. Raises WorkerNotReady until the model is loaded."""
        replicas = [{**replica.info(), "drafter": self.speculative.name} for replica in self.replicas.all]
        adapters = None if self.adapters is None else self.adapters.usage()._asdict()
        return {
            "max_drafts": self.scheduler_config.max_drafts,
            "replicas": replicas,
            "num_handed_over": self.replicas.num_handed_over,
            "num_failed_transfers": self.replicas.fetches.num_failed,
            "adapters": adapters,
            "cost": None if self._cost_meter is None else self._cost(self._cost_meter),
        }

    def _cost(self, meter: CostMeter) -> Cost:
        """What the devices of the workers that are loaded have cost until now."""
        workers = [replica.worker for replica in self.replicas.all if replica.is_ready]
        num_devices = sum(max(1, len(worker.ranks)) for worker in workers if worker is not None)
        return meter.read(self._clock(), num_devices, self.metrics.requests.num_tokens)

    @property
    def server_metrics(self) -> Metrics:
        """All metrics of the server, of which this engine is the only one."""
        assert isinstance(self.metrics, Metrics)
        return self.metrics

    @property
    def http_counters(self) -> HttpMetrics:
        """Counts HTTP requests."""
        return self.metrics.http

    # -- the parts of a running engine; each property raises WorkerNotReady while the model loads ----------------------

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise self._not_ready()
        return self._tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        if self._input_processor is None or not self._is_running:
            raise self._not_ready()
        return self._input_processor

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The present limits of the scheduler; with several replicas, of the one with the most KV blocks."""
        return self._running_replicas.limits

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest sequence. Raises WorkerNotReady."""
        return self.scheduler_config.max_total_tokens

    @property
    def _running_replicas(self) -> Replicas:
        if not self._is_running:
            raise self._not_ready()
        return self.replicas

    @property
    def _is_running(self) -> bool:
        return self._main_loop is not None and not self._main_loop.done()

    def _not_ready(self) -> ServekitError:
        message = f"the model is not ready to serve: {self.stage}"
        return self.failure or WorkerNotReady(message, retry_after_s=RETRY_AFTER_S)

    # -- start and stop -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and begin to serve. Raises ConfigError or WorkerError."""
        self.profiling.prepare()
        self._journals = open_journals(self.config, range(len(self.replicas.all)))
        self.model_path = path = await run_in_daemon_thread(find_served_model, self.config)
        self._tokenizer = await run_in_daemon_thread(load_tokenizer, path)
        self.chat_template = template = find_chat_template(path, self.config.chat_template)
        self.speculative = await run_in_daemon_thread(self._choose_drafter, path)
        load = load_model_message(self.config, str(path), self.speculative)
        if self._worker_pool is not None:
            self._worker_pool.start(load)
        observers: list[Observer] = [self.metrics.requests, self.history, self._queue_limits]
        if self._predictions is not None:
            observers.append(self._predictions)
        if self.adapters is not None:
            observers.append(self.metrics.adapters)
        self._output = OutputProcessor(self._registry, observers, self._tokenizer.is_special)
        replicas = self.replicas
        await self._supervisor.start(load, self._make_core)
        if self._worker_pool is not None and self.config.starts_workers:
            self._worker_pool.first = self.worker
        assert self.worker is not None
        model = self.worker.model
        if self.adapters is not None:
            await self.adapters.start()
            self.metrics.watch_adapters(self.adapters.usage, time.time)
        if self._cost_meter is not None:
            self.metrics.watch_cost(functools.partial(self._cost, self._cost_meter))
        if self._journals:
            self.metrics.watch(JournalCollector(self._journals, self.config.model_name))
        if self.config.api_processes == 1:
            self._input_processor = InputProcessor(
                self.config, path, self._tokenizer, template, model, lambda: replicas.limits
            )
            self._input_processor.start()
        self.metrics.watch_scheduler(replicas.stats)
        if self.speculative.is_on:
            self.metrics.watch_drafts(
                self.speculative.name, lambda: [core.manager.draft_lengths for core in replicas.cores]
            )
        self.metrics.watch_queue(lambda: self._queue_limits.usage(replicas.num_waiting, replicas.queued))
        self._main_loop = asyncio.create_task(self._serve(), name="servekit main loop")
        self._prediction_tasks.append(asyncio.create_task(self._waiting_times.keep_current(), name="waiting times"))
        if self._worker_pool is not None and self.config.max_data_parallel_size is not None:
            scaling = WorkerScaling(self.config, self._worker_pool, lambda: replicas.taking_cores, self._clock)
            self._prediction_tasks.append(asyncio.create_task(scaling.run(), name="worker scaling"))
        if self._predictions is not None:
            self._prediction_tasks.append(asyncio.create_task(self._predictions.run(), name="request predictions"))

    def _choose_drafter(self, path: Path) -> SpeculativeConfig:
        return choose_drafter(self.config, path)

    def _make_core(self, replica: Replica) -> EngineCore:
        """Make the core of a replica whose first worker is ready."""
        index, config = replica.index, self.config
        ready = replica.executor.ready
        assert ready is not None and self._output is not None
        limits = scheduler_config(config, ready, self.speculative.max_drafts, replica.role)
        if self._journals and index == len(self._journals):  # a replica of a worker that has joined
            self._journals += open_journals(config, [index])
        manager = self._journals[index].make_manager(limits) if self._journals else WorkloadManager(limits)
        observers: list[Observer] = [
            *self.metrics.of_replica(index),
            self.history.of_replica(index),
            self._probe.of_replica(),
        ]
        if self.adapters is not None:
            observers.append(self.metrics.adapters)
        if config.kv_offload_memory_bytes is not None:
            observers.append(self.metrics.offloading(index))
        if replica.role is not ReplicaRole.BOTH:
            observers.append(self.metrics.transfers(index))
        for observer in observers:
            observer.worker_ready(None, self._clock())
        return EngineCore(
            config,
            manager,
            replica.executor,
            self._output,
            self._registry,
            observers,
            self._clock,
            self._supervisor,
            index,
        )

    async def _serve(self) -> None:
        self.failure = await self._supervisor.run(self.fail_all, self._fail_request_of)
        self.fail_all(self.failure)  # the server's process exits next

    def _fail_request_of(self, sequence_id: int, error: ServekitError) -> None:
        """Report `error` to the client of a sequence."""
        if self._output is not None and self._registry.output(sequence_id) is not None:
            self.replicas.finish(self._output.fail_request_of(sequence_id, error, self._clock()))

    async def stop(self, graceful: bool = True) -> None:
        """Stop the main loop and the worker, and fail the requests that still run.

        If graceful, the worker may exit by itself before it is killed.
        """
        tasks = [task for task in (*self._prediction_tasks, self._main_loop) if task is not None]
        for task in tasks:
            task.cancel()
        # Errors are collected: the workers, and the process that places them, must be stopped whatever a task met.
        for task, error in zip(tasks, await asyncio.gather(*tasks, return_exceptions=True), strict=True):
            if isinstance(error, Exception):  # and not that it was cancelled
                log.error("%s ended with an error", task.get_name(), exc_info=error)
        self._probe.stop()
        self.fail_all(shutting_down())
        if self._worker_pool is not None:
            await self._worker_pool.stop()
        await self._supervisor.stop(graceful)
        if self._worker_pool is not None:
            await self._worker_pool.stop_placing()
        if self._input_processor is not None:
            await self._input_processor.stop()
        if self._tokenizer is not None:
            self._tokenizer.close()
            await self._tokenizer.wait_closed()
        for journal in self._journals:
            await run_in_daemon_thread(Journal.close, journal)

    def drain(self, admits_requests: bool = False) -> None:
        """Begin to drain: admitted requests continue, and new ones are rejected unless `admits_requests` is set."""
        self._is_draining = True
        self._rejects_requests = not admits_requests
        self.metrics.engine.is_draining = True
        self._supervisor.drain()
        if self._worker_pool is not None:
            self._worker_pool.is_draining = True

    async def wait_until_failed(self) -> None:
        """Return when the main loop has ended by itself, which it does only on failure."""
        if self._main_loop is not None:
            await asyncio.wait([self._main_loop])

    def fail_all(self, error: ServekitError) -> None:
        """Report `error` to the clients of all requests, admitted or still in preparation."""
        if self._registry.outputs:
            log.warning("failing %s: %s", self._registry.describe(), error.message)
        if self._input_processor is not None:
            self._input_processor.cancel_all()
        if self._output is not None:
            self.replicas.finish(self._output.fail_all(error, self._clock()))

    # -- requests -----------------------------------------------------------------------------------------------------

    def reserve(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> QueuePlaces:
        """Take a request's places in the queue. The prompts' contents may still be missing.

        Call this once for each request, before any work for it, and release the places however that ends. A request
        that has them is served even if the server begins to drain meanwhile. Raises WorkerNotReady while requests are
        rejected, QueueFull, or InvalidRequest.
        """
        if self._rejects_requests:
            raise shutting_down()
        if caller.max_answers is not None and request.num_sequences > caller.max_answers:
            raise InvalidRequest(
                f"the request asks for {request.num_sequences} answers (prompts times n, or best_of); one line of a "
                f"batch may ask for {caller.max_answers}; divide it among several lines"
            )
        self._check_outage()
        replicas, preparing = self._running_replicas, self._queue_limits.sequences
        self._queue_limits.check_size(request, caller.tenant)  # a request that never fits is a 400, not a 503
        self._waiting_times.check(caller.tenant, preparing.total, preparing.held(caller.tenant))
        return self._queue_limits.reserve(request, caller.tenant, replicas.num_waiting, replicas.queued, self._clock())

    async def take_places(self, request: GenerationRequest, caller: Caller = ANONYMOUS) -> QueuePlaces:
        """Like `reserve`."""
        return self.reserve(request, caller)

    def _check_outage(self) -> None:
        if self._supervisor.outage is not None:
            raise self._supervisor.outage

    async def submit(
        self, request: GenerationRequest, caller: Caller = ANONYMOUS, places: QueuePlaces | None = None
    ) -> RequestState:
        """Admit all prompts of a request, or none. Raises RequestError or WorkerError.

        `places` are those that `reserve` returned for the request, if it was called. Deadlines count from that call.
        """
        if places is None:
            places = self.reserve(request, caller)
        try:
            prepared = await prepare_in_time(
                self.input_processor, request, caller.tenant, places.arrival_s, self._clock()
            )
            return await self.submit_prepared(self.new_state(request, caller), prepared, places)
        finally:
            places.release()

    async def submit_prepared(
        self, state: RequestState, prepared: list[PreparedPrompt], places: QueuePlaces
    ) -> RequestState:
        """Like `submit`, for prompts that are prepared. The contents of those in the request may be missing.

        `state` is one that `new_state` returned. It gets the sequences.
        """
        request, tenant = state.request, state.caller.tenant
        try:
            self._check_outage()
            replicas = self._running_replicas
            num_tokens = sum(len(prompt.token_ids) * len(prompt.sampling) for prompt in prepared)
            num_waiting, now_s = replicas.num_waiting, self._clock()
            longest = max((len(prompt.token_ids) for prompt in prepared), default=0)
            self._waiting_times.check(tenant, 0, 0, prompt_tokens=longest)
            self._queue_limits.reserve_tokens(places, num_tokens, num_waiting, replicas.queued, now_s)
            state.hold_result(self._reserve_result(tenant, num_logprobs(request, prepared)))
            return await self._admit(state, prepared, places)
        finally:
            places.release()

    def _reserve_result(self, tenant: str, num_values: int) -> Callable[[], None]:
        """Reserve the logprobs of a result. Returns the function that releases them.

        Raises InvalidRequest for more than the tenant may ever hold, and QueueFull for more than it may hold now.
        """
        budget = self._result_budget
        if num_values > budget.max_share(tenant):
            raise InvalidRequest(
                f"the request asks for up to {num_values} logprobs, over all its answers; one tenant may hold "
                f"{budget.max_share(tenant)} of {budget.limit} (max_total_logprobs); lower max_tokens, or ask for "
                "fewer logprobs",
                param="logprobs",
            )
        if num_values and not budget.has_room(tenant, num_values):
            raise QueueFull(
                f"the request asks for up to {num_values} logprobs, and the requests before it may take "
                f"{budget.total}{budget.describe_share(tenant)}; the limit is {budget.limit} (max_total_logprobs). "
                "Please try again later.",
                retry_after_s=RETRY_AFTER_S,
            )
        budget.take(tenant, num_values)
        return lambda: budget.release(tenant, num_values)

    async def _admit(self, state: RequestState, prepared: list[PreparedPrompt], places: QueuePlaces) -> RequestState:
        """Add the request's sequences to workload managers, in slices: a thousand take a tenth of a second.

        Each sequence takes one of the request's places. If the client leaves meanwhile, all of them end. All answers to
        one prompt are added together, and to one replica, because later ones could not share a prompt whose first
        answer has ended.
        """
        num_tokens = 0
        try:
            for prompt in prepared:
                self._add(state, self._commands(state, prompt, places.arrival_s))
                places.release(len(prompt.sampling), len(prompt.token_ids) * len(prompt.sampling))
                num_tokens += len(prompt.token_ids) + TOKENS_PER_ANSWER * len(prompt.sampling)
                if num_tokens >= TOKENS_PER_SLICE:
                    await asyncio.sleep(0)
                    num_tokens = 0
        except BaseException:
            state.abort()
            state.release_result()
            raise
        state.request.mark(TimeCause.ADMISSION)
        return state

    def new_state(self, request: GenerationRequest, caller: Caller, queue: ClientQueue | None = None) -> RequestState:
        """Return the state of a request without sequences. `queue` gets its output; by default a new one."""
        interval = request.stream_interval or self.config.stream_interval
        return RequestState(request, caller, [], queue or ClientQueue(interval), interval, self.abort)

    def _commands(self, state: RequestState, prompt: PreparedPrompt, arrival_s: float) -> list[AddSequence]:
        ids = self._sequence_ids
        of_prompt = prompt.token_ids, prompt.block_hashes, prompt.sampling
        return list(add_commands(state.request, state.caller, *of_prompt, arrival_s, ids))

    def _add(self, state: RequestState, commands: list[AddSequence]) -> None:
        """Add all answers to one prompt to a workload manager, and deliver their tokens from now on."""
        core, caller = self._running_replicas.choose(commands), state.caller
        for command in commands:
            detokenizer = self._make_detokenizer(state.queue, command.sampling)
            sequence, index, is_probe = core.apply(command), len(state.outputs), caller is PROBE_CALLER
            output = SequenceOutput(sequence, index, detokenizer, state.queue, caller.request_id, is_probe)
            state.outputs.append(output)
            core.add(state, output)
        if self._predictions is not None and caller is not PROBE_CALLER:
            self._predictions.admitted(core, state.outputs[-len(commands)].sequence)

    def _make_detokenizer(self, queue: ClientQueue, sampling: SamplingParams) -> Detokenizer:
        """Return the detokenizer of a sequence; one without text, if the reader of its queue makes the text.

        A stop string ends a sequence, so its text is always made here.
        """
        if queue.takes_token_ids and not sampling.stop:
            return NullDetokenizer()
        return self.tokenizer.make_detokenizer(sampling)

    def abort(self, request: RequestState) -> None:
        """End a request early. Does nothing if it has ended."""
        if self._output is not None:
            self.replicas.finish(self._output.abort(request, self._clock()))

    async def abort_request(self, tenant: str, request_id: str) -> int:
        """End the unfinished sequences of a tenant's requests with this id; return how many there were.

        Their clients get the answers as far as they are, with the finish reason `abort`.
        """
        commands: list[Finish] = []
        if self._output is not None:
            for state in self._registry.find(tenant, request_id):
                if state.caller is not PROBE_CALLER:
                    commands += self._output.cancel(state, self._clock())
        self.replicas.finish(commands)
        return len(commands)

    async def _load_adapter(self, request: LoadAdapter) -> AdapterLoaded:
        """Let a worker check an adapter, and each one that has joined, whose machine may not have the files.

        If one that serves cannot read it, it is not loaded. One that waits, or has begun to serve meanwhile, is let go.
        The workers of other replicas read it when a step needs it.
        """
        ready = [replica for replica in self.replicas.all if replica.executor.is_ready]
        first, *others = ready or [self.replicas.all[0]]
        asked = [first.executor.worker]
        answers = [await first.executor.ask(request)]
        for replica in others:
            if replica.is_joined:
                asked.append(replica.executor.worker)
                with contextlib.suppress(WorkerError):  # it is lost; the one that replaces it is checked when it joins
                    answers.append(await replica.executor.ask(request))
        answer = common_answer([answer for answer in answers if isinstance(answer, AdapterLoaded)])
        if self._worker_pool is not None and not answer.refusal:
            await self._worker_pool.check_adapter(replace(request.adapter, fingerprint=answer.fingerprint), asked)
        return answer

    async def _generate_token(self) -> None:
        """Generate one token as for a client, through the waiting queue."""
        request = self.new_state(PROBE_REQUEST, PROBE_CALLER)
        self._add(request, self._commands(request, PROBE_PROMPT, self._clock()))
        try:
            await request.queue.get()
        finally:
            request.abort()
