"""One worker process: its start, its two queues, the signs of life it gives, and its end.

The queues live and die with the process, so nothing of one incarnation can ever be taken for the next one's.
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

import msgspec

from servekit.errors import ConfigError, ServekitError, WorkerLost, WorkerTimeout
from servekit.messages import (
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
from servekit.processes import DUMP_SIGNAL
from servekit.queues import MessageReceiver, MessageSender, make_pipe

log = logging.getLogger("servekit")

# How long a worker that was told to stop gets before it is killed. It holds nothing worth waiting for.
STOP_TIMEOUT_S = 2.0
# Writing the stacks of a worker that hangs takes milliseconds; if it does not come to it, so be it.
DUMP_TIMEOUT_S = 0.3
# The kernel reaps what was killed at once, except out of a driver that is stuck.
REAP_TIMEOUT_S = 10.0

PATIENCE = 10  # times the heartbeat_timeout, while the model loads or a trace is written
PROFILE_TIMEOUT_S = 120.0  # for the profiler's beginning or its end, and for a step that has to wait for either

# What the worker's environment gets unless the operator has set it.
WORKER_ENVIRONMENT = {
    # OpenMP's threads (libgomp's, in torch for Linux) spin while they wait for each other: for milliseconds unless told
    # otherwise, and when a neighbour has taken a core away, all of that in vain. Not to spin at all makes a quiet
    # machine pay for every sleep. This many turns, some ten microseconds, is about the pause between two kernels.
    # Measured in one run on two cores, tokens/s of 32 requests to the demo model, alone | beside a busy torch process:
    # spinning 2,101 | 240, never 1,956 | 1,233, this 2,979 | 1,480. To compare: `GOMP_SPINCOUNT=300000 make bench`.
    "GOMP_SPINCOUNT": "3000",
    # Weights in huge pages (glibc 2.35; others ignore it): a decode step walks through all of them, and through the
    # table of small pages beside. A step of the 88 M model for one sequence (`make bench-worker`): 9.4 ms without, 8.4.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    # torch's profiler says when it begins and ends, in no format of ours; from this level on it says nothing.
    "KINETO_LOG_LEVEL": "6",
}


class WorkerProcess:
    """From its start to its end. Once it is lost it stays lost, for whichever reason came first.

    Make it and call it on the event loop's thread, which must be the main one: the process asks the kernel to die with
    the thread that started it. `on_loss` is called when it is lost, also while nobody reads from it.
    """

    def __init__(self, arguments: list[str], heartbeat_timeout_s: float, on_loss: Callable[[], None]) -> None:
        self.loss: ServekitError | None = None
        self.cause = "other"  # the loss in a word: ended, step_timeout, silence, garbage, failed, other
        self.stage = "starting the worker"
        self._on_loss = on_loss
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._has_spoken = False
        self._is_ready = False
        # Each message is answered once, and few are in flight; a worker that says more has gone mad.
        self._inbox: asyncio.Queue[FromWorker | None] = asyncio.Queue(maxsize=64)
        self._asked: deque[asyncio.Future[Profiled]] = deque()  # questions that are no steps, in the order of answers
        self._num_asked = 0  # ever
        self._num_silent_ticks = 0
        self._loop = asyncio.get_running_loop()
        self._start(arguments)
        self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)

    def _start(self, arguments: list[str]) -> None:
        task_reader, task_writer = make_pipe()
        result_reader, result_writer = make_pipe()
        command = [sys.executable, "-P", "-m", "servekit.worker"]  # -P: a local `workers` folder must not hide ours
        command += ["--task-fd", str(task_reader.fileno()), "--result-fd", str(result_writer.fileno())]
        command += ["--parent-pid", str(os.getpid()), *arguments]
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
        os.set_blocking(task_writer.fileno(), False)
        os.set_blocking(result_reader.fileno(), False)
        self._tasks = MessageSender[ToWorker](task_writer)
        self._results = MessageReceiver[FromWorker](result_reader, FromWorker)
        self._ended = asyncio.Event()
        self._is_ending = self._is_closed = False
        # The kernel's word for it: a queue's end may be held open by a child that the worker left behind.
        self._process_fd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._process_fd, self._on_end)
        self._loop.add_reader(self._results.fileno(), self._on_readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Hand the worker a message; what the pipe does not take now goes when there is room."""
        if self.loss is not None:
            return  # whoever waits for the answer hears of it
        try:
            if not self._tasks.send_ready(message):
                self._loop.add_writer(self._tasks.fileno(), self._on_writable)
        except BrokenPipeError:
            pass  # it is gone; its result queue and the kernel are about to say so

    async def receive(self, timeout_s: float) -> FromWorker:
        """Its next answer. Raises the loss: WorkerLost, WorkerTimeout, or ConfigError before it was ready."""
        message = None
        if self.loss is None or not self._inbox.empty():
            num_answered = self._num_asked - len(self._asked)
            message = await self._next(timeout_s)
            if message is None and self.loss is None and self._num_asked > num_answered:
                message = await self._next(PROFILE_TIMEOUT_S)  # something else came first
        if message is None:
            self.lose(WorkerTimeout(f"the model worker did not answer within {timeout_s:.3g} s"), "step_timeout")
            assert self.loss is not None
            raise self.loss
        return message

    async def _next(self, timeout_s: float) -> FromWorker | None:
        """What it says next, or None if it says nothing, or is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self._inbox.get()
        return None

    async def ask(self, question: StartProfile | StopProfile) -> Profiled:
        """Its answer, while steps may be under way: `receive` never gives it. Raises the loss."""
        if self.loss is not None:
            raise self.loss
        answer = self._loop.create_future()
        self._asked.append(answer)  # also if whoever waits for it goes away: the answer comes all the same
        self._num_asked += 1
        self.send(question)
        try:
            async with asyncio.timeout(PROFILE_TIMEOUT_S):
                profiled: Profiled = await answer
                return profiled
        except TimeoutError:
            what = f"the model worker did not answer {type(question).__name__} within {PROFILE_TIMEOUT_S:g} s"
            self.lose(WorkerTimeout(what), "step_timeout")
            assert self.loss is not None
            raise self.loss from None

    async def end(self, kindly: bool = False) -> None:
        """End it, if it has not ended by itself; its stacks go to the log if it hung. A second time nothing happens."""
        if self._is_closed:
            return
        self._is_ending = True
        if kindly and self.loss is None:
            self.send(Shutdown())
            await self._wait(STOP_TIMEOUT_S)
        self.lose(WorkerLost("the model worker was ended"), "other")
        if isinstance(self.loss, WorkerTimeout) and not self._ended.is_set():
            log.warning("process %d is asked for its stacks; if none follow, it is stopped, or stuck below", self.pid)
            self._signal(DUMP_SIGNAL)
            await self._wait(DUMP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        if not await self._wait(REAP_TIMEOUT_S):
            log.error("process %d was killed and has not ended; its device may be stuck", self.pid)
        self._is_closed = True
        self._loop.remove_reader(self._process_fd)
        os.close(self._process_fd)
        self._process.poll()
        self._tasks.close()
        self._results.close()

    async def _wait(self, timeout_s: float) -> bool:
        """Until it has ended; False if it has not by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    def _signal(self, number: signal.Signals) -> None:
        if not self._ended.is_set():
            self._process.send_signal(number)

    # -- what it says, and that it says nothing -----------------------------------------------------------------------

    def _on_writable(self) -> None:
        try:
            is_empty = self._tasks.flush()
        except BrokenPipeError:
            is_empty = True
        if is_empty:
            self._loop.remove_writer(self._tasks.fileno())

    def _on_readable(self) -> bool:
        """Something has come: a message, several, or a piece of one. False if nothing had, and nothing went wrong."""
        try:
            messages = self._results.receive_ready()
            self._num_silent_ticks = 0
            self._has_spoken = True
            for message in messages:
                self._take_in(message)
            return True
        except BlockingIOError:
            return False
        except (EOFError, OSError) as error:
            self.lose(WorkerLost(f"the model worker {self._way_of_ending(error)}"), "ended")
        except (ValueError, msgspec.DecodeError, asyncio.QueueFull) as error:
            what = f"sent what nobody understands ({type(error).__name__}: {error})"
            self.lose(WorkerLost(f"the model worker {what}"), "garbage")
        return True

    def _take_in(self, message: FromWorker) -> None:
        if isinstance(message, Heartbeat):
            return
        if isinstance(message, Loading):
            self.stage = message.stage
        elif isinstance(message, WorkerFailed):
            kind = ConfigError if message.is_config_error and not self._is_ready else WorkerLost
            self.lose(kind(message.message), "failed")
        elif isinstance(message, Profiled):
            if not self._asked:
                raise ValueError("an answer to no question")
            if not (answer := self._asked.popleft()).done():
                answer.set_result(message)
        else:
            self._is_ready = self._is_ready or isinstance(message, WorkerReady)
            self._inbox.put_nowait(message)

    def _on_end(self) -> None:
        """The process has ended. What it said before counts."""
        self._loop.remove_reader(self._process_fd)
        self._ended.set()
        while self.loss is None and self._on_readable():
            pass  # to the end of the queue, or as far as it goes if somebody else holds it open
        self.lose(WorkerLost(f"the model worker {self._way_of_ending(None)}"), "ended")

    def _way_of_ending(self, error: Exception | None) -> str:
        what = f"closed its result queue ({type(error).__name__})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=0.05)
            what = f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
        return what if self._is_ready else f"{what} before the model was loaded; its log is above"

    def _tick(self) -> None:
        """Count the seconds in which it said nothing.

        Ticks and not time: had this process itself been stopped for a while, there would be silence and no fault.
        """
        self._num_silent_ticks += 1
        # Before its first word it imports, with no thread but one, and may take its time. While it loads, a library may
        # hold the interpreter's lock for longer than any step does, and so may torch's profiler.
        limit_s = self._heartbeat_timeout_s * (1 if self._is_ready and not self._asked else PATIENCE)
        if self._has_spoken and self._num_silent_ticks * HEARTBEAT_S > limit_s:
            what = f"gave no sign of life for {limit_s:g} s (heartbeat_timeout)"
            self.lose(WorkerTimeout(f"the model worker {what}"), "silence")
        if self.loss is None:
            self._ticker = self._loop.call_later(HEARTBEAT_S, self._tick)

    def lose(self, error: ServekitError, cause: str) -> None:
        """Take it for lost, for whatever reason comes first."""
        if self.loss is not None:
            return
        self.loss, self.cause = error, cause
        if self._is_ready and not self._is_ending:  # before it was ready, whoever starts it says so
            log.error("worker process %d: %s", self.pid, error.message)
        self._ticker.cancel()
        self._loop.remove_reader(self._results.fileno())
        self._loop.remove_writer(self._tasks.fileno())
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(None)  # wakes whoever waits for an answer
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(error)
        self._on_loss()


def _name(number: int) -> str:
    """Of a signal; those for real time have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
