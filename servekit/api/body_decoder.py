"""Decode request bodies: small ones at once, large ones in a process of their own, so that the event loop stays free.

The process decodes one body after the other, and the tenants take turns. After a body, its tenant pauses for several
times as long as it took: to receive, decode and refuse large bodies without pause would take more than a core. What
waits is bounded by the memory that all bodies may hold together (servekit.api.request_body).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.aio.round_robin_semaphore import RoundRobinSemaphore
from servekit.aio.slices import SLICE_BYTES, integers_of, text_of
from servekit.api.schemas.packed_body import (
    KINDS,
    Conversation,
    DecodeBody,
    Images,
    Long,
    PackedBody,
    Refusal,
    Tensors,
    Text,
    Texts,
    TokenIdLists,
    TokenIds,
    decode_kind,
)
from servekit.errors import ContextTooLong, InvalidRequest, QueueFull, WorkerNotReady, shutting_down
from servekit.protocol.frames import HEADER_BYTES, frame_length
from servekit.requests.inference import Tensor

# Until a body is decoded, including the wait for others and a start of the process on a busy machine.
DECODE_TIMEOUT_S = 60.0
# After a body that took a second, its tenant's next one waits seven. So the large bodies of a tenant take an eighth of
# the time. A chat of 8 MB takes 25 ms, so a tenant may send 40 MB of them a second.
PAUSE_PER_SECOND_S = 7.0
IMAGES_PER_SLICE = 2**10
MAX_ATTEMPTS = 2  # the process may be killed from outside


class BodyDecoder:
    """The process that decodes large bodies. A process that has ended is replaced when the next body comes."""

    def __init__(self, memory_bytes: int) -> None:
        self._arguments = ["--memory-bytes", str(memory_bytes), "--parent-pid", str(os.getpid())]
        self._process: Process | None = None
        self._turns = RoundRobinSemaphore(sys.maxsize, max_per_tenant=1)  # held for a body, and for the pause after it
        self._lock = RoundRobinSemaphore(1)  # held while the process is used
        self._running: asyncio.Task[bytearray] | None = None  # uses the process
        self._is_stopped = False

    async def start(self) -> None:
        """Start the process before the first body needs it: the event loop stands still until it is forked."""
        await self._lock.acquire("")
        try:
            await self._started()
        finally:
            self._lock.release("")

    async def decode(
        self,
        body: bytes | bytearray,
        kinds: Sequence[type[Struct]],
        max_prompt_tokens: int,
        tenant: str,
        *,
        is_answer: bool = False,
    ) -> PackedBody | Refusal:
        """Decode and check a body in the process.

        The answer of another server has no pause after it: the request for it has waited for its own turn.

        Raises QueueFull if that takes too long, and WorkerNotReady if the process fails or the server shuts down.
        """
        job = DecodeBody([kind.__name__ for kind in kinds], max_prompt_tokens, memoryview(b""))
        try:
            async with pause_tolerant_timeout(DECODE_TIMEOUT_S):
                if not is_answer:
                    await self._turns.acquire(tenant)
                try:
                    await self._lock.acquire(tenant)
                except asyncio.CancelledError:
                    if not is_answer:
                        self._turns.release(tenant)
                    raise
                # If the client leaves, its body is decoded all the same, which takes less than a second. Ending the
                # process instead would make the bodies of others wait for the start of a new one.
                self._running = asyncio.create_task(self._run_and_release(job, body, tenant, is_answer))
                self._running.add_done_callback(lambda task: task.cancelled() or task.exception())
                payload = await asyncio.shield(self._running)
        except TimeoutError:
            what = "an answer of the model's server" if is_answer else "a request body"
            raise QueueFull(
                f"{what} of {len(body)} bytes was not decoded within {DECODE_TIMEOUT_S:g} s, because others "
                "were decoded before it; try again later",
                retry_after_s=5,
            ) from None
        result: PackedBody | Refusal = _decode_result(payload)
        return result

    async def stop(self) -> None:
        """Fail all bodies and end the process."""
        self._is_stopped = True
        await self._end()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run_and_release(
        self, job: DecodeBody, body: bytes | bytearray, tenant: str, is_answer: bool
    ) -> bytearray:
        started_s = time.monotonic()
        try:
            async with pause_tolerant_timeout(DECODE_TIMEOUT_S):
                return await self._run(job, body)
        finally:
            self._lock.release(tenant)
            if not is_answer:
                pause_s = PAUSE_PER_SECOND_S * (time.monotonic() - started_s)
                asyncio.get_running_loop().call_later(pause_s, self._turns.release, tenant)

    async def _run(self, job: DecodeBody, body: bytes | bytearray) -> bytearray:
        for _ in range(MAX_ATTEMPTS):
            if self._is_stopped:
                raise shutting_down()
            is_answered = False
            try:
                process = await self._started()
                payload = await _exchange(process, job, body)
                is_answered = True
                return payload
            except (asyncio.IncompleteReadError, OSError):  # it was ended, or could not be started
                continue
            finally:
                if not is_answered:  # also after a timeout: the next body must not get this one's result
                    await self._end()
        raise WorkerNotReady("the process that decodes request bodies ended; please send the request again")

    async def _started(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            command = [sys.executable, "-P", "-m", "servekit.api.body_process", *self._arguments]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                preexec_fn=os.setpgrp,  # Ctrl-C in a terminal must reach the server only
            )
        return self._process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()  # read its pipes to the end and reap it; after SIGKILL this is immediate


async def _exchange(process: Process, job: DecodeBody, body: bytes | bytearray) -> bytearray:
    """Send a job with its body, in slices, and return what comes back."""
    assert process.stdin is not None and process.stdout is not None
    head = msgspec.msgpack.encode(job)
    assert head.endswith(b"\xc4\x00"), "the body, which is empty, comes last"
    head = head[:-2] + b"\xc6" + len(body).to_bytes(4, "big")  # msgpack's byte string of any length
    process.stdin.write((len(head) + len(body)).to_bytes(HEADER_BYTES, "big", signed=True) + head)
    for start in range(0, len(body), 4 * SLICE_BYTES):
        process.stdin.write(body[start : start + 4 * SLICE_BYTES])
        await process.stdin.drain()
    length = frame_length(await process.stdout.readexactly(HEADER_BYTES))
    return await _read_exactly(process.stdout, length)


async def _read_exactly(reader: asyncio.StreamReader, num_bytes: int) -> bytearray:
    """Return so many bytes, which are taken as they come. `readexactly` copies all of them in one piece."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = await reader.read(min(num_bytes - len(data), 4 * SLICE_BYTES))
        if not piece:
            raise asyncio.IncompleteReadError(bytes(data[:1]), num_bytes)
        data += piece
    return data


_decode_result = msgspec.msgpack.Decoder(PackedBody | Refusal).decode


def error_of(refusal: Refusal) -> InvalidRequest | ContextTooLong:
    """Return the error that decoding the body raised."""
    error = ContextTooLong if refusal.is_context_too_long else InvalidRequest
    return error(refusal.message, param=refusal.param, code=refusal.code)


async def unpack(packed: PackedBody) -> tuple[Any, list[dict[str, Any]] | None]:
    """Return the body, and of a chat its messages as templates expect them, which the body then lacks."""
    wanted, conversation = decode_kind(bytes(packed.short), KINDS[packed.kind]), None
    for name, value in packed.long.items():
        if isinstance(value, Conversation):
            conversation = await _conversation(value)
        else:
            setattr(wanted, name, await _value_of(value))
    return wanted, conversation


async def _value_of(value: Long) -> Any:
    match value:
        case Text():
            return await text_of(value.utf8)
        case Texts():
            return [await text_of(part) for part in _parts(value.utf8, await integers_of(value.lengths))]
        case TokenIds():
            return await integers_of(value.int32)
        case TokenIdLists():
            num_bytes = (4 * length for length in await integers_of(value.lengths))
            return [await integers_of(part) for part in _parts(value.int32, num_bytes)]
        case Images(lengths=None):
            return value.ascii
        case Images(lengths=memoryview() as lengths):
            return await _images(value.ascii, await integers_of(lengths))
        case Tensors():
            tensors = msgspec.json.decode(value.heads, type=list[Tensor])
            for tensor, data in zip(tensors, value.data, strict=True):
                tensor.data = Raw(data)
            return tensors
    raise AssertionError(value)


def _parts(data: memoryview, lengths: Iterable[int]) -> Any:
    start = 0
    for length in lengths:
        yield data[start : start + length]
        start += length


async def _images(data: memoryview, lengths: Iterable[int]) -> list[memoryview]:
    images: list[memoryview] = []
    for image in _parts(data, lengths):
        images.append(image)
        if len(images) % IMAGES_PER_SLICE == 0:
            await asyncio.sleep(0)
    return images


async def _conversation(value: Conversation) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for piece in value.pieces:
        messages += msgspec.msgpack.decode(piece)
        await asyncio.sleep(0)
    for index, utf8 in value.long_contents.items():
        messages[index]["content"] = await text_of(utf8)
    return messages
