"""Run the processes on an agent's machine: one worker process, or a group of ranks that acts as one worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Protocol

import msgspec

from servekit.errors import ConfigError, ServekitError
from servekit.executor.placement import Placement
from servekit.executor.worker_connection import Question, WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.executor.worker_process import WorkerProcess
from servekit.protocol.frames import FrameCodec
from servekit.protocol.lora import LoadAdapter
from servekit.protocol.messages import (
    HEARTBEAT_S,
    FromWorker,
    Heartbeat,
    ListBlocks,
    Loading,
    LoadModel,
    Shutdown,
    StartProfile,
    StopProfile,
    ToWorker,
    WorkerFailed,
)

OnMessage = Callable[[bytes], None]
OnEnd = Callable[[str], None]


class LocalWorker(Protocol):
    """The processes that execute plans.

    `on_message` gets their encoded messages. `on_end` is called once, with the reason why they ended.
    """

    def send(self, payload: bytes) -> None:
        """Pass on an encoded message of the server. Raises DecodeError if it cannot be read."""

    async def end(self) -> None:
        """End the processes that have not exited."""


def start_local_worker(
    load: LoadModel, placement: Placement, arguments: Sequence[str], on_message: OnMessage, on_end: OnEnd
) -> LocalWorker:
    """Start one process for each part of the model, with these command line arguments, and let them load it.

    Where the ranks are on several machines, `load` is for one of them, and there is one process. They inherit the open
    files that `load` names. Raises OSError.
    """
    if load.num_ranks > 1 and load.local_rank is None:
        return LocalGroup(load, placement, arguments, on_message, on_end)
    return LocalProcess(load, placement, arguments, on_message, on_end)


class LocalProcess:
    """One worker process. Its messages are passed on unchanged; the agent decodes only those that it needs itself."""

    def __init__(
        self, load: LoadModel, placement: Placement, arguments: Sequence[str], on_message: OnMessage, on_end: OnEnd
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._sent, self._received = FrameCodec(), FrameCodec()
        rank = load.local_rank or 0
        arguments = [*arguments, *placement.arguments(rank)]
        self._process = WorkerProcess(arguments, placement.environment(rank), load.kv_transfer_fds)
        self._process.start(self._on_bytes, lambda what: on_end(f"the worker process {what}"))
        self.send(msgspec.msgpack.encode(load))

    def send(self, payload: bytes) -> None:
        self._process.write(*self._sent.encode(payload))

    async def end(self) -> None:
        await self._process.end(is_hung=False)

    def _on_bytes(self, data: bytes) -> None:
        try:
            for payload in self._received.decode(data):
                self._on_message(payload)
        except (ValueError, msgspec.DecodeError) as error:
            self._on_end(f"the worker process sent an invalid message ({error})")


class LocalGroup:
    """A group of ranks. The agent compares their answers, and sends heartbeats for them.

    Whether a rank is silent or has ended is noticed here. How long a step may take is decided by the server.
    """

    def __init__(
        self, load: LoadModel, placement: Placement, arguments: Sequence[str], on_message: OnMessage, on_end: OnEnd
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def start_rank(rank: int, on_rank_lost: Callable[[], None]) -> WorkerConnection:
            of_rank = [*arguments, *placement.arguments(rank)]
            process = WorkerProcess(of_rank, placement.environment(rank), load.kv_transfer_fds)
            return WorkerConnection(process, load.heartbeat_timeout_s, on_rank_lost)

        def on_loss() -> None:  # a rank that cannot be started is reported before there is a group
            loop.call_soon(self._report_loss)

        self._group = WorkerGroup(load.num_ranks, load.num_ranks - load.tensor_parallel_size, start_rank, on_loss)
        self._group.send(load)
        self._start(self._pass_answers(), "answers of the ranks")
        self._start(self._beat(), "heartbeats of the ranks")

    def send(self, payload: bytes) -> None:
        message: ToWorker = msgspec.msgpack.decode(payload, type=ToWorker)
        match message:
            case StartProfile() | StopProfile() | ListBlocks() | LoadAdapter():
                self._start(self._ask(message), "a question to the ranks")
            case Shutdown():
                self._start(self._shut_down(), "end of the ranks")
            case _:
                self._group.send_payload(payload)

    async def end(self) -> None:
        self._is_ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._group.end()

    async def _pass_answers(self) -> None:
        with contextlib.suppress(ServekitError):  # the loss of the group, which `_report_loss` reports
            while True:
                self._send_to_server(await self._group.receive(None))

    async def _beat(self) -> None:
        stage = ""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._group.stage != stage:
                stage = self._group.stage
                self._send_to_server(Loading(stage))
            else:
                self._send_to_server(Heartbeat())

    async def _ask(self, request: Question) -> None:
        """Pass on the answer of the group, which knows which ranks get the question."""
        with contextlib.suppress(ServekitError):
            self._send_to_server(await self._group.ask(request))

    async def _shut_down(self) -> None:
        self._is_ending = True
        await self._group.end(graceful=True)
        self._on_end("the ranks of the worker have exited")

    def _report_loss(self) -> None:
        loss = self._group.loss
        assert loss is not None
        if not self._is_ending:
            is_config_error, is_out_of_memory = isinstance(loss, ConfigError), self._group.cause == "out_of_memory"
            self._send_to_server(WorkerFailed(loss.message, is_config_error, is_out_of_memory))
            self._on_end(f"the ranks of the worker were lost: {loss.message}")

    def _send_to_server(self, message: FromWorker) -> None:
        self._on_message(msgspec.msgpack.encode(message))

    def _start(self, what: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(what, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_end(f"{task.get_name()} failed: {type(error).__name__}: {error}")  # a bug in servekit
