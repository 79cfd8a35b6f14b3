"""Tests of the main loop of one workload manager, with an executor that computes in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import pytest

from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.detokenizer import Detokenizer
from servekit.engine.engine_core import EngineCore
from servekit.engine.live_view import build_live_view
from servekit.engine.output_processor import OutputProcessor
from servekit.engine.request_registry import RequestRegistry
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import RequestCrashesWorker, ServekitError, WorkerError, WorkerLost
from servekit.executor.model_executor import ModelExecutor
from servekit.observability.live_frames import LiveState, LiveWorker
from servekit.observability.metrics import Metrics
from servekit.observability.observer import Observer
from servekit.observability.step_history import StepHistory
from servekit.protocol.messages import StepFailed, StepPlan, StepResult
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.commands import AddSequence, Finish, Operation, Outcome
from servekit.scheduler.sequence import FinishReason
from servekit.scheduler.workload_manager import WorkloadManager
from tests.support.scheduler import add_sequence, make_manager, make_prompt, make_worker, reference


class InlineExecutor:
    """Stands in for ModelExecutor. Steps whose number is in `loses` end with the loss of the worker."""

    def __init__(self, manager: WorkloadManager, loses: Callable[[StepPlan], bool]) -> None:
        self.loss: ServekitError | None = None
        self.cause = "ended"
        self.worker_name = "process 7"
        self.is_leaving = False
        self.num_replacements = 0
        self.fails_with: StepFailed | None = None
        self._manager = manager
        self.loses = loses
        self._worker = make_worker(manager)
        self._plans: deque[StepPlan] = deque()

    def send(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    async def receive(self) -> StepResult | StepFailed:
        await asyncio.sleep(0)
        plan = self._plans.popleft()
        if self.loses(plan):
            self.loss = WorkerLost("the model worker was killed by SIGKILL")
            raise self.loss
        if self.fails_with is not None:
            failed, self.fails_with = self.fails_with, None
            self._worker = make_worker(self._manager)
            self._plans.clear()
            return failed
        return self._worker.execute(plan)

    async def replace(self, on_failed_start: Callable[[str], None]) -> None:
        on_failed_start("attempt 1 of 5: no memory")
        self.num_replacements += 1
        self.loss = None
        self.is_leaving = False
        self._plans.clear()
        self._worker = make_worker(self._manager)

    def mark_left(self) -> ServekitError:
        assert not self._plans
        self.cause = "left"
        self.loss = WorkerLost("the model worker has left")
        return self.loss


class Alone:
    """Stands in for the engine of a lone core."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def core_lost(self, core: EngineCore, loss: WorkerError) -> bool:
        return True

    async def core_ready(self, core: EngineCore) -> None: ...

    def has_other_worker(self, core: EngineCore) -> bool:
        return False

    def finish(self, commands: Iterable[Finish]) -> None:
        for command in commands:
            self._service.manager.apply(command)


class Service:
    """An EngineCore with its parts, and requests whose sequences are made up from their ids."""

    def __init__(
        self, loses: Callable[[StepPlan], bool] = lambda _: False, max_steps_in_flight: int = 1, **settings: Any
    ) -> None:
        self.manager = make_manager(is_reckless=True, max_steps_in_flight=max_steps_in_flight)
        self.executor = InlineExecutor(self.manager, loses)
        self.registry = RequestRegistry()
        self.metrics = Metrics(ServeConfig(), "")
        observers: list[Observer] = [self.metrics.requests, *self.metrics.of_replica(0)]
        self.output = OutputProcessor(self.registry, observers, lambda _: False)
        self.now_s = 0.0
        self.core = EngineCore(
            ServeConfig(**settings),
            self.manager,
            cast(ModelExecutor, self.executor),
            self.output,
            self.registry,
            observers,
            lambda: self.now_s,
            Alone(self),
        )
        self.metrics.watch_scheduler(lambda: [self.core.stats()])
        self._ids = itertools.count()

    def abort(self, request: RequestState) -> None:
        Alone(self).finish(self.output.abort(request, self.now_s))

    def submit(self, n: int = 1, caller: Caller = ANONYMOUS, stop: tuple[str, ...] = (), **fields: Any) -> RequestState:
        queue = ClientQueue()
        outputs: list[SequenceOutput] = []
        for index in range(n):
            sequence_id = next(self._ids)
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=sequence_id)
            prompt = tuple(make_prompt(sequence_id, 5))
            sequence = self.core.apply(
                AddSequence(sequence_id=sequence_id, prompt_token_ids=prompt, sampling=params, **fields)
            )
            detokenizer = Detokenizer(lambda token_id: b"%d " % token_id, stop)
            outputs.append(SequenceOutput(sequence, index, detokenizer, queue, caller.request_id))
        asked = GenerationRequest(prompts=[Prompt("", "prompt")], sampling=Sampling(), n=n, best_of=n)
        state = RequestState(asked, caller, outputs, queue, 1, self.abort)
        for output in outputs:
            self.core.add(state, output)
        return state

    def value(self, name: str, **labels: str) -> float | None:
        labels["model_name"] = "demo"
        found = self.metrics.registry.get_sample_value
        value = found(f"servekit_{name}", labels)
        return found(f"servekit_{name}", {**labels, "replica": "0"}) if value is None else value


@contextlib.asynccontextmanager
async def running(service: Service) -> Any:
    task = asyncio.create_task(service.core.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def read_all(request: RequestState) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    async with asyncio.timeout(60):
        while sum(delta.finish_reason is not None for delta in deltas) < request.num_answers:
            deltas += await request.queue.get()
    return deltas


def assert_at_rest(service: Service) -> None:
    assert not service.registry.outputs and not service.manager.has_work and not service.manager.num_leaked


async def test_tokens_of_the_manager_reach_the_client_as_text() -> None:
    service = Service()
    async with running(service):
        request = service.submit()
        deltas = await read_all(request)
    expected = reference(request.outputs[0].sequence)
    assert [delta.token_id for delta in deltas] == expected
    assert "".join(delta.text for delta in deltas) == "".join(f"{token_id} " for token_id in expected)
    assert service.value("generation_tokens_total") == len(expected)
    assert_at_rest(service)


async def test_a_stop_string_ends_the_sequence_in_the_manager_too() -> None:
    service = Service()
    async with running(service):
        request = service.submit(stop=(" ",))
        deltas = await read_all(request)
        assert request.finish_reasons == [FinishReason.STOP] and len(deltas) == 1
        await read_all(service.submit())
    assert_at_rest(service)


async def test_sequences_continue_token_for_token_after_a_lost_worker(caplog: pytest.LogCaptureFixture) -> None:
    lost_steps = {2, 5}
    service = Service(lambda plan: plan.step_id in lost_steps)
    async with running(service):
        requests = [service.submit() for _ in range(4)]
        for request in requests:
            deltas = await read_all(request)
            assert [delta.token_id for delta in deltas] == reference(request.outputs[0].sequence)
    assert service.executor.num_replacements == 2
    assert service.value("worker_restarts_total", cause="ended") == 2
    assert service.value("worker_restarts_total", cause="no_start") == 2
    assert "replica 0: worker process 7 is lost; resuming 4 sequences" in caplog.text
    assert "replica 0: no worker started: attempt 1 of 5: no memory" in caplog.text
    assert service.value("workers_alive") == 1
    assert_at_rest(service)


async def test_a_worker_that_leaves_answers_its_steps_first_and_no_token_is_computed_for_nothing() -> None:
    """`mark_left` of the executor above checks that no step is in flight."""
    service = Service(max_steps_in_flight=2)
    computed = []

    def leaves(plan: StepPlan) -> bool:
        computed.append(plan.step_id)
        service.executor.is_leaving |= plan.step_id == 2
        return False

    service.executor.loses = leaves
    async with running(service):
        requests = [service.submit() for _ in range(4)]
        for request in requests:
            deltas = await read_all(request)
            assert [delta.token_id for delta in deltas] == reference(request.outputs[0].sequence)
        service.executor.is_leaving = True
        service.core.wake()  # it waits for work
        while service.executor.num_replacements < 2:  # noqa: ASYNC110  # it has no event for that
            await asyncio.sleep(0)
    assert computed == list(range(len(computed)))
    assert service.value("worker_restarts_total", cause="left") == 2
    assert not service.manager.quarantine
    assert_at_rest(service)


async def test_a_request_that_crashes_workers_fails_with_all_its_siblings_and_no_other_request() -> None:
    poison = 1  # the second sequence of the first request
    service = Service()

    def computes_poison(plan: StepPlan) -> bool:
        sequence = service.manager._sequences.get(poison)
        return sequence is not None and any(chunk.slot == sequence.slot for chunk in plan.chunks)

    service.executor.loses = computes_poison
    async with running(service):
        bad, good = service.submit(n=3, caller=Caller(request_id="bad")), service.submit()
        await read_all(good)
        with pytest.raises(RequestCrashesWorker, match="3 times while this request ran"):
            await read_all(bad)
    assert good.finish_reasons == [FinishReason.LENGTH]
    assert service.executor.num_replacements == 3
    assert service.value("num_requests_suspected") == 0, "read at each scrape, so it cannot be out of date"
    assert_at_rest(service)


async def test_after_an_out_of_memory_step_sequences_restart_in_smaller_steps(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    service.executor.fails_with = StepFailed(0, 0, "out of memory in a step of 5 tokens")
    async with running(service):
        request = service.submit()
        deltas = await read_all(request)
    assert [delta.token_id for delta in deltas] == reference(request.outputs[0].sequence)
    limit = service.manager.config.max_num_batched_tokens
    assert f"with at most {limit // 2} tokens a step" in caplog.text
    assert limit // 2 < (service.value("step_token_limit") or 0) < limit, "each step that fits raises it by a token"
    assert service.executor.num_replacements == 0


async def test_an_abort_frees_all_sequences_of_its_request_and_may_be_repeated() -> None:
    service = Service()
    aborted, other = service.submit(n=3), service.submit()
    for _ in range(2):
        aborted.abort()
    assert aborted.finish_reasons == [FinishReason.ABORT] * 3 and len(service.registry.outputs) == 1
    async with running(service):
        assert (await read_all(other))[-1].finish_reason is FinishReason.LENGTH
    assert service.value("request_success_total", finished_reason="abort") == 3
    assert_at_rest(service)


async def test_deadlines_end_sequences_while_no_step_returns() -> None:
    service = Service()
    request = service.submit(deadline_s=0.01)
    service.now_s = 1.0
    assert (await read_all(request))[-1].finish_reason is FinishReason.DEADLINE
    assert_at_rest(service)


async def test_leaked_blocks_are_detected_and_the_scheduler_is_reset(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang ends its process in this case. A service should survive the bug, and its operator should know of it."""
    service = Service()
    leaked = service.manager.kv_cache.pool._free.popleft()
    async with running(service):
        await asyncio.sleep(0)
        assert "KV accounting error: 1 blocks or slots leaked" in caplog.text
        assert service.value("accounting_faults_total") == 1
        assert leaked in service.manager.kv_cache.pool._free
        request = service.submit()
        deltas = await read_all(request)
    assert [delta.token_id for delta in deltas] == reference(request.outputs[0].sequence)
    assert_at_rest(service)


async def test_an_error_in_the_main_loop_is_returned_as_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()

    def fail(self: WorkloadManager, command: Operation[Outcome]) -> Outcome:
        raise RuntimeError("a bug")

    service.submit()
    monkeypatch.setattr(WorkloadManager, "apply", fail)
    assert "the main loop failed: a bug" in (await service.core.run()).message


async def test_only_a_busy_main_loop_without_progress_is_stalled() -> None:
    service = Service(step_timeout=5.0)
    assert not service.core.is_stalled
    service.now_s = 15.0
    assert service.core.is_stalled
    async with running(service):
        await asyncio.sleep(0)
        service.now_s = 1000.0
        assert not service.core.is_stalled, "an idle loop makes no iterations"


def test_metrics_and_live_view_agree() -> None:
    service = Service()
    manager, worker = service.manager, make_worker(service.manager)
    for sequence_id in range(20):
        add_sequence(manager, sequence_id, prompt_length=9)
    plan = manager.plan(0.0)
    assert plan is not None
    manager.commit(worker.execute(plan), 1.0)
    service.now_s = 100.0
    server = LiveState(100.0, "ready", "serving", "demo", "1.2.3", [LiveWorker("serving")])
    state, stats = build_live_view(server, [manager], [], StepHistory()).state, service.core.stats()
    assert (state.num_running, state.num_waiting) == (stats.num_running, stats.num_waiting)
    num_unused = state.num_free_blocks + state.num_cached_blocks
    assert num_unused - manager.kv_cache.pool.num_reserved == stats.num_free_blocks
    assert (state.num_prompt_tokens, state.num_cached_tokens) == (stats.num_prompt_tokens, stats.num_cached_tokens)
    assert state.now_s == stats.now_s == 100.0 and state.prefill_limit == stats.prefill_limit
    assert state.limits is not None and state.limits.num_blocks == stats.num_blocks
