"""Run one worker process: start it, exchange messages over two pipes, watch its heartbeats, and end it.

The pipes live exactly as long as the process, so a message of one worker can never be taken for one of its successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from servekit.aio.pause_tolerant_timer import PauseTolerantTimer
from servekit.errors import ConfigError, ServekitError, WorkerLost, WorkerTimeout
from servekit.protocol.child_process import DUMP_SIGNAL
from servekit.protocol.framing import MessageReceiver, MessageSender, make_pipe
from servekit.protocol.messages import (
    HEARTBEAT_S,
    FromWorker,
    Heartbeat,
    Loading,
    Profiled,
    Shutdown,
    StartProfile,
    StopProfile,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)

log = logging.getLogger("servekit")

# How long a worker that was asked to shut down may take before it is killed. It holds no state worth waiting for.
STOP_TIMEOUT_S = 2.0
# Writing the stacks of a hung worker takes milliseconds. After this time it is killed without them.
DUMP_TIMEOUT_S = 0.3
# The kernel ends a killed process at once, unless the process is stuck in a driver.
REAP_TIMEOUT_S = 10.0

SLOW_PHASE_FACTOR = 10  # multiplies heartbeat_timeout while the model loads or a profile is written
PROFILE_TIMEOUT_S = 120.0  # to start or stop the profiler, and for a step that waits behind either

MAX_PENDING_MESSAGES = 64  # each message answers one of ours, and few are in flight; more is a malfunction

# Variables of the worker's environment, unless the operator has set them.
WORKER_ENVIRONMENT = {
    # OpenMP threads (libgomp, in torch for Linux) spin while they wait for each other: by default for milliseconds,
    # which is wasted when another process has taken a core. Without any spinning, an otherwise idle machine pays for
    # a sleep at each barrier. This count, some ten microseconds, is about the pause between two kernels.
    # Measured in one run on two cores, tokens/s of 32 requests to the demo model, alone | beside a busy torch process:
    # spinning 2,101 | 240, never 1,956 | 1,233, this 2,979 | 1,480. To compare: `GOMP_SPINCOUNT=300000 make bench`.
    "GOMP_SPINCOUNT": "3000",
    # Put weights in huge pages (glibc 2.35; other libraries ignore it): a decode step reads all weights, and with small
    # pages also a large page table. A step of the 88 M model for one sequence (`make bench-worker`) takes 8.4 ms, and
    # 9.4 ms without this.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # oneDNN compiles a kernel for each shape of weight and each number of tokens in a step. One takes some 160 KB, and
    # it keeps 1,024 by default. 128 are those of the last 25 sizes of a step. To compile one again takes 0.1 to 0.3 ms;
    # a step of many tokens needs five of them, and takes 20 ms and more.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    # torch's profiler logs its start and end in a format of its own. This level silences it.
    "KINETO_LOG_LEVEL": "6",
}


def worker_environment() -> dict[str, str]:
    """Return the environment of a new worker: this process's, and WORKER_ENVIRONMENT."""
    environment = {**WORKER_ENVIRONMENT, **os.environ}
    # transformers reads the docstrings of its classes, which Python leaves out at level 2 (-OO).
    if environment.get("PYTHONOPTIMIZE", "") not in ("", "0"):
        environment["PYTHONOPTIMIZE"] = "1"
    return environment


class WorkerProcess:
    """One worker process, from its start to its end. A lost worker stays lost; the first reason counts.

    Create it and call it on the event loop's thread, which must be the main thread: the process asks the kernel to be
    killed when the thread that started it ends. `on_loss` is called when it is lost, even while no call waits for it.
    """

    def __init__(self, arguments: list[str], heartbeat_timeout_s: float, on_loss: Callable[[], None]) -> None:
        self.loss: ServekitError | None = None
        self.cause = "other"  # the reason for the loss: ended, step_timeout, silence, garbage, failed, other
        self.stage = "starting the worker"
        self._on_loss = on_loss
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._has_sent_message = False
        self._is_ready = False
        self._inbox: asyncio.Queue[FromWorker | None] = asyncio.Queue(maxsize=MAX_PENDING_MESSAGES)
        # Requests that are not steps and have no answer yet, oldest first.
        self._requests: deque[asyncio.Future[Profiled]] = deque()
        self._num_requests = 0  # since the start
        self._num_silent_ticks = 0
        self._loop = asyncio.get_running_loop()
        self._start(arguments)
        self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)

    def _start(self, arguments: list[str]) -> None:
        task_reader, task_writer = make_pipe()
        result_reader, result_writer = make_pipe()
        command = [
            sys.executable,
            "-P",
            "-m",
            "servekit.worker",
        ]  # -P: a `workers` folder in the current directory must not hide ours
        command += ["--task-fd", str(task_reader.fileno()), "--result-fd", str(result_writer.fileno())]
        command += ["--parent-pid", str(os.getpid()), *arguments]
        self._process = subprocess.Popen(
            command,
            pass_fds=(task_reader.fileno(), result_writer.fileno()),
            stdin=subprocess.DEVNULL,
            env=worker_environment(),
            start_new_session=True,  # Ctrl-C in a terminal must reach the server only, which ends its workers itself
        )
        # Close the worker's ends in this process. Otherwise the worker's death would not show as EOF.
        task_reader.close()
        result_writer.close()
        os.set_blocking(task_writer.fileno(), False)
        os.set_blocking(result_reader.fileno(), False)
        self._tasks = MessageSender[ToWorker](task_writer)
        self._results = MessageReceiver[FromWorker](result_reader, FromWorker)
        self._ended = asyncio.Event()
        self._is_ending = self._is_closed = False
        # The reliable sign of its end: a child that the worker left behind may hold its end of a pipe open.
        self._process_fd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._process_fd, self._on_end)
        self._loop.add_reader(self._results.fileno(), self._on_readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Send a message. What does not fit into the pipe now is sent when there is room."""
        if self.loss is not None:
            return  # `receive` and `ask` raise the loss
        try:
            if not self._tasks.send_ready(message):
                self._loop.add_writer(self._tasks.fileno(), self._on_writable)
        except BrokenPipeError:
            pass  # the process has ended; the result pipe and the pidfd are about to report it

    async def receive(self, timeout_s: float) -> FromWorker:
        """Its next answer. Raises the loss: WorkerLost, WorkerTimeout, or ConfigError before it was ready."""
        message = None
        if self.loss is None or not self._inbox.empty():
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

    async def ask(self, request: StartProfile | StopProfile) -> Profiled:
        """Send a request and return its answer, also while steps are in flight. Raises the loss like `receive`."""
        if self.loss is not None:
            raise self.loss
        answer: asyncio.Future[Profiled] = self._loop.create_future()
        self._requests.append(answer)  # stays in the queue if the caller is cancelled, because the answer still comes
        self._num_requests += 1
        self.send(request)
        what = f"the model worker did not answer {type(request).__name__} within {PROFILE_TIMEOUT_S:g} s"
        timer = PauseTolerantTimer(PROFILE_TIMEOUT_S, lambda: self.mark_lost(WorkerTimeout(what), "step_timeout"))
        try:
            return await answer
        finally:
            timer.cancel()

    async def end(self, graceful: bool = False) -> None:
        """End the process, if it has not exited by itself. A hung worker writes its stacks first. Idempotent."""
        if self._is_closed:
            return
        self._is_ending = True
        if graceful and self.loss is None:
            self.send(Shutdown())
            await self._wait_for_exit(STOP_TIMEOUT_S)
        self.mark_lost(WorkerLost("the model worker was stopped"), "other")
        if isinstance(self.loss, WorkerTimeout) and not self._ended.is_set():
            log.warning(
                "dumping the stacks of worker process %d; no stacks below means it is stopped or blocked in the kernel",
                self.pid,
            )
            self._signal(DUMP_SIGNAL)
            await self._wait_for_exit(DUMP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        if not await self._wait_for_exit(REAP_TIMEOUT_S):
            log.error(
                "worker process %d did not exit within %g s after SIGKILL; its device may hang, check the kernel log",
                self.pid,
                REAP_TIMEOUT_S,
            )
        self._is_closed = True
        self._loop.remove_reader(self._process_fd)
        os.close(self._process_fd)
        self._process.poll()
        self._tasks.close()
        self._results.close()

    async def _wait_for_exit(self, timeout_s: float) -> bool:
        """Wait for the process to exit; returns False if it has not exited by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            self._process.send_signal(number)

    # -- messages, silence and exit -----------------------------------------------------------------------------------

    def _on_writable(self) -> None:
        try:
            is_empty = self._tasks.flush()
        except BrokenPipeError:
            is_empty = True
        if is_empty:
            self._loop.remove_writer(self._tasks.fileno())

    def _on_readable(self) -> bool:
        """Read what has arrived: any number of messages, or a part of one. Returns False if there was nothing."""
        try:
            messages = self._results.receive_ready()
            self._num_silent_ticks = 0
            self._has_sent_message = True
            for message in messages:
                self._handle(message)
            return True
        except BlockingIOError:
            return False
        except (EOFError, OSError) as error:
            self.mark_lost(WorkerLost(f"the model worker {self._describe_exit(error)}"), "ended")
        except asyncio.QueueFull:
            what = f"sent more than {MAX_PENDING_MESSAGES} messages that no request asked for"
            self.mark_lost(WorkerLost(f"the model worker {what}"), "garbage")
        except (ValueError, msgspec.DecodeError) as error:
            what = f"sent an invalid message ({type(error).__name__}: {error})"
            self.mark_lost(WorkerLost(f"the model worker {what}"), "garbage")
        return True

    def _handle(self, message: FromWorker) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Loading):
            self.stage = message.stage
        elif isinstance(message, WorkerFailed):
            kind = ConfigError if message.is_config_error and not self._is_ready else WorkerLost
            self.mark_lost(kind(message.message), "failed")
        elif isinstance(message, Profiled):
            if not self._requests:
                raise ValueError("a Profiled message without a request for it")
            answer = self._requests.popleft()
            if not answer.done():
                answer.set_result(message)
        else:
            self._is_ready = self._is_ready or isinstance(message, WorkerReady)
            self._inbox.put_nowait(message)

    def _on_end(self) -> None:
        """The process has exited. Messages that it sent before still count."""
        self._loop.remove_reader(self._process_fd)
        self._ended.set()
        while self.loss is None and self._on_readable():
            pass  # read to EOF, or until the pipe is empty if a child of the worker holds it open
        self.mark_lost(WorkerLost(f"the model worker {self._describe_exit(None)}"), "ended")

    def _describe_exit(self, error: Exception | None) -> str:
        what = f"closed its result pipe ({type(error).__name__})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=0.05)
            what = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return what if self._is_ready else f"{what} before the model was loaded; see its log lines above"

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

    def mark_lost(self, error: ServekitError, cause: str) -> None:
        """Declare the worker lost. Only the first reason counts."""
        if self.loss is not None:
            return
        self.loss, self.cause = error, cause
        if self._is_ready and not self._is_ending:  # before it was ready, `receive` reports the loss to the caller
            log.error("worker process %d: %s", self.pid, error.message)
        self._ticker.cancel()
        self._loop.remove_reader(self._results.fileno())
        self._loop.remove_writer(self._tasks.fileno())
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(None)  # wakes a waiting `receive`
        for answer in self._requests:
            if not answer.done():
                answer.set_exception(error)
        self._on_loss()


def _signal_name(number: int) -> str:
    """The name of a signal. Real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
