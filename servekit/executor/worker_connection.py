"""Exchange messages with one worker: watch its heartbeats, match answers to requests, and declare it lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.errors import ConfigError, ServekitError, WorkerLost, WorkerTimeout
from servekit.executor.byte_stream import ByteStream
from servekit.protocol.frames import Bytes, FrameCodec
from servekit.protocol.lora import AdapterLoaded, LoadAdapter
from servekit.protocol.messages import (
    HEARTBEAT_S,
    BlocksFetched,
    BlocksListed,
    FetchBlocks,
    FromWorker,
    Heartbeat,
    Leaving,
    ListBlocks,
    Loading,
    Profiled,
    Shutdown,
    StartProfile,
    StopProfile,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from servekit.protocol.prediction import PredictorReady

log = logging.getLogger("servekit")

# Each is answered by one message, while steps are in flight.
Question = StartProfile | StopProfile | LoadAdapter | ListBlocks
Answer = Profiled | AdapterLoaded | BlocksListed

_ANSWERS: dict[type[Struct], type[Struct]] = {LoadAdapter: AdapterLoaded, ListBlocks: BlocksListed}

# How long a worker that was asked to shut down may take before it is ended. It holds no state worth waiting for.
STOP_TIMEOUT_S = 2.0

SLOW_PHASE_FACTOR = 10  # multiplies heartbeat_timeout while the model loads or a profile is written
PROFILE_TIMEOUT_S = 120.0  # to start or stop the profiler, and for a step that waits for either

MAX_PENDING_MESSAGES = 64  # each message answers one of ours, and few are in flight; more is a malfunction


class WorkerConnection:
    """The messages to and from one worker. A lost worker stays lost; the first reason counts.

    Create it and call it on the event loop's thread. `on_loss` is called when the worker is lost, even while no call
    waits for it.
    """

    def __init__(
        self,
        stream: ByteStream,
        heartbeat_timeout_s: float,
        on_loss: Callable[[], None],
        frames: FrameCodec | None = None,
    ) -> None:
        """`stream` is not started yet. Its bytes are `frames`, by default those of a pipe."""
        self.loss: ServekitError | None = None
        self.cause = "other"  # the reason: ended, step_timeout, silence, garbage, failed, out_of_memory, left, other
        self.stage = "starting the worker"
        self.is_leaving = False  # it has asked to be sent no more steps, and to be shut down
        self.on_loss = on_loss  # both may be replaced
        self.on_leaving: Callable[[], None] = lambda: None
        self.on_fetched: Callable[[BlocksFetched], None] = lambda _: None
        self._stream = stream
        self._frames = frames or FrameCodec()
        self.encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder[FromWorker](FromWorker).decode
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._has_sent_message = False
        self._is_ready = False
        self._is_ending = self._is_closed = False
        self._inbox: asyncio.Queue[FromWorker | None] = asyncio.Queue(maxsize=MAX_PENDING_MESSAGES)
        # Requests that are not steps and have no answer yet, oldest first.
        self._requests: deque[tuple[type[Struct], asyncio.Future[Any]]] = deque()  # (type of the answer, future)
        self._num_requests = 0  # since the start
        self._num_silent_ticks = 0
        self._loop = asyncio.get_running_loop()
        self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)
        stream.start(self._on_bytes, self._on_end)

    @property
    def pid(self) -> int | None:
        """The worker's process id, if it is a child of this process."""
        return self._stream.pid

    @property
    def name(self) -> str:
        """The worker's name in log lines: its process id, or where it joined from."""
        return self._stream.name

    # -- calls --------------------------------------------------------------------------------------------------------

    def send(self, message: ToWorker) -> None:
        """Send a message. Does not wait; what cannot be sent at once is sent later."""
        self.send_payload(self.encode(message))

    def send_payload(self, *payload: Bytes) -> None:
        """Send a message that is encoded already. Its parts are not copied, and must not change."""
        if self.loss is None:  # else `receive` and `ask` raise the loss
            self._stream.write(*self._frames.encode(*payload))

    def fetch(self, number: int, addresses: Sequence[str], keys: tuple[bytes, ...]) -> None:
        """Ask its agent to fetch blocks. Does not wait; `on_fetched` gets the answer, unless the worker is lost.

        There is one address, or one for each rank that the agent has.
        """
        self.send_payload(self.encode(FetchBlocks(number, tuple(addresses), keys)))

    async def receive(self, timeout_s: float | None) -> FromWorker:
        """Return the worker's next answer. Raises the loss: WorkerLost, WorkerTimeout, or ConfigError while it loads.

        Without a timeout, only silence and its end are noticed.
        """
        message = None
        if timeout_s is None:
            message = await self._inbox.get()
        elif self.loss is None or not self._inbox.empty():
            num_answered = self._num_requests - len(self._requests)
            self._answer_timer = PauseTolerantTimer(timeout_s, partial(self._on_late_answer, timeout_s, num_answered))
            try:
                message = await self._inbox.get()
            finally:
                self._answer_timer.cancel()
        if message is None:
            assert self.loss is not None
            raise self.loss
        return message

    def _on_late_answer(self, timeout_s: float, num_requests: int) -> None:
        """Declare the worker lost, unless more than `num_requests` requests were sent: then the step waits for them."""
        if self._num_requests > num_requests:
            again = partial(self._on_late_answer, timeout_s, self._num_requests)
            self._answer_timer = PauseTolerantTimer(PROFILE_TIMEOUT_S, again)
        else:
            self.mark_lost(WorkerTimeout(f"the model worker did not answer within {timeout_s:.3g} s"), "step_timeout")

    async def ask(self, request: Question) -> Answer:
        """Send a request and return its answer, also while steps are in flight. Raises the loss like `receive`."""
        if self.loss is not None:
            raise self.loss
        answer: asyncio.Future[Answer] = self._loop.create_future()
        kind = _ANSWERS.get(type(request), Profiled)
        self._requests.append(
            (kind, answer)
        )  # stays in the queue if the caller is cancelled, because the answer still comes
        self._num_requests += 1
        self.send(request)
        what = f"the model worker did not answer {type(request).__name__} within {PROFILE_TIMEOUT_S:g} s"
        timer = PauseTolerantTimer(PROFILE_TIMEOUT_S, lambda: self.mark_lost(WorkerTimeout(what), "step_timeout"))
        try:
            return await answer
        finally:
            timer.cancel()

    async def end(self, graceful: bool = False) -> None:
        """End the worker. If graceful, it is asked to exit first. Idempotent."""
        if self._is_closed:
            return
        self._is_ending = True
        if graceful and self.loss is None:
            self.send(Shutdown())
            await self._stream.wait_ended(STOP_TIMEOUT_S)
        self.mark_lost(WorkerLost("the model worker was stopped"), "other")
        await self._stream.end(is_hung=isinstance(self.loss, WorkerTimeout))
        self._is_closed = True

    def let_go(self) -> None:
        """Send the worker no more steps, and shut it down when it has answered those in flight. Idempotent."""
        if not self.is_leaving:
            self.is_leaving = True
            self.on_leaving()

    def mark_lost(self, error: ServekitError, cause: str) -> None:
        """Declare the worker lost. Only the first reason counts."""
        if self.loss is not None:
            return
        self.loss, self.cause = error, cause
        if self._is_ready and not self._is_ending:  # before it was ready, `receive` reports the loss to the caller
            log.log(logging.INFO if cause == "left" else logging.ERROR, "worker %s: %s", self.name, error.message)
        self._ticker.cancel()
        self._stream.stop()
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(None)  # wakes a waiting `receive`
        for _, answer in self._requests:
            if not answer.done():
                answer.set_exception(error)
        self.on_loss()

    # -- messages, silence and end ------------------------------------------------------------------------------------

    def _on_bytes(self, data: bytes) -> None:
        """Handle what has arrived: any number of messages, or a part of one."""
        try:
            for payload in self._frames.decode(data):
                # Only complete messages count as heartbeats. Single bytes do not.
                self._num_silent_ticks = 0
                self._has_sent_message = True
                self._handle(self._decode(payload))
        except asyncio.QueueFull:
            what = f"sent more than {MAX_PENDING_MESSAGES} messages that no request asked for"
            self.mark_lost(WorkerLost(f"the model worker {what}"), "garbage")
        except (ValueError, msgspec.DecodeError) as error:
            what = f"sent an invalid message ({type(error).__name__}: {error})"
            self.mark_lost(WorkerLost(f"the model worker {what}"), "garbage")

    def _handle(self, message: FromWorker) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Loading):
            self.stage = message.stage
        elif isinstance(message, Leaving):
            self.let_go()
        elif isinstance(message, BlocksFetched):
            self.on_fetched(message)
        elif isinstance(message, WorkerFailed):
            kind = ConfigError if message.is_config_error and not self._is_ready else WorkerLost
            self.mark_lost(kind(message.message), "out_of_memory" if message.is_out_of_memory else "failed")
        elif isinstance(message, Answer):
            if not self._requests or not isinstance(message, self._requests[0][0]):
                raise ValueError(f"a {type(message).__name__} message without a request for it")
            _, answer = self._requests.popleft()
            if not answer.done():
                answer.set_result(message)
        else:
            self._is_ready = self._is_ready or isinstance(message, WorkerReady | PredictorReady)
            self._inbox.put_nowait(message)

    def _on_end(self, what: str) -> None:
        when = "" if self._is_ready else " before the model was loaded; see its log lines"
        self.mark_lost(WorkerLost(f"the model worker {what}{when}"), "ended")

    def _tick(self) -> None:
        """Count the intervals without a message.

        It counts ticks instead of measuring time: if this process itself was stopped for a while, a long time has
        passed although the worker is healthy.
        """
        self._num_silent_ticks += 1
        # Before its first message it imports libraries in its only thread, which has no limit here. While the model
        # loads, a library may hold the interpreter's lock for longer than any step does, and so may torch's profiler.
        limit_s = self._heartbeat_timeout_s * (1 if self._is_ready and not self._requests else SLOW_PHASE_FACTOR)
        if self._has_sent_message and self._num_silent_ticks * HEARTBEAT_S > limit_s:
            what = f"sent no heartbeat for {limit_s:g} s (heartbeat_timeout)"
            self.mark_lost(WorkerTimeout(f"the model worker {what}"), "silence")
        if self.loss is None:
            self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)
