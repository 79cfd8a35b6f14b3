"""Run jobs whose input clients wrote in a process that is killed when a job takes too long, and started again.

Chat templates are programs and grammars can be enormous, so neither is processed in the server's own process. The jobs
of one sandbox run one after the other. Jobs wait in a bounded queue while the process is busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

import msgspec

from servekit.errors import InternalError, InvalidRequest, QueueFull, shutting_down
from servekit.protocol.framing import HEADER_BYTES, add_header, frame_length
from servekit.sandbox.jobs import Done, Job, Outcome, Refused

log = logging.getLogger("servekit")

START_TIMEOUT_S = 60.0  # for imports and for reading a large tokenizer, on a busy machine
MAX_WAITING = 256
MAX_WAIT_S = 10.0
MAX_OUTCOME_BYTES = 64 * 2**20


class _KilledFromOutside(Exception):
    """The process was killed while it worked, but not by this class: by the kernel for memory, or by a person."""


class _OutcomeTooLarge(Exception):
    """The outcome of a job is larger than MAX_OUTCOME_BYTES."""


class Sandbox:
    """One process and its jobs. `arguments` are those of `python -m servekit.sandbox.process`."""

    def __init__(self, arguments: list[str], timeout_s: float, memory_bytes: int) -> None:
        self._arguments = [*arguments, "--memory-bytes", str(memory_bytes), "--parent-pid", str(os.getpid())]
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._spawning: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # held by the job that uses the process
        self._num_waiting = 0
        self._unusable: str | None = None  # why the process can run none of its jobs; None if it can
        self._is_stopped = False

    async def start(self) -> None:
        """Start the process before its first job."""
        async with self._lock:
            await self._ensure_started()

    async def run(self, job: Job, param: str, tenant: str) -> str | bytes:
        """Return the result of a job of a tenant.

        Raises InvalidRequest about `param` if the job's input is invalid, or if the job exceeds its time or memory;
        QueueFull if too many jobs wait.
        """
        try:
            payload = msgspec.msgpack.encode(job)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        await self._acquire()
        try:
            try:
                outcome = await self._execute(payload, param)
            except _KilledFromOutside:  # not because of this job, so try once more
                outcome = await self._execute(payload, param)
        except _KilledFromOutside:
            raise InternalError("the sandbox process was killed twice while it ran a job") from None
        finally:
            self._lock.release()
        if isinstance(outcome, Refused):
            raise InvalidRequest(f"{param}: {outcome.message}", param=param)
        return outcome.text if isinstance(outcome, Done) else outcome.payload

    def cancel_all(self) -> None:
        """Fail waiting and future jobs: the server is shutting down."""
        self._is_stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """Fail all jobs and end the process."""
        self.cancel_all()
        async with self._lock:
            if self._spawning is not None:
                await asyncio.gather(self._spawning, return_exceptions=True)
            await self._kill()

    async def _acquire(self) -> None:
        """Wait until the process is free for the next job. Raises QueueFull."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} chat templates or grammars are queued already. Please try again later.", retry_after_s=1
            )
        self._num_waiting += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._lock.acquire()
        except TimeoutError:
            raise QueueFull(
                f"other chat templates or grammars took longer than {MAX_WAIT_S:g} s. Please try again later.",
                retry_after_s=5,
            ) from None
        finally:
            self._num_waiting -= 1

    async def _execute(self, payload: bytes, param: str) -> Outcome:
        await self._ensure_started()
        if self._unusable is not None:
            raise InvalidRequest(f"{param}: {self._unusable}", param=param, code="not_supported")
        is_answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._write(payload)
                outcome = await self._read()
            is_answered = True
        except TimeoutError:
            raise InvalidRequest(
                f"{param}: not done within {self._timeout_s:g} s (sandbox_timeout); make it simpler", param=param
            ) from None
        except _OutcomeTooLarge:
            raise InvalidRequest(
                f"{param}: the result is larger than {MAX_OUTCOME_BYTES} bytes; make it shorter", param=param
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self._check_running()
            if await self._kill() == -signal.SIGKILL:
                raise _KilledFromOutside from None
            raise InvalidRequest(
                f"{param}: it is nested too deeply, or takes more memory than a request may have "
                "(sandbox_memory_bytes); make it simpler",
                param=param,
            ) from None
        finally:
            if not is_answered:  # also when the caller was cancelled: the next job must not read this job's outcome
                await self._kill()
        return outcome

    async def _ensure_started(self) -> None:
        """Start the process if it is not running.

        Starting is a task of its own: if the job that waits for it is cancelled, the next job uses the process.
        """
        has_exited = self._process is None or self._process.returncode is not None
        if self._spawning is None or (self._spawning.done() and has_exited):
            self._spawning = asyncio.create_task(self._spawn())
            # Retrieve the exception, or asyncio logs it when no job waits for the task.
            self._spawning.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._spawning)

    async def _spawn(self) -> None:
        """Start the process and wait until it is ready, so that the time limit of a job does not include imports."""
        if self._unusable is not None:
            return
        self._check_running()
        command = [sys.executable, "-P", "-m", "servekit.sandbox.process", *self._arguments]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
        )
        is_ready = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                outcome = await self._read()
            is_ready = isinstance(outcome, Done)
            if isinstance(outcome, Refused):
                self._unusable = outcome.message
                log.warning("requests that need this sandbox process will be refused: %s", outcome.message)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, _OutcomeTooLarge) as error:
            self._check_running()
            raise InternalError(f"the sandbox process did not start: {type(error).__name__}") from None
        finally:
            if not is_ready:
                await self._kill()

    def _check_running(self) -> None:
        if self._is_stopped:
            raise shutting_down()

    async def _write(self, payload: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(add_header(payload))
        await self._process.stdin.drain()

    async def _read(self) -> Outcome:
        assert self._process is not None and self._process.stdout is not None
        length = frame_length(await self._process.stdout.readexactly(HEADER_BYTES))
        if not 0 <= length <= MAX_OUTCOME_BYTES:
            raise _OutcomeTooLarge
        outcome: Outcome = _decode(await self._process.stdout.readexactly(length))
        return outcome

    async def _kill(self) -> int | None:
        """End the process; return its exit code if it had exited by itself. Requires the lock."""
        process, self._process = self._process, None
        if process is None:
            return None
        # If its output has ended, it is about to exit; wait for that, because its exit code tells why.
        is_exiting = process.stdout is not None and process.stdout.at_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2 if is_exiting else 0):
                await process.wait()
        exit_code = process.returncode
        if exit_code is None:
            process.kill()
        await process.communicate()  # read its pipes to the end and reap it; after SIGKILL this is immediate
        return exit_code


_decode = msgspec.msgpack.Decoder(Outcome).decode
