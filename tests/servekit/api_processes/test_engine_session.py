"""What an API process holds in the engine process is freed when a request, or the process, ends.

Both ends of a connection run in this process, in front of an engine that counts and computes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from servekit.api.auth.rate_limits import Limits
from servekit.api_processes import messages as ms
from servekit.api_processes.engine_client import EngineClient, RemoteRequestState
from servekit.api_processes.engine_session import EngineSession, SharedEngine
from servekit.api_processes.frame_connection import FrameConnection
from servekit.api_processes.remote_key_accounts import RemoteKeyAccounts
from servekit.config import ServeConfig
from servekit.engine.adapter_registry import AdapterRegistry
from servekit.engine.caller import Caller
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.detokenizer import Detokenizer
from servekit.engine.input_processor import PreparedPrompt
from servekit.engine.live_view import LiveView
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import InvalidRequest, ModelNotFound, QueueFull, RateLimited, WorkerLost, WorkerNotReady
from servekit.observability.live_frames import LiveState
from servekit.protocol.lora import AdapterLoaded, LoadAdapter
from servekit.protocol.messages import ModelInfo, WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason, Sequence

LIMIT_S = 60
CALLER = Caller("tenant", "id")
TEXTS = [b"one ", b"\xe2\x82", b"\xac", b"two"]


def make_request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(prompts=[Prompt("text", "prompt")], sampling=Sampling(), **fields)


async def check_adapter(request: LoadAdapter) -> AdapterLoaded:
    return AdapterLoaded("it is bad") if "bad" in request.adapter.path else AdapterLoaded(fingerprint="f", rank=8)


class Engine:
    """Counts what is held, and looks like a `LLMEngine` to sessions."""

    def __init__(self, **settings: Any) -> None:
        self.config = ServeConfig(api_processes=2, **settings)
        self.state, self.stage, self.is_healthy = "ready", "serving", True
        self.worker: WorkerReady | None = None
        self.limits: SchedulerConfig | None = None
        self.num_places = self.num_results = self.num_looks = 0
        self.is_full = False
        self.is_ready = self.has_free_slots = True
        self.admits = asyncio.Event()
        self.admits.set()
        self.states: list[RequestState] = []
        self.aborted: list[RequestState] = []
        self.refusals: list[str] = []
        self.http_counters = SimpleNamespace(request_refused=self.refusals.append)
        self.profiling = SimpleNamespace(start=None, stop=None)
        self.adapters: AdapterRegistry | None = None
        if self.config.has_adapters:
            self.adapters = AdapterRegistry(self.config, check_adapter)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        if self.limits is None:
            raise WorkerNotReady("loading")
        return self.limits

    def now(self) -> float:
        return 100.0

    def reserve(self, request: GenerationRequest, caller: Caller) -> Any:
        if self.is_full:
            raise QueueFull("full", retry_after_s=3)
        self.num_places += 1
        return Places(self)

    def new_state(self, request: GenerationRequest, caller: Caller, queue: ClientQueue) -> RequestState:
        return RequestState(request, caller, [], queue, 1, self.aborted.append)

    async def submit_prepared(self, state: RequestState, prompts: list[PreparedPrompt], places: Any) -> RequestState:
        self.num_results += 1
        state.hold_result(self.release_result)
        await self.admits.wait()
        for prompt in prompts:
            for sampling in prompt.sampling:
                sequence = Sequence(len(state.outputs), prompt.token_ids, sampling)
                detokenizer = Detokenizer(lambda _: b"")
                state.outputs.append(SequenceOutput(sequence, len(state.outputs), detokenizer, state.queue))
        self.states.append(state)
        places.release()
        return state

    def release_result(self) -> None:
        self.num_results -= 1

    async def probe_readiness(self) -> bool:
        return self.is_ready

    async def render_metrics(self) -> bytes:
        return b"metrics"

    async def describe(self) -> dict[str, Any]:
        raise KeyError("a mistake")

    async def live_view(self) -> LiveView:
        self.num_looks += 1
        return LiveView(LiveState(self.now(), "ready", "serving", "m", "1", []), (("tenant", "id"), None))


class Places:
    arrival_s = 12.5

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_held = True

    def release(self) -> None:
        self._engine.num_places -= self._is_held
        self._is_held = False


class Processor:
    """Prepares each prompt as two tokens."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop

    async def prepare(self, request: GenerationRequest, tenant: str) -> list[PreparedPrompt]:
        sampling = SamplingParams(max_tokens=9, stop=self._stop)
        return [PreparedPrompt(array("i", [1, 2]), [sampling] * request.best_of)]


class Both:
    """Both ends of a connection."""

    def __init__(self, shared: SharedEngine | None = None, **settings: Any) -> None:
        """With `shared`, it is a further process of the same engine. The settings are those of the engine."""
        self.shared = shared or SharedEngine(cast(Any, Engine(**settings)))
        self.engine = cast(Engine, self.shared.engine)
        self.has_ended = asyncio.Event()
        self.shared.has_api = True
        self.session = EngineSession(self.shared, lambda _: None, self.has_ended.set)

    async def open(self) -> None:
        ours, theirs = socket.socketpair()
        await self.session.open(ours)
        self.connection: FrameConnection[Any] = await FrameConnection.open(
            theirs, ms.FromEngine, lambda message: self.client.receive(message), lambda: None
        )
        self.client = EngineClient(self.engine.config, self.connection.send)
        self.client._input_processor = cast(Any, Processor())
        self.client._tokenizer = cast(Any, SimpleNamespace(make_detokenizer=lambda _: Detokenizer(TEXTS.__getitem__)))
        self.accounts = RemoteKeyAccounts(self.client)

    async def submit(self, **fields: Any) -> RemoteRequestState:
        request = make_request(**fields)
        places = await self.client.take_places(request, CALLER)
        state = await self.client.submit(request, CALLER, places)
        assert isinstance(state, RemoteRequestState)
        return state


@asynccontextmanager
async def opened(shared: SharedEngine | None = None, **settings: Any) -> AsyncIterator[Both]:
    both = Both(shared, **settings)
    await both.open()
    async with asyncio.timeout(LIMIT_S):
        yield both
    both.connection.close()
    await both.has_ended.wait()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_places_are_held_from_the_first_answer_until_they_are_released() -> None:
    async with opened() as both:
        places = await both.client.take_places(make_request(), CALLER)
        assert both.engine.num_places == 1 and places.arrival_s == 12.5
        places.release()
        places.release()
        await until(lambda: both.engine.num_places == 0)
        both.engine.is_full = True
        with pytest.raises(QueueFull, match="full") as refused:
            await both.client.take_places(make_request(), CALLER)
        assert refused.value.retry_after_s == 3
        assert not both.session._requests


async def test_tokens_become_text_in_the_api_process() -> None:
    async with opened() as both:
        state = await both.submit(best_of=2)
        (remote,) = both.engine.states
        for token_id in range(4):
            remote.queue.put(TokenDelta(0, token_id, "", False, FinishReason.LENGTH if token_id == 3 else None))
        remote.queue.put(TokenDelta(1, 1, "", False))
        remote.queue.put(TokenDelta(1, None, "", False, FinishReason.DEADLINE))
        deltas = await state.queue.get()
        assert [(each.index, each.text) for each in deltas] == [
            (0, "one "),
            (0, ""),
            (0, "€"),
            (0, "two"),
            (1, ""),
            (1, "\ufffd"),
        ]
        assert state.finish_reasons == [FinishReason.LENGTH, FinishReason.DEADLINE]
        assert (state.num_prompt_tokens, state.num_generated_tokens) == (2, 5)
        state.abort()
        state.release_result()
        await until(lambda: both.engine.num_results == 0)
        assert not both.session._requests and not both.client._requests


async def test_a_request_whose_client_leaves_has_the_time_of_its_last_token() -> None:
    """A trace shows how long it decoded. The engine's own times come with the first token and with the end."""
    async with opened() as both:
        state = await both.submit()
        times_s = iter((5.0, 6.0, 7.0))
        both.client.now = lambda: next(times_s)  # type: ignore[method-assign]
        for token_id in (0, 3):
            both.engine.states[0].queue.put(TokenDelta(0, token_id, "", False))
            await until(lambda token_id=token_id: state.outputs[0].sequence.num_output_tokens == 1 + bool(token_id))
        assert state.outputs[0].last_token_s == 6.0
        both.engine.states[0].outputs[0].last_token_s = 4.5
        both.engine.states[0].queue.put(TokenDelta(0, 3, "", False, FinishReason.LENGTH))
        await until(lambda: state.finish_reasons == [FinishReason.LENGTH])
        assert state.outputs[0].last_token_s == 4.5


async def test_text_of_requests_with_stop_strings_comes_from_the_engine() -> None:
    async with opened() as both:
        both.client._input_processor = cast(Any, Processor(stop=("x",)))
        state = await both.submit()
        both.engine.states[0].queue.put(TokenDelta(0, 3, "cut", False, FinishReason.STOP, "x"))
        (delta,) = await state.queue.get()
        assert (delta.text, delta.stop_reason) == ("cut", "x")


async def test_an_error_reaches_the_client_after_its_tokens() -> None:
    async with opened() as both:
        state = await both.submit()
        both.engine.states[0].queue.put(TokenDelta(0, 0, "", False))
        both.engine.states[0].queue.fail(WorkerLost("gone"))
        assert [each.text for each in await state.queue.get()] == ["one "]
        with pytest.raises(WorkerLost, match="gone"):
            await state.queue.get()
        assert state.finish_reasons == [FinishReason.ERROR]


async def test_a_client_that_leaves_while_its_request_is_admitted_leaves_nothing_behind() -> None:
    async with opened() as both:
        both.engine.admits.clear()
        submitting = asyncio.create_task(both.submit())
        await until(lambda: both.engine.num_results == 1)
        submitting.cancel()
        await until(lambda: both.engine.num_places == both.engine.num_results == 0)
        await until(lambda: not both.session._tasks)
        assert not both.session._requests and not both.client._requests


async def test_an_aborted_request_ends_in_the_engine_and_delivers_nothing_more() -> None:
    async with opened() as both:
        state = await both.submit()
        state.abort()
        state.abort()
        await until(lambda: len(both.engine.aborted) == 1)
        assert state.finish_reasons == [FinishReason.ABORT]
        both.engine.states[0].queue.put(TokenDelta(0, 0, "", False))
        await both.client.render_metrics()  # its answer comes after the token
        assert state.num_generated_tokens == 0


async def test_all_that_a_process_holds_is_freed_when_it_ends() -> None:
    async with opened() as both:
        await both.client.take_places(make_request(), CALLER)
        await both.submit()
        account = await both.accounts.enter(b"key", Limits(max_concurrent_requests=1))
        assert account.number == 0
        assert both.engine.num_places == both.engine.num_results == 1
        both.connection.close()
        await both.has_ended.wait()
        assert both.engine.num_places == both.engine.num_results == 0
        assert both.engine.aborted == both.engine.states
        both.shared.accounts.admit(b"key", Limits(max_concurrent_requests=1))  # there is room again


async def test_limits_of_a_key_are_counted_over_all_processes() -> None:
    async with opened() as both, opened() as other:
        other.session._shared = both.shared
        limits = Limits(max_concurrent_requests=2, tokens_per_minute=100)
        first = await both.accounts.enter(b"key", limits)
        second = await other.accounts.enter(b"key", limits)
        with pytest.raises(RateLimited, match="2 concurrent requests"):
            await both.accounts.enter(b"key", limits)
        await first.reserve(1, 90, 10)
        with pytest.raises(RateLimited, match="may still take 100"):
            await second.reserve(1, 80, 10)
        first.end()
        first.end()
        await both.client.render_metrics()
        await second.reserve(1, 80, 10)
        await both.accounts.enter(b"key", limits)


# -- adapters ----------------------------------------------------------------------------------------------------------


async def test_an_adapter_that_one_process_loads_is_known_to_all_when_the_call_ends() -> None:
    async with opened(enable_lora=True) as both, opened(both.shared) as other:
        here, there = both.client.adapters, other.client.adapters
        assert here is not None and there is not None
        await here.load("a", "/a")
        assert here.paths == there.paths == {"a": "/a"}
        async with opened(both.shared) as later:
            await later.client.render_metrics()
            assert later.client.adapters is not None and later.client.adapters.paths == {"a": "/a"}
            await there.unload("a")
            assert here.paths == there.paths == later.client.adapters.paths == {}
        with pytest.raises(ModelNotFound, match="no adapter 'a'"):
            await here.unload("a")
        with pytest.raises(InvalidRequest, match="it is bad"):
            await there.load("b", "/bad")
        assert here.paths == there.paths == {}


async def test_places_of_adapters_are_counted_over_all_processes() -> None:
    async with opened(enable_lora=True, max_loras=1) as both, opened(both.shared) as other:
        here, there, registry = both.client.adapters, other.client.adapters, both.engine.adapters
        assert here is not None and there is not None and registry is not None
        for name in ("a", "b"):
            await here.load(name, f"/{name}")
        first = await here.wait_for_use("a", "")
        second = asyncio.create_task(there.wait_for_use("b", ""))
        await until(lambda: registry.usage().num_waiting == 1)
        first.release()
        first.release()
        assert (await second).adapter.name == "b"
        leaving = asyncio.create_task(here.wait_for_use("a", ""))
        await until(lambda: registry.usage().num_waiting == 1)
        leaving.cancel()  # its client
        await until(lambda: registry.usage() == (2, 0, {"b": 1}, ()))
        with pytest.raises(ModelNotFound):
            await here.wait_for_use("c", "")
        assert not both.session._adapter_uses
        other.connection.close()
        await other.has_ended.wait()
        assert registry.usage() == (2, 0, {}, ())


async def test_a_request_has_its_adapter_in_the_engine() -> None:
    async with opened(enable_lora=True) as both:
        assert both.client.adapters is not None
        await both.client.adapters.load("a", "/a")
        use = await both.client.adapters.wait_for_use("a", "")
        await both.submit(adapter=use.adapter)
        await both.submit()
        assert [state.request.adapter for state in both.engine.states] == [use.adapter, None]
        assert use.adapter.fingerprint == "f"


async def test_viewers_of_all_processes_share_a_look_at_the_scheduler() -> None:
    async with opened() as both:
        views = await asyncio.gather(*(both.client.live_view() for _ in range(5)))
        assert both.engine.num_looks == 1 and len(set(map(id, views))) == 1
        assert views[0].state.model_name == "m" and views[0].owners == (("tenant", "id"), None)
        await both.client.live_view()
        assert both.engine.num_looks == 1, "its clock stands still"


async def test_a_mistake_in_an_answer_is_an_internal_error_and_ends_nothing() -> None:
    async with opened() as both:
        with pytest.raises(Exception, match="internal error \\(KeyError\\)"):
            await both.client.describe()
        assert await both.client.render_metrics() == b"metrics"
        assert await both.client.probe_readiness()


async def test_notes_for_the_metrics_are_counted_in_the_engine_process() -> None:
    async with opened() as both:
        both.client.http_counters.request_refused("overloaded")
        await both.client.render_metrics()
        assert both.engine.refusals == ["overloaded"]


async def test_the_worker_is_the_one_that_the_engine_has() -> None:
    async with opened() as both:
        assert both.client.worker is None
        for num_blocks in (4, 8):
            model = ModelInfo("llama", 1, 100, 64, (2, 3), 1.0, 0, 1.0)
            both.engine.worker = WorkerReady(model, "cpu", "float32", num_blocks, 8, 1.0)
            both.session.send(both.shared.status())
            await both.client.render_metrics()
            assert both.client.worker == both.engine.worker


async def test_the_limits_are_those_that_the_engine_has() -> None:
    """They change when a replica is vacated, or when a worker joins."""
    async with opened() as both:
        for num_blocks in (8, 4, 16):
            both.engine.limits = SchedulerConfig(
                num_blocks=num_blocks, block_size=16, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=64
            )
            both.session.send(both.shared.status())
            await both.client.render_metrics()
            assert both.client.scheduler_config == both.engine.limits
        both.engine.limits = None
        both.session.send(both.shared.status())
        await both.client.render_metrics()
        with pytest.raises(WorkerNotReady):
            assert both.client.scheduler_config


async def test_a_failed_probe_comes_with_the_state_that_explains_it() -> None:
    """The periodic status may be a tenth of a second late; then /ready would call a recovering server silent."""
    async with opened() as both:
        both.session.send(both.shared.status())
        assert await both.client.probe_readiness() and both.client.state == "ready"
        both.engine.state, both.engine.is_ready = "recovering", False
        assert not await both.client.probe_readiness()
        assert both.client.state == "recovering"


def test_frames_of_the_live_view_can_be_sent() -> None:
    view = LiveView(LiveState(1.0, "ready", "serving", "m", "1", []), (("a", "b"), None))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=LiveView) == view
