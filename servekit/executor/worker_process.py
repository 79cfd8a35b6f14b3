"""Run one worker as a child process: start it, carry bytes through its two pipes, and end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

from servekit.executor.byte_stream import OnBytes, OnEnd
from servekit.protocol.child_process import DUMP_SIGNAL
from servekit.protocol.frames import Bytes
from servekit.protocol.framing import PipeWriter, make_pipe

log = logging.getLogger("servekit")

EMPTY: Mapping[str, str] = MappingProxyType({})

# How much is read at once from the result pipe. `os.read` allocates as much as it may read, even if the pipe has less:
# a megabyte takes 15 µs, because the kernel maps it, and this size takes half a microsecond.
READ_BYTES = 2**16
# Writing the stacks of a hung worker takes milliseconds. After this time it is killed without them.
DUMP_TIMEOUT_S = 0.3
# How long the end of a worker that has closed its pipe may take. The kernel closes the files of a killed process before
# anybody can see that it has ended; between the two are microseconds, and more on a busy machine or beside a GPU.
EXIT_TIMEOUT_S = 1.0
# The kernel ends a killed process at once, unless the process is stuck in a driver.
REAP_TIMEOUT_S = 10.0

# Variables of the worker's environment, unless the operator has set them.
WORKER_ENVIRONMENT = {
    # OpenMP threads (libgomp, in torch for Linux) spin while they wait for each other: by default for milliseconds,
    # which is wasted when another process has taken a core. Without any spinning, an otherwise idle machine pays for
    # a sleep at each barrier. This count, some ten microseconds, is about the pause between two kernels.
    # Measured in one run on two cores, tokens/s of 32 requests to the demo model, alone | next to a busy torch process:
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


def worker_environment(more: Mapping[str, str] = EMPTY) -> dict[str, str]:
    """Return the environment of a new worker: WORKER_ENVIRONMENT and more, and this process's, which comes first."""
    environment = {**WORKER_ENVIRONMENT, **more, **os.environ}
    # transformers reads the docstrings of its classes, which Python leaves out at level 2 (-OO).
    if environment.get("PYTHONOPTIMIZE", "") not in ("", "0"):
        environment["PYTHONOPTIMIZE"] = "1"
    return environment


class WorkerProcess:
    """One worker process, from its start to its end: a `ByteStream` of two pipes.

    Create it and call it on the event loop's thread, which must be the main thread: the process asks the kernel to be
    killed when the thread that started it ends.
    """

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str] = EMPTY, shared_fds: tuple[int, ...] = ()
    ) -> None:
        """Start it, with these variables unless the operator has set them. It inherits `shared_fds`.

        It reads nothing and is not watched before `start`.
        """
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
            pass_fds=(task_reader.fileno(), result_writer.fileno(), *shared_fds),
            stdin=subprocess.DEVNULL,
            env=worker_environment(environment),
            process_group=0,  # Ctrl-C in a terminal must reach the server only, which ends its workers itself
        )
        # Close the worker's ends in this process. Otherwise the worker's death would not show as EOF.
        task_reader.close()
        result_writer.close()
        os.set_blocking(task_writer.fileno(), False)
        os.set_blocking(result_reader.fileno(), False)
        self._tasks = PipeWriter(task_writer)
        self._results = result_reader
        # The reliable sign of its end: a remaining child of the worker may hold its end of a pipe open.
        self._process_fd = os.pidfd_open(self._process.pid)
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_stopped = False
        self._exit_timer: asyncio.TimerHandle | None = None  # set when the result pipe has ended before the process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return f"process {self.pid}"

    def start(self, on_bytes: OnBytes, on_end: OnEnd) -> None:
        self._on_bytes, self._on_end = on_bytes, on_end
        self._loop.add_reader(self._process_fd, self._on_exit)
        self._loop.add_reader(self._results.fileno(), self._on_readable)

    def write(self, *data: Bytes) -> None:
        """Send bytes. What does not fit into the pipe is sent when there is room."""
        if self._is_stopped:
            return
        # A broken pipe means that the process has ended. The result pipe and the pidfd are about to report it.
        with contextlib.suppress(BrokenPipeError):
            if not self._tasks.write_ready(*data):
                self._loop.add_writer(self._tasks.fileno(), self._on_writable)

    def stop(self) -> None:
        self._is_stopped = True
        if self._exit_timer is not None:
            self._exit_timer.cancel()
        self._loop.remove_reader(self._results.fileno())
        self._loop.remove_writer(self._tasks.fileno())

    async def wait_ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def end(self, is_hung: bool) -> None:
        """End the process, if it has not exited by itself. A hung one writes its stacks first."""
        self.stop()
        if is_hung and not self._ended.is_set():
            log.warning(
                "dumping the stacks of worker process %d; no stacks below means it is stopped or blocked in the kernel",
                self.pid,
            )
            self.signal(DUMP_SIGNAL)
            await self.wait_ended(DUMP_TIMEOUT_S)
        self.signal(signal.SIGKILL)
        if not await self.wait_ended(REAP_TIMEOUT_S):
            log.error(
                "worker process %d did not exit within %g s after SIGKILL; its device may hang, check the kernel log",
                self.pid,
                REAP_TIMEOUT_S,
            )
        self._loop.remove_reader(self._process_fd)
        os.close(self._process_fd)
        self._process.poll()
        self._tasks.close()
        self._results.close()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has exited."""
        if not self._ended.is_set():
            self._process.send_signal(number)

    def _on_writable(self) -> None:
        try:
            is_empty = self._tasks.flush()
        except BrokenPipeError:
            is_empty = True
        if is_empty:
            self._loop.remove_writer(self._tasks.fileno())

    def _on_readable(self) -> bool:
        """Deliver what has arrived. Returns False if there was nothing."""
        try:
            data = os.read(self._results.fileno(), READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._on_pipe_end(error)
            return True
        if data:
            self._on_bytes(data)
        else:
            self._on_pipe_end(EOFError())
        return True

    def _on_pipe_end(self, error: Exception) -> None:
        """No more messages will come. The worker has most likely ended, and its process is about to tell how."""
        if self._ended.is_set():
            self._report_end(self._describe_exit())
        else:
            self._loop.remove_reader(self._results.fileno())
            what = f"closed its result pipe ({type(error).__name__})"
            self._exit_timer = self._loop.call_later(EXIT_TIMEOUT_S, self._report_end, what)

    def _on_exit(self) -> None:
        """The process has exited. Messages that it sent before still count."""
        self._loop.remove_reader(self._process_fd)
        self._ended.set()
        while not self._is_stopped and self._on_readable():
            pass  # read to EOF, or until the pipe is empty if a child of the worker holds it open
        self._report_end(self._describe_exit())

    def _report_end(self, what: str) -> None:
        if not self._is_stopped:
            self.stop()
            self._on_end(what)

    def _describe_exit(self) -> str:
        code = self._process.poll()
        if code is None:  # a debugger holds it, and learns its code first
            return "has exited"
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def _signal_name(number: int) -> str:
    """The name of a signal. Real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
