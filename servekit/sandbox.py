"""A process for work that may run away: killed when it takes too long, started again for the next job.

Chat templates are programs and grammars can be enormous, so neither is touched in the server's own process. Jobs of
one sandbox run one after the other; whoever comes while it is busy waits, within a bound.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process

import msgspec

from servekit.errors import InternalError, InvalidRequest, QueueFull
from servekit.sandbox_jobs import Job, Outcome, Refused

log = logging.getLogger("servekit")

START_TIMEOUT_S = 60.0  # importing and reading a large tokenizer, on a busy machine
MAX_WAITING = 256
MAX_ANSWER_BYTES = 64 * 2**20


class Sandbox:
    """One process and its jobs. `arguments` are what `python -m servekit.sandbox_process` is told."""

    def __init__(self, arguments: list[str], timeout_s: float, memory_bytes: int) -> None:
        self._arguments = [*arguments, "--memory-bytes", str(memory_bytes), "--parent-pid", str(os.getpid())]
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._num_waiting = 0

    async def start(self) -> None:
        """Start the process ahead of its first job."""
        async with self._turn:
            await self._spawn()

    async def run(self, job: Job, param: str) -> str:
        """What the job gives. Raises InvalidRequest about `param` if it is refused, or takes too long or too much."""
        if self._num_waiting >= MAX_WAITING:
            raise QueueFull(
                f"{MAX_WAITING} requests wait for their template or grammar already. Please try again later.",
                retry_after_s=1,
            )
        self._num_waiting += 1
        try:
            async with self._turn:
                outcome = await self._ask(job, param)
        finally:
            self._num_waiting -= 1
        if isinstance(outcome, Refused):
            raise InvalidRequest(f"{param}: {outcome.message}", param=param)
        return outcome.text

    async def stop(self) -> None:
        await self._kill()

    async def _ask(self, job: Job, param: str) -> Outcome:
        if self._process is None or self._process.returncode is not None:
            await self._spawn()
        is_answered = False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._write(msgspec.msgpack.encode(job))
                outcome: Outcome = _decode(await self._read())
            is_answered = True
        except TimeoutError:
            raise InvalidRequest(
                f"{param}: not done within {self._timeout_s:g} s (sandbox_timeout); make it simpler", param=param
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise InvalidRequest(
                f"{param}: it is nested too deeply, or takes more memory than a request may have "
                "(sandbox_memory_bytes); make it simpler",
                param=param,
            ) from None
        finally:
            if not is_answered:  # also when the client left: the answer to come would be taken for the next one's
                await self._kill()
        return outcome

    async def _spawn(self) -> None:
        """Start, and wait until it answers: a job's seconds do not count what importing takes."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "servekit.sandbox_process", *self._arguments),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._read()
        except BaseException as error:
            await self._kill()
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError | ConnectionError):
                raise InternalError(f"the sandbox process did not start: {type(error).__name__}") from None
            raise

    async def _write(self, frame: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(len(frame).to_bytes(4, "big") + frame)
        await self._process.stdin.drain()

    async def _read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        length = int.from_bytes(await self._process.stdout.readexactly(4), "big")
        if length > MAX_ANSWER_BYTES:
            raise ConnectionError("the sandbox sends garbage")
        return await self._process.stdout.readexactly(length)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await (
            process.communicate()
        )  # reads to the end of its pipes, and waits for its end, which SIGKILL does not delay


_decode = msgspec.msgpack.Decoder(Outcome).decode
