"""A process for work that may run away: killed when it takes too long, started again for the next job.

Chat templates are programs and grammars can be enormous, so neither is touched in the server's own process. Jobs of
one sandbox run one after the other; whoever comes while it is busy waits, within a bound.
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
from servekit.sandbox_jobs import Done, Job, Outcome, Refused

log = logging.getLogger("servekit")

START_TIMEOUT_S = 60.0  # importing and reading a large tokenizer, on a busy machine
MAX_WAITING = 256
MAX_WAIT_S = 10.0
_LATER = "Please try again later."
MAX_ANSWER_BYTES = 64 * 2**20


class _KilledByOthers(Exception):
    """Somebody ended the process while it worked: the kernel for want of memory, or a person."""


class _TooLong(Exception):
    """The process has more to say than anybody wants to hear."""


class Sandbox:
    """One process and its jobs. `arguments` are what `python -m servekit.sandbox_process` is told."""

    def __init__(self, arguments: list[str], timeout_s: float, memory_bytes: int) -> None:
        self._arguments = [*arguments, "--memory-bytes", str(memory_bytes), "--parent-pid", str(os.getpid())]
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._spawning: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._unusable: str | None = None  # why it can do none of its jobs, if so
        self._is_stopped = False

    async def start(self) -> None:
        """Start the process ahead of its first job."""
        async with self._turn:
            await self._be_started()

    async def run(self, job: Job, param: str) -> str:
        """What the job gives. Raises InvalidRequest about `param` if it is refused, or takes too long or too much."""
        try:
            frame = msgspec.msgpack.encode(job)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{param}: {error}", param=param) from None
        await self._take_turn()
        try:
            try:
                outcome = await self._ask(frame, param)
            except _KilledByOthers:  # not this job's doing; a second time it would be
                outcome = await self._ask(frame, param)
        except _KilledByOthers:
            raise InternalError("the sandbox process was killed twice") from None
        finally:
            self._turn.release()
        if isinstance(outcome, Refused):
            raise InvalidRequest(f"{param}: {outcome.message}", param=param)
        return outcome.text

    def give_up(self) -> None:
        """Tell those who wait for it, and those who come, that the server is going down."""
        self._is_stopped = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End it."""
        self.give_up()
        async with self._turn:
            if self._spawning is not None:
                await asyncio.gather(self._spawning, return_exceptions=True)
            await self._kill()

    async def _take_turn(self) -> None:
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} templates or grammars wait already. {_LATER}", retry_after_s=1)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise QueueFull(f"other templates or grammars take their time. {_LATER}", retry_after_s=5) from None
        finally:
            self._num_waiting -= 1

    async def _ask(self, frame: bytes, param: str) -> Outcome:
        await self._be_started()
        if self._unusable is not None:
            raise InvalidRequest(f"{param}: {self._unusable}", param=param, code="not_supported")
        is_answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._write(frame)
                outcome: Outcome = _decode(await self._read())
            is_answered = True
        except TimeoutError:
            raise InvalidRequest(
                f"{param}: not done within {self._timeout_s:g} s (sandbox_timeout); make it simpler", param=param
            ) from None
        except _TooLong:
            raise InvalidRequest(
                f"{param}: what comes of it is over {MAX_ANSWER_BYTES} bytes; make it shorter", param=param
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            self._check_running()
            if await self._kill() == -signal.SIGKILL:
                raise _KilledByOthers from None
            raise InvalidRequest(
                f"{param}: it is nested too deeply, or takes more memory than a request may have "
                "(sandbox_memory_bytes); make it simpler",
                param=param,
            ) from None
        finally:
            if not is_answered:  # also when the client left: the answer to come would be taken for the next one's
                await self._kill()
        return outcome

    async def _be_started(self) -> None:
        """In a task of its own: a job that is given up meanwhile leaves the process to the next one."""
        has_ended = self._process is None or self._process.returncode is not None
        if self._spawning is None or (self._spawning.done() and has_ended):
            self._spawning = asyncio.create_task(self._spawn())
            self._spawning.add_done_callback(lambda task: task.cancelled() or task.exception())  # if nobody waits
        await asyncio.shield(self._spawning)

    async def _spawn(self) -> None:
        """Start, and wait until it answers: a job's seconds do not count what importing takes."""
        if self._unusable is not None:
            return
        self._check_running()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "servekit.sandbox_process", *self._arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
        )
        is_ready = False
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                outcome: Outcome = _decode(await self._read())
            is_ready = isinstance(outcome, Done)
            if isinstance(outcome, Refused):
                self._unusable = outcome.message
                log.warning("%s", outcome.message)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, _TooLong) as error:
            self._check_running()
            raise InternalError(f"the sandbox process did not start: {type(error).__name__}") from None
        finally:
            if not is_ready:
                await self._kill()

    def _check_running(self) -> None:
        if self._is_stopped:
            raise shutting_down()

    async def _write(self, frame: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(len(frame).to_bytes(4, "big") + frame)
        await self._process.stdin.drain()

    async def _read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        length = int.from_bytes(await self._process.stdout.readexactly(4), "big")
        if length > MAX_ANSWER_BYTES:
            raise _TooLong
        return await self._process.stdout.readexactly(length)

    async def _kill(self) -> int | None:
        """The exit code, if it had ended by itself. Whoever has the turn may: nobody else reads from it then."""
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(TimeoutError):  # its output has ended, so it is about to end, and its way tells why
            async with asyncio.timeout(0.2 if process.stdout is not None and process.stdout.at_eof() else 0):
                await process.wait()
        ended_with = process.returncode
        if ended_with is None:
            process.kill()
        await process.communicate()  # to the end of its pipes, and to its own, which SIGKILL does not delay
        return ended_with


_decode = msgspec.msgpack.Decoder(Outcome).decode
