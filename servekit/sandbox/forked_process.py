"""The server's side of its sandbox processes: start the one that forks, fork others, give them jobs, and end them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from servekit.aio.child_process import ChildProcess
from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.protocol.frames import HEADER_BYTES, frame_length
from servekit.sandbox.jobs import (
    End,
    Ended,
    Fork,
    Forked,
    ForkServerReady,
    FromForkServer,
    Outcome,
    ToForkServer,
)

log = logging.getLogger("servekit")

START_TIMEOUT_S = 60.0  # for imports and for reading a large tokenizer, on a busy machine
STALLED_START_S = 5.0  # without any processor time; longer than a slow disk needs for one file
ANSWER_TIMEOUT_S = 5.0  # forking takes milliseconds; a process that does not answer in this time was stopped
EXIT_WAIT_S = 2.0  # for a process that is exiting
EXIT_POLL_INTERVAL_S = 0.005
MAX_OUTCOME_BYTES = 2**24
MAX_ANSWER_BYTES = 2**16
PIECE_BYTES = 2**18  # read or written at a time, so that the event loop is never held for long
# The niceness of a job in the slow lane: on a shared core it gets a tenth of the time of another process. This holds
# only within a session, because the kernel may give each session an equal share. So all processes of a server are in
# one session (docs/design/sandbox.md).
NICENESS = 10
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError)  # what msgspec's decoders raise
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessLost(Exception):
    """A sandbox process ended or does not answer, and the cause is not its job."""


class OutcomeTooLarge(Exception):
    """The outcome of a job is larger than MAX_OUTCOME_BYTES."""


class ForkedProcess:
    """A process that runs one job after the other. Only `ForkServer` makes and ends them."""

    def __init__(self, pid: int, channel: socket.socket, fork_server: ChildProcess) -> None:
        self.pid = pid
        self.channel = channel
        self.fork_server = fork_server

    async def run(self, pieces: Sequence[bytes | bytearray]) -> Outcome:
        """Run a job that is encoded as these pieces.

        Raises OutcomeTooLarge, EOFError or ConnectionError if the process exits, and ProcessLost if what it sends is
        not an outcome. Then it runs no other job.
        """
        loop = asyncio.get_running_loop()
        num_bytes = sum(map(len, pieces))
        await loop.sock_sendall(self.channel, num_bytes.to_bytes(HEADER_BYTES, "big", signed=True))
        for piece in pieces:
            await loop.sock_sendall(self.channel, piece)
            if len(pieces) > 1:
                await asyncio.sleep(0)
        length = frame_length(await self._read(HEADER_BYTES))
        if not 0 <= length <= MAX_OUTCOME_BYTES:
            raise OutcomeTooLarge
        data = await self._read(length)
        try:
            outcome: Outcome = _decode_outcome(data)
        except UNDECODABLE as error:
            raise ProcessLost(f"it sent {length} bytes that are not an outcome: {error}") from None
        return outcome

    async def _read(self, num_bytes: int) -> bytearray:
        loop, data = asyncio.get_running_loop(), bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            num_read = await loop.sock_recv_into(self.channel, rest[:PIECE_BYTES])
            if num_read == 0:
                raise EOFError
            rest = rest[num_read:]
        return data

    @property
    def is_lost(self) -> bool:
        """Whether the process that forked this one has ended; then this one has ended, too."""
        return self.fork_server.returncode is not None

    def cpu_s(self) -> float:
        """The processor time that the process has used, in steps of a hundredth of a second; 0 if it is gone."""
        return _cpu_s(self.pid)

    def lower_priority(self) -> None:
        """Let the model's worker and jobs in the quick lane go first on a shared core."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.pid, NICENESS)


class ForkServer:
    """The process that forks the others. If it is lost, all of them are lost, and the next fork starts a new one."""

    def __init__(self, arguments: list[str], memory_bytes: int) -> None:
        self._arguments = [*arguments, "--memory-bytes", str(memory_bytes), "--parent-pid", str(os.getpid())]
        self._process: ChildProcess | None = None
        self._control: socket.socket | None = None
        self._lock = asyncio.Lock()  # held by the task that talks to the process
        self._is_stopped = False

    async def start(self) -> None:
        """Start the process if it is not running. Raises ProcessLost, or OSError as `fork` does."""
        async with self._lock:
            await self._ensure_started()

    async def fork(self) -> ForkedProcess:
        """Fork a process for jobs. Raises ProcessLost, or OSError for lack of descriptors, processes or memory."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            async with self._lock:
                await self._ensure_started()
                assert self._process is not None
                answer = await self._ask(Fork(), [theirs.fileno()])
                assert isinstance(answer, Forked)
                return ForkedProcess(answer.pid, ours, self._process)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def end(self, process: ForkedProcess, is_exiting: bool = False) -> int | None:
        """Kill a process. Returns its exit code if it had exited by itself, and otherwise None.

        A process that has closed its channel is exiting. When it has exited, its exit code gives the reason.
        """
        process.channel.close()
        deadline_s = time.monotonic() + (EXIT_WAIT_S if is_exiting else 0.0)
        with contextlib.suppress(ProcessLost):
            while True:
                must_exit = time.monotonic() >= deadline_s
                async with self._lock:
                    if process.fork_server is not self._process:
                        return None  # it was killed with the process that forked it
                    answer = await self._ask(End(process.pid, must_exit), [])
                assert isinstance(answer, Ended)
                if must_exit or answer.exit_code is not None:
                    return answer.exit_code
                await asyncio.sleep(EXIT_POLL_INTERVAL_S)
        return None

    def kill(self) -> None:
        """Kill the process, and with it all that it has forked. It is not started again."""
        self._is_stopped = True
        self._kill()

    async def stop(self) -> None:
        """Kill the process and wait until it has ended."""
        self.kill()
        async with self._lock:
            await self._drop()

    async def _ensure_started(self) -> None:
        """Start the process if none is running. Requires the lock."""
        if self._process is not None and self._process.returncode is None:
            return
        await self._drop()
        if self._is_stopped:
            raise ProcessLost("the server is shutting down")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        command = [sys.executable, "-P", "-m", "servekit.sandbox.fork_server", *self._arguments]
        try:
            # numpy, which transformers imports, would start a thread for each core.
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            self._process = ChildProcess(command, theirs.fileno(), environment)
        finally:
            theirs.close()
        watching = asyncio.create_task(_kill_if_stopped(self._process))
        try:
            answer = await self._receive(START_TIMEOUT_S)
        finally:
            watching.cancel()
        assert isinstance(answer, ForkServerReady)
        for warning in answer.warnings:
            log.warning("the sandbox refuses all requests of one kind (chats or grammars): %s", warning)

    async def _ask(self, request: ToForkServer, descriptors: list[int]) -> FromForkServer:
        """Send a request and return the answer. Requires the lock. Raises ProcessLost."""
        assert self._control is not None
        try:
            socket.send_fds(self._control, [msgspec.msgpack.encode(request)], descriptors)
        except OSError as error:
            await self._drop()
            raise ProcessLost(f"the process that forks sandbox processes has ended: {error}") from None
        return await self._receive(ANSWER_TIMEOUT_S)

    async def _receive(self, timeout_s: float) -> FromForkServer:
        assert self._control is not None
        is_received = False
        try:
            async with pause_tolerant_timeout(timeout_s):
                data = await asyncio.get_running_loop().sock_recv(self._control, MAX_ANSWER_BYTES)
            if not data:
                raise EOFError
            answer: FromForkServer = _decode_answer(data)
            is_received = True
            return answer
        except (TimeoutError, OSError, EOFError, *UNDECODABLE) as error:
            raise ProcessLost(f"the process that forks sandbox processes failed: {type(error).__name__}") from None
        finally:
            if not is_received:  # also if this task was cancelled, because the next answer would belong to this request
                await self._drop()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _drop(self) -> None:
        """Kill the process and reap it. Requires the lock."""
        self._kill()
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            await process.wait()


async def _kill_if_stopped(process: ChildProcess) -> None:
    """Kill a process that gets no processor time while it starts, so that it is started again."""
    last_s = -1.0
    while (used_s := _cpu_s(process.pid)) > last_s:
        last_s = used_s
        await asyncio.sleep(STALLED_START_S)
    process.kill()


def _cpu_s(pid: int) -> float:
    """The processor time that a process has used, in steps of a hundredth of a second; 0 if it is gone."""
    with contextlib.suppress(OSError):
        # The name, in parentheses, may contain blanks. utime and stime are fields 14 and 15 of proc_pid_stat(5).
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return 0.0


_decode_outcome = msgspec.msgpack.Decoder(Outcome).decode
_decode_answer = msgspec.msgpack.Decoder(FromForkServer).decode
