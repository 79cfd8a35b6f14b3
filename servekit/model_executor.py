"""Start the worker process, carry step plans to it and results back, and notice when it is gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys

import msgspec

from servekit.errors import ConfigError, WorkerError, WorkerLost, WorkerTimeout
from servekit.messages import FromWorker, LoadModel, Shutdown, StepResult, ToWorker, WorkerFailed, WorkerReady
from servekit.queues import MessageReceiver, MessageSender, make_pipe

log = logging.getLogger("servekit")

# How long a worker that was told to stop gets before it is killed. It holds nothing worth waiting for.
STOP_TIMEOUT_S = 2.0

# What the worker's environment gets unless the operator has set it.
WORKER_ENVIRONMENT = {
    # OpenMP's threads (libgomp's, in torch for Linux) spin while they wait for each other: for milliseconds unless told
    # otherwise, and when a neighbour has taken a core away, all of that in vain. Not to spin at all makes a quiet
    # machine pay for every sleep. This many turns, some ten microseconds, is about the pause between two kernels.
    # Measured in one run on two cores, tokens/s of 32 requests to the demo model, alone | beside a busy torch process:
    # spinning 2,101 | 240, never 1,956 | 1,233, this 2,979 | 1,480. To compare: `GOMP_SPINCOUNT=300000 make bench`.
    "GOMP_SPINCOUNT": "3000",
}


class ModelExecutor:
    """One worker process, with fresh queues that live and die with it.

    Call everything from the event loop's thread, `start` from the main one: the worker asks the kernel to die with
    the thread that started it.
    """

    def __init__(self, log_level: str = "info") -> None:
        self._log_level = log_level
        self._is_loaded = False
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: MessageSender[ToWorker] | None = None
        self._results: MessageReceiver[FromWorker] | None = None
        # The worker answers each message once, and few are in flight; more would be garbage.
        self._inbox: asyncio.Queue[FromWorker | WorkerError] = asyncio.Queue(maxsize=64)

    async def start(self, model: LoadModel, timeout_s: float) -> WorkerReady:
        """Spawn the worker and load the model. Raises ConfigError, WorkerLost or WorkerTimeout."""
        self._spawn()
        self.send(model)
        message = await self._receive(timeout_s)
        assert isinstance(message, WorkerReady), f"the worker answered {type(message).__name__} to its first message"
        self._is_loaded = True
        return message

    def send(self, message: ToWorker) -> None:
        """Hand the worker a message. It does not wait: a plan fits in the pipe."""
        assert self._tasks is not None, "the worker was not started"
        # A broken pipe means that the worker is gone; the result queue reports it, once and in one place.
        with contextlib.suppress(BrokenPipeError):
            self._tasks.send(message)

    async def receive(self, timeout_s: float) -> StepResult:
        """The next step's result. Raises WorkerLost or WorkerTimeout."""
        message = await self._receive(timeout_s)
        assert isinstance(message, StepResult), f"the worker answered {type(message).__name__} to a step plan"
        return message

    async def stop(self) -> None:
        """End the worker, kindly and then not."""
        if self._process is None:
            return
        self.send(Shutdown())
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        self._close()
        self._process = None

    def _spawn(self) -> None:
        task_reader, task_writer = make_pipe()
        result_reader, result_writer = make_pipe()
        command = [sys.executable, "-P", "-m", "servekit.worker"]  # -P: a local `workers` folder must not hide ours
        command += ["--task-fd", str(task_reader.fileno()), "--result-fd", str(result_writer.fileno())]
        command += ["--parent-pid", str(os.getpid()), "--log-level", self._log_level]
        self._process = subprocess.Popen(
            command,
            pass_fds=(task_reader.fileno(), result_writer.fileno()),
            stdin=subprocess.DEVNULL,
            env={**WORKER_ENVIRONMENT, **os.environ},
            start_new_session=True,  # a terminal's Ctrl-C is for the server, which tells its workers itself
        )
        # Ours must be the only open ends, or the death of the worker would not read as EOF.
        task_reader.close()
        result_writer.close()
        self._tasks = MessageSender(task_writer)
        self._results = MessageReceiver(result_reader, FromWorker)
        asyncio.get_running_loop().add_reader(result_reader.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        """Something has come: a message, several, or a piece of one."""
        assert self._results is not None
        try:
            for message in self._results.receive_ready():
                self._inbox.put_nowait(message)
        except (EOFError, OSError, ValueError, msgspec.DecodeError) as error:
            self._stop_reading()
            self._inbox.put_nowait(WorkerLost(self._describe_loss(error)))

    def _describe_loss(self, error: Exception) -> str:
        assert self._process is not None
        what = f"closed its result queue ({type(error).__name__})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            what = f"ended (exit code {self._process.wait(timeout=0.05)})"
        if not self._is_loaded:
            return f"the model worker {what} before the model was loaded; its log is above"
        return f"the model worker {what}; its requests were lost, please send them again"

    async def _receive(self, timeout_s: float) -> FromWorker:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._inbox.get()
        except TimeoutError:
            raise WorkerTimeout(f"the model worker did not answer within {timeout_s:g} s") from None
        if isinstance(message, WorkerError):
            raise message
        if isinstance(message, WorkerFailed):
            raise (ConfigError if message.is_config_error else WorkerLost)(message.message)
        return message

    def _stop_reading(self) -> None:
        if self._results is not None:
            asyncio.get_running_loop().remove_reader(self._results.fileno())

    def _close(self) -> None:
        self._stop_reading()
        assert self._tasks is not None and self._results is not None
        self._tasks.close()
        self._results.close()
        self._tasks = self._results = None
