"""Serve one API process in the engine process: its requests, its accounts, and its questions.

An API process is trusted as much as the engine process, because it is the same program. When it ends, its requests and
accounts here are freed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from servekit.api.key_accounts import LocalKeyAccounts, LocalRequestAccount
from servekit.api_processes import messages as ms
from servekit.api_processes.frame_connection import FrameConnection
from servekit.api_processes.outbox import Outbox, RemoteClientQueue
from servekit.engine.adapter_registry import AdapterRegistry, AdapterUse
from servekit.engine.caller import Caller
from servekit.engine.input_processor import PreparedPrompt
from servekit.engine.live_view import LiveView
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.queue_limits import QueuePlaces
from servekit.engine.request_state import RequestState
from servekit.errors import ServekitError, WorkerNotReady
from servekit.protocol.lora import LoraAdapter
from servekit.requests.generation import GenerationRequest
from servekit.scheduler.scheduler_config import SchedulerConfig

log = logging.getLogger("servekit")

KNOWN_TIMEOUT_S, KNOWN_INTERVAL_S = 5.0, 0.002  # of the wait until all API processes know the adapters
LOOK_PERIOD_S = 0.1  # a frame of the live view that is younger serves all API processes

_encode = msgspec.msgpack.Encoder().encode


class SharedEngine:
    """What the sessions of all API processes have in common."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.accounts = LocalKeyAccounts(engine.now)
        self.has_api = False  # whether all API processes have served the loaded model at some time
        self.sessions: set[EngineSession] = set()  # of the API processes that are connected
        self._adapters_version = 0
        self._view: LiveView | None = None
        self._encoded_view = b""
        if engine.adapters is not None:
            engine.adapters.on_change = self._on_adapter

    def status(self) -> ms.EngineStatus:
        """The engine's present state. The server is loading until all API processes are ready."""
        engine = self.engine
        state = engine.state if self.has_api or engine.state != "ready" else "loading"
        limits: SchedulerConfig | None = None
        with contextlib.suppress(ServekitError):  # the engine is not running
            limits = engine.scheduler_config
        return ms.EngineStatus(state, engine.stage, engine.is_healthy, engine.worker, limits, engine.has_free_slots)

    async def probe_readiness(self) -> bool:
        """Whether the engine generates tokens, and all API processes have been able to serve them."""
        return self.has_api and await self.engine.probe_readiness()

    # -- adapters ------------------------------------------------------------------------------------------------------

    def all_adapters(self) -> ms.AdapterChanges | None:
        """Return the adapters that a new API process must know; None if the model supports none."""
        adapters = self.engine.adapters
        return None if adapters is None else ms.AdapterChanges(self._adapters_version, dict(adapters.paths))

    def _on_adapter(self, name: str, path: str | None) -> None:
        """Tell all API processes of an adapter that was loaded or unloaded."""
        self._adapters_version += 1
        loaded, unloaded = ({}, [name]) if path is None else ({name: path}, [])
        for session in self.sessions:
            session.send(ms.AdapterChanges(self._adapters_version, loaded, unloaded))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. Returns when all API processes find it."""
        await self._adapters.load(name, path)
        await self._until_adapters_are_known()

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Returns when no API process finds it any more."""
        await self._adapters.unload(name)
        await self._until_adapters_are_known()

    @property
    def _adapters(self) -> AdapterRegistry:
        assert self.engine.adapters is not None, "an API process knows whether the model takes adapters"
        return self.engine.adapters

    async def _until_adapters_are_known(self) -> None:
        """Wait until all API processes know the present adapters: a client's next request may go to any of them.

        A process that does not answer in time is blocked. When it continues, it reads this message before any later
        one, because messages keep their order.
        """
        version, end_s = self._adapters_version, self.engine.now() + KNOWN_TIMEOUT_S
        while any(each.adapters_version < version for each in self.sessions) and self.engine.now() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(KNOWN_INTERVAL_S)

    async def look(self) -> msgspec.Raw:
        """Return a frame of the live view, encoded. It shows the engine's present state."""
        view, engine = self._view, self.engine
        if view is None or view.state.state != engine.state or engine.now() - view.state.now_s >= LOOK_PERIOD_S:
            self._view = await engine.live_view()
            self._encoded_view = _encode(self._view)
        return msgspec.Raw(self._encoded_view)


class RemoteRequest:
    """A request of an API process, from its places in the queue to the end of its answer."""

    __slots__ = ("caller", "places", "prompts", "request", "state", "submitting")

    def __init__(self, request: GenerationRequest, caller: Caller, places: QueuePlaces) -> None:
        self.request = request
        self.caller = caller
        self.places = places
        self.prompts: list[PreparedPrompt] = []
        self.submitting: asyncio.Task[None] | None = None
        self.state: RequestState | None = None  # set by Submit


class EngineSession:
    """The engine's side of one API process.

    Create it and call `open` on the event loop's thread. `on_end` is called when the process is gone.
    """

    def __init__(self, shared: SharedEngine, on_message: Callable[[Struct], None], on_end: Callable[[], None]) -> None:
        """`on_message` gets the messages that are about the process itself: Alive, Serving and CannotServe."""
        self.num_silent_ticks = 0  # ticks of the caller since the last message
        self.adapters_version = 0  # of the last AdapterChanges that the process knows
        self._shared = shared
        self._engine = shared.engine
        self._on_message = on_message
        self._on_end = on_end
        self._requests: dict[int, RemoteRequest] = {}
        self._accounts: dict[int, LocalRequestAccount] = {}
        self._adapter_uses: dict[int, AdapterUse | asyncio.Task[None]] = {}  # tasks: of those that wait for a place
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection: FrameConnection[Any] | None = None
        self._handlers: dict[type[Struct], Callable[[Any], object]] = {
            ms.Alive: on_message,
            ms.Serving: on_message,
            ms.CannotServe: on_message,
            ms.AdaptersKnown: self._on_adapters_known,
            ms.ReleaseAdapter: self._release_adapter,
            ms.AddPrompt: self._add_prompt,
            ms.Abort: self._abort,
            ms.ReleaseRequest: self._release_request,
            ms.ChargeTokens: self._charge_tokens,
            ms.UncountRequest: self._uncount_request,
            ms.RequestRefused: lambda note: self._engine.http_counters.request_refused(note.code),
            ms.RequestEnded: lambda note: self._engine.http_counters.request_ended(
                note.handler, note.method, note.status
            ),
            ms.EventLoopLag: lambda note: self._engine.server_metrics.server.event_loop_lag.observe(note.lag_s),
            ms.CountRequest: self._count_request,
            ms.ReserveOfKey: self._reserve_of_key,
            ms.ReservePlaces: self._reserve_places,
            ms.Submit: self._submit,
            ms.UseAdapter: self._use_adapter,
            ms.LoadAdapter: lambda question: self._answer_later(
                question, partial(shared.load_adapter, question.name, question.path)
            ),
            ms.UnloadAdapter: lambda question: self._answer_later(
                question, partial(shared.unload_adapter, question.name)
            ),
            ms.AbortRequest: lambda question: self._answer_later(
                question, partial(self._engine.abort_request, question.tenant, question.request_id)
            ),
            ms.ProbeReadiness: lambda question: self._answer_later(question, self._probe_readiness),
            ms.RenderMetrics: lambda question: self._answer_later(question, self._engine.render_metrics),
            ms.DescribeEngine: lambda question: self._answer_later(question, self._engine.describe),
            ms.LookAtScheduler: lambda question: self._answer_later(question, shared.look),
            ms.ProfileStart: lambda question: self._answer_later(question, self._engine.profiling.start),
            ms.ProfileStop: lambda question: self._answer_later(question, self._engine.profiling.stop),
        }

    async def open(self, connected: socket.socket) -> None:
        """Begin to serve the process at the other end of this socket pair."""
        self._connection = await FrameConnection.open(connected, ms.FromApiProcess, self._receive, self._end)
        self._outbox = Outbox(self._connection)
        self._shared.sessions.add(self)
        if (adapters := self._shared.all_adapters()) is not None:
            self.send(adapters)

    def send(self, message: Struct) -> None:
        """Send a message. Ignored when the process is gone."""
        if self._connection is not None:
            self._connection.send(message)

    def close(self) -> None:
        """Close the connection, which ends the process."""
        if self._connection is not None:
            self._connection.close()

    def _receive(self, message: Struct) -> None:
        self.num_silent_ticks = 0
        self._handlers[type(message)](message)

    def _end(self) -> None:
        """Free all that the process held: it is gone."""
        self._connection = None
        self._shared.sessions.discard(self)
        for number in list(self._requests):
            self._release_request(ms.ReleaseRequest(number))
        for use in list(self._adapter_uses):
            self._release_adapter(ms.ReleaseAdapter(use))
        for account in self._accounts.values():
            account.end()
        self._accounts.clear()
        for task in self._tasks:
            task.cancel()
        self._on_end()

    # -- questions -----------------------------------------------------------------------------------------------------

    def _answer(self, question: ms.Question[Any], work: Callable[[], Any]) -> None:
        """Answer a question at once, with what `work` returns or raises."""
        try:
            reply = ms.Reply(question.question_id, msgspec.Raw(_encode(work())))
        except Exception as error:
            reply = _refusal(question, error)
        self.send(reply)

    def _answer_later(self, question: ms.Question[Any], work: Callable[[], Awaitable[Any]]) -> asyncio.Task[None]:
        """Answer a question when `work` has returned or raised."""
        task = asyncio.create_task(self._work(question, work), name=type(question).__name__)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _probe_readiness(self) -> bool:
        """Answer a probe, after the status that explains the answer: /ready reports both."""
        is_ready = await self._shared.probe_readiness()
        self.send(self._shared.status())
        return is_ready

    async def _work(self, question: ms.Question[Any], work: Callable[[], Awaitable[Any]]) -> None:
        try:
            reply = ms.Reply(question.question_id, msgspec.Raw(_encode(await work())))
        except Exception as error:
            reply = _refusal(question, error)
        self.send(reply)

    # -- accounts ------------------------------------------------------------------------------------------------------

    def _count_request(self, question: ms.CountRequest) -> None:
        def enter() -> None:
            self._accounts[question.account] = self._shared.accounts.admit(question.digest, question.limits)

        self._answer(question, enter)

    def _reserve_of_key(self, question: ms.ReserveOfKey) -> None:
        account = self._accounts[question.account]
        self._answer(
            question,
            lambda: account.reserve_now(question.num_sequences, question.max_tokens, question.num_prompt_tokens),
        )

    def _charge_tokens(self, note: ms.ChargeTokens) -> None:
        remote = self._requests.get(note.request)
        if remote is not None and remote.state is not None:
            self._accounts[note.account].charge(remote.state)

    def _uncount_request(self, note: ms.UncountRequest) -> None:
        account = self._accounts.pop(note.account, None)
        if account is not None:
            account.end()

    # -- adapters ------------------------------------------------------------------------------------------------------

    def _on_adapters_known(self, note: ms.AdaptersKnown) -> None:
        self.adapters_version = note.version

    def _use_adapter(self, question: ms.UseAdapter) -> None:
        self._adapter_uses[question.use] = self._answer_later(question, partial(self._wait_for_adapter, question))

    async def _wait_for_adapter(self, question: ms.UseAdapter) -> LoraAdapter:
        adapters = self._engine.adapters
        assert adapters is not None, "an API process knows whether the model takes adapters"
        try:
            use = await adapters.wait_for_use(question.name, question.tenant)
        except BaseException:
            self._adapter_uses.pop(question.use, None)
            raise
        self._adapter_uses[question.use] = use
        return use.adapter

    def _release_adapter(self, note: ms.ReleaseAdapter) -> None:
        use = self._adapter_uses.pop(note.use, None)
        if isinstance(use, asyncio.Task):
            use.cancel()  # releases the place if it was just given
        elif use is not None:
            use.release()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _reserve_places(self, question: ms.ReservePlaces) -> None:
        def reserve() -> float:
            request = question.options.request()
            places = self._engine.reserve(request, question.caller)
            self._requests[question.request] = RemoteRequest(request, question.caller, places)
            return places.arrival_s

        self._answer(question, reserve)

    def _add_prompt(self, note: ms.AddPrompt) -> None:
        remote = self._requests.get(note.request)
        if remote is not None:
            remote.prompts.append(note.prompt())

    def _submit(self, question: ms.Submit) -> None:
        remote = self._requests.get(question.request)
        if remote is None:  # cannot happen, but every question gets an answer
            gone = ms.Failure.of(WorkerNotReady("the request has no places in the queue; send it again"))
            self.send(ms.Reply(question.question_id, failure=gone))
            return
        remote.request = replace(remote.request, adapter=question.adapter)
        queue = RemoteClientQueue(question.request, self._outbox)
        queue.state = remote.state = self._engine.new_state(remote.request, remote.caller, queue)
        prompts, remote.prompts = remote.prompts, []
        work = partial(self._admit, remote.state, prompts, remote.places)
        remote.submitting = self._answer_later(question, work)

    async def _admit(self, state: RequestState, prompts: list[PreparedPrompt], places: QueuePlaces) -> None:
        await self._engine.submit_prepared(state, prompts, places)

    def _abort(self, note: ms.Abort) -> None:
        remote = self._requests.get(note.request)
        if remote is not None and remote.state is not None:
            remote.state.abort()

    def _release_request(self, note: ms.ReleaseRequest) -> None:
        remote = self._requests.pop(note.request, None)
        if remote is None:
            return
        if remote.submitting is not None:
            remote.submitting.cancel()  # releases what it holds; does nothing if it has ended
        remote.places.release()
        if remote.state is not None:
            remote.state.abort()
            remote.state.release_result()


def _refusal(question: ms.Question[Any], error: Exception) -> ms.Reply:
    if not isinstance(error, ServekitError):
        log.error("internal error in the answer to an API process", exc_info=error)
    return ms.Reply(question.question_id, failure=ms.Failure.of(error))
