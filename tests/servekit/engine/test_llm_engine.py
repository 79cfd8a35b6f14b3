"""Tests of the engine that need no worker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from servekit.config import ServeConfig
from servekit.engine.input_processor import PreparedPrompt
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.request_state import RequestState
from servekit.errors import InvalidRequest, QueueFull, WorkerNotReady
from servekit.protocol.messages import TokenLogprobs
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.queued_work import QueuedWork
from tests.support.scheduler import make_manager


async def test_an_engine_that_loads_is_healthy_and_rejects_requests_with_its_stage() -> None:
    engine = LLMEngine(ServeConfig())
    assert engine.state == "loading" and engine.is_healthy
    with pytest.raises(WorkerNotReady, match="not ready to serve: reading the model's configuration"):
        _ = engine.scheduler_config
    engine.fail_all(WorkerNotReady("shutting down"))
    assert (await engine.live_view()).state.state == "loading"


async def test_an_error_of_a_task_does_not_keep_workers_from_being_stopped(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise BrokenPipeError("the process has ended")

    async def note(what: str) -> None:
        stopped.append(what)

    stopped: list[str] = []
    engine = LLMEngine(ServeConfig())
    pool = SimpleNamespace(stop=lambda: note("workers"), stop_placing=lambda: note("placing"))
    engine._worker_pool = cast(Any, pool)
    engine._prediction_tasks.append(asyncio.create_task(fail(), name="worker scaling"))
    await asyncio.sleep(0)
    await engine.stop()
    assert stopped == ["workers", "placing"]
    assert "worker scaling ended with an error" in caplog.text


class StandIns:
    """Stands in for the parts of an engine: requests have a hundred prompts of 500 tokens, and are never computed."""

    outage = None
    taking_cores = ()

    def __init__(self, engine: LLMEngine) -> None:
        self.manager = make_manager(num_blocks=512)
        self.apply = self.manager.apply
        self.max_num_tokens = 0
        engine.replicas = engine._main_loop = engine._tokenizer = engine._input_processor = cast(Any, self)

    @property
    def num_waiting(self) -> int:
        return self.manager.num_waiting

    @property
    def queued(self) -> QueuedWork:
        return self.manager.queued

    def choose(self, _: Any) -> StandIns:
        return self

    async def prepare(self, *_: Any) -> list[PreparedPrompt]:
        return [PreparedPrompt([1] * 500, [SamplingParams(max_tokens=1)]) for _ in range(100)]

    def add(self, *_: Any) -> None:
        self.max_num_tokens = max(self.max_num_tokens, self.manager.queued.total.num_tokens)

    def make_detokenizer(self, _: Any) -> None:
        return None

    def done(self) -> bool:
        return False


async def test_requests_that_come_together_do_not_exceed_the_queue_together() -> None:
    """Sequences are added in slices. Meanwhile other requests come."""
    engine = LLMEngine(ServeConfig(max_num_queued_tokens=60_000))
    parts = StandIns(engine)
    request = GenerationRequest(prompts=[Prompt("a", "prompt")] * 100, sampling=Sampling())
    outcomes = await asyncio.gather(*[engine.submit(request) for _ in range(4)], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RequestState, QueueFull, QueueFull, QueueFull]
    assert parts.max_num_tokens == 50_000


def test_results_of_all_requests_together_are_bounded_and_shared_among_tenants() -> None:
    engine = LLMEngine(ServeConfig(max_total_logprobs=2**22))
    release = engine._reserve_result("a", 2**21)
    engine._reserve_result("a", 0)  # a request without logprobs is admitted always
    with pytest.raises(QueueFull) as refused:
        engine._reserve_result("a", 1)
    assert refused.value.retry_after_s and "max_total_logprobs" in refused.value.message
    engine._reserve_result("b", 2**20)
    release()
    engine._reserve_result("a", 2**20)


def test_a_result_that_can_never_be_admitted_is_invalid() -> None:
    """It would be refused later, too, so the status is not 503."""
    engine = LLMEngine(ServeConfig(max_total_logprobs=2**22))
    with pytest.raises(InvalidRequest, match=f"{2**21 + 1} logprobs.* may hold {2**21} of .*max_total_logprobs"):
        engine._reserve_result("a", 2**21 + 1)
    engine._reserve_result("a", 2**21)
    with pytest.raises(QueueFull):
        engine._reserve_result("", 2**22)


def test_result_is_released_once() -> None:
    engine = LLMEngine(ServeConfig())
    state = RequestState(*[None] * 6)  # type: ignore[call-arg,arg-type]
    state.hold_result(engine._reserve_result("a", 5))
    assert engine._result_budget.total == 5
    state.release_result()
    state.release_result()
    assert engine._result_budget.total == 0


def test_likeliest_tokens_are_packed_exactly() -> None:
    values = [-0.1, -1e-300, float(-(2**60)), -9999.0]
    packed = TokenLogprobs.of(-0.5, [0, 5, 2**31 - 1, 7], values)
    assert packed.top == list(zip([0, 5, 2**31 - 1, 7], values, strict=True)) and len(packed.packed_top) == 48
    with pytest.raises(ValueError, match="multiple of 12"):
        _ = TokenLogprobs(-0.5, b"abc").top
