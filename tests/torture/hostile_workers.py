"""What connects to the socket for workers, and is none: strangers without the key, and workers with it that lie.

A stranger must be refused, whatever it sends. A worker with the key is trusted with prompts and tokens, so a wrong
token that could be right is not among the lies: every lie here contradicts the protocol or the plan, and must be
noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Awaitable, Callable

import msgspec
from msgspec.structs import replace

from servekit import __version__
from servekit.joining.socket_stream import SocketStream
from servekit.protocol.frames import HEADER_BYTES, add_header
from servekit.protocol.handshake import HandshakeFailed, Offer, WorkerHandshake
from servekit.protocol.messages import (
    FromWorker,
    Heartbeat,
    LoadModel,
    Profiled,
    PromptLogprobs,
    Shutdown,
    StepPlan,
    StepResult,
    TokenLogprobs,
    ToWorker,
    WorkerReady,
)
from servekit.protocol.sealed_frames import MAC_BYTES
from tests.torture.joined_workers import KEY
from workers.runner.simulated_runner import SimulatedRunner, load

STRANGER, LIAR, RECORDED = "stranger", "liar", "recorded"  # the hosts that they name, which the server logs
ENOUGH_S = 60.0  # for what the server should do at once
BEAT_S = 1.0

Read = asyncio.StreamReader
Address = tuple[str, int]


async def connect(address: Address, from_host: str = "127.0.0.2") -> tuple[Read, asyncio.StreamWriter]:
    return await asyncio.open_connection(*address, local_addr=(from_host, 0))


async def closed_within(reader: Read, timeout_s: float) -> bool:
    """Read until the server closes the connection; return whether it does."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(timeout_s):
            while await reader.read(2**16):
                pass
            return True
    return reader.exception() is not None or reader.at_eof()


# -- strangers --------------------------------------------------------------------------------------------------------
# Each returns whether the server refused it: it closed the connection, and did not accept the handshake.


def _handshake(key: bytes, host: str) -> WorkerHandshake:
    return WorkerHandshake(key, os.urandom(32), Offer(host, "cpu", __version__, "", os.getpid()))


async def _wrong_key(address: Address, chance: random.Random, recorded: list[bytes]) -> bool:
    reader, writer = await connect(address)
    stream = SocketStream(reader, writer, "wrong key")
    handshake = _handshake(chance.randbytes(32), STRANGER)
    frame: bytes | None = handshake.hello()
    try:
        async with asyncio.timeout(ENOUGH_S):
            while frame is not None:
                stream.write_frame(frame)
                frame = handshake.receive(await stream.read_frame())
    except HandshakeFailed as error:
        return error.reason == "wrong_key"
    except (EOFError, OSError):
        return True  # it was the oldest of too many connections
    finally:
        await stream.end()
    return False


async def _send_and_wait(address: Address, data: bytes, timeout_s: float = ENOUGH_S) -> bool:
    reader, writer = await connect(address)
    try:
        writer.write(data)
        return await closed_within(reader, timeout_s)
    finally:
        writer.transport.abort()


async def _garbage(address: Address, chance: random.Random, recorded: list[bytes]) -> bool:
    data = chance.randbytes(chance.randrange(1, 6000))
    kinds = [
        data,
        add_header(data[:4000]),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
        (2**30).to_bytes(4, "big") + data,
        b"\xff\xff\xff\xff" + data,
        add_header(msgspec.msgpack.encode({"type": "step_result", "epoch": 0, "step_id": 0, "token_ids": [1]})),
    ]
    return await _send_and_wait(address, chance.choice(kinds))


async def _replay(address: Address, chance: random.Random, recorded: list[bytes]) -> bool:
    """Send all that a worker once sent, its messages after the handshake, too; or parts of it."""
    if not recorded:
        return True
    stream = chance.choice(recorded)
    return await _send_and_wait(address, stream if chance.random() < 0.7 else stream[: chance.randrange(len(stream))])


async def _altered_replay(address: Address, chance: random.Random, recorded: list[bytes]) -> bool:
    if not recorded:
        return True
    stream = bytearray(chance.choice(recorded))
    for _ in range(chance.randrange(1, 4)):
        stream[chance.randrange(len(stream))] ^= 1 << chance.randrange(8)
    return await _send_and_wait(address, bytes(stream))


async def _reflected(address: Address, chance: random.Random, recorded: list[bytes]) -> bool:
    """Send back what the server sends."""
    handshake = _handshake(chance.randbytes(32), STRANGER)
    reader, writer = await connect(address)
    try:
        writer.write(add_header(handshake.hello()))
        async with asyncio.timeout(ENOUGH_S):
            while data := await reader.read(2**16):
                writer.write(data)
        return True
    except TimeoutError:
        return False
    except OSError:
        return True  # it has closed the connection before all was read
    finally:
        writer.transport.abort()


async def _half_open(address: Address, chance: random.Random, recorded: list[bytes]) -> bool:
    """Open 20 connections that send little or nothing, and hold them for a while."""
    opened = []
    try:
        for _ in range(20):
            with contextlib.suppress(OSError):
                reader, writer = await connect(address, chance.choice(["127.0.0.1", "127.0.0.2", "127.0.0.3"]))
                writer.write(add_header(_handshake(KEY, STRANGER).hello())[: chance.choice([0, 2, 10, 40])])
                opened.append((reader, writer))
        await asyncio.sleep(chance.uniform(0, 12))
        return True
    finally:
        for _, writer in opened:
            writer.transport.abort()


STRANGERS: dict[str, Callable[[Address, random.Random, list[bytes]], Awaitable[bool]]] = {
    "wrong key": _wrong_key,
    "garbage": _garbage,
    "replayed handshake": _replay,
    "replayed handshake, altered": _altered_replay,
    "reflected messages": _reflected,
    "20 half-open connections": _half_open,
}


# -- workers with the key ---------------------------------------------------------------------------------------------


class Insider:
    """A worker with the key, in this process, whose device is simulated. It can send anything at any time."""

    def __init__(self, stream: SocketStream, handshake: WorkerHandshake, sent: bytes) -> None:
        self.sent = bytearray(sent)  # all bytes
        self.closed = asyncio.Event()
        self.plans: asyncio.Queue[StepPlan] = asyncio.Queue()
        self._stream = stream
        self._frames = handshake.sealed_frames()
        self._runner: SimulatedRunner | None = None
        self.ready: WorkerReady | None = None
        self._beating: asyncio.Task[None] | None = None
        stream.start(self._on_bytes, lambda _: self.closed.set())

    @classmethod
    async def join(cls, address: Address, host: str) -> Insider:
        """Join with the key. Raises HandshakeFailed, OSError, EOFError or TimeoutError."""
        reader, writer = await connect(address, "127.0.0.4")
        stream = SocketStream(reader, writer, host)
        handshake, sent = _handshake(KEY, host), bytearray()
        frame: bytes | None = handshake.hello()
        try:
            async with asyncio.timeout(ENOUGH_S):
                while frame is not None:
                    sent += add_header(frame)
                    stream.write_frame(frame)
                    frame = handshake.receive(await stream.read_frame())
        except BaseException:
            await stream.end()
            raise
        return cls(stream, handshake, bytes(sent))

    def _on_bytes(self, data: bytes) -> None:
        for payload in self._frames.decode(data):
            message: ToWorker = msgspec.msgpack.decode(payload, type=ToWorker)
            if isinstance(message, LoadModel):
                self._load(message)
            elif isinstance(message, StepPlan):
                self.plans.put_nowait(message)
            elif isinstance(message, Shutdown):
                self.closed.set()

    def _load(self, message: LoadModel) -> None:
        self._runner, ready = load(replace(message, model_path="sim:instant"), lambda stage: None)
        self.ready = replace(ready, model=replace(ready.model, fingerprint=message.model_path))
        self.send(self.ready)
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.send(Heartbeat())

    def stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    def answer(self, plan: StepPlan) -> StepResult:
        """The right answer."""
        assert self._runner is not None
        return self._runner.launch(plan.unpack_grammars()).finish()

    def send(self, message: FromWorker) -> None:
        self.send_payload(msgspec.msgpack.encode(message))

    def send_payload(self, payload: bytes) -> None:
        self.write(self.seal(payload))

    def seal(self, payload: bytes) -> bytes:
        return b"".join(self._frames.encode(payload))

    def write(self, data: bytes) -> None:
        self.sent += data
        self._stream.write(data)

    async def end(self) -> None:
        self.stop_beating()
        await self._stream.end()


async def record(address: Address) -> bytes:
    """Join, and leave before the model is loaded. Returns all bytes that were sent."""
    insider = await Insider.join(address, RECORDED)
    insider.send_payload(msgspec.msgpack.encode(Heartbeat()))
    await insider.end()
    return bytes(insider.sent)


def _first_token(result: StepResult, token_id: int) -> StepResult:
    return replace(result, token_ids=(token_id, *result.token_ids[1:]))


_LOGPROBS = TokenLogprobs.of(-1.0, [5], [-1.0])
# Each lie sends an answer to a plan that samples at least one token. The server must close the connection.
LIES: dict[str, Callable[[Insider, StepResult], None]] = {
    "a token outside the vocabulary": lambda worker, result: worker.send(_first_token(result, 256)),
    "a negative token": lambda worker, result: worker.send(_first_token(result, -1)),
    "a token too many": lambda worker, result: worker.send(replace(result, token_ids=(*result.token_ids, 65))),
    "a token too few": lambda worker, result: worker.send(replace(result, token_ids=result.token_ids[1:])),
    "logprobs of other tokens": lambda worker, result: worker.send(
        replace(result, logprobs=(_LOGPROBS,) * (len(result.token_ids) + 1))
    ),
    "prompt logprobs that nobody asked for": lambda worker, result: worker.send(
        replace(result, prompt_logprobs=(PromptLogprobs(0, 1, (_LOGPROBS,)),))
    ),
    "a failure of a sequence that is not in the step": lambda worker, result: worker.send(
        replace(result, failures=((len(result.token_ids), "no"),))
    ),
    "a deferred token that is not in the step": lambda worker, result: worker.send(replace(result, deferred=(-1,))),
    "a step of NaN seconds": lambda worker, result: worker.send(replace(result, step_time_s=float("nan"))),
    "a second WorkerReady": lambda worker, result: worker.send(worker.ready or Heartbeat()),
    "the answer to a request that was not made": lambda worker, result: worker.send(Profiled(num_steps=1)),
    "an unknown message": lambda worker, result: worker.send_payload(b"\x81\xa4type\xa5strange"),
    "a message that is no msgpack": lambda worker, result: worker.send_payload(b"\xc1" * 50),
    "a frame without a MAC": lambda worker, result: worker.write(add_header(msgspec.msgpack.encode(result))),
    "a frame twice": lambda worker, result: worker.write(worker.seal(msgspec.msgpack.encode(Heartbeat())) * 2),
    "a frame that was altered": lambda worker, result: worker.write(
        (sealed := worker.seal(msgspec.msgpack.encode(result)))[:-1] + bytes([sealed[-1] ^ 1])
    ),
    "the header of a message of 16 MiB": lambda worker, result: worker.write(
        worker.seal(bytes(2**24))[: HEADER_BYTES + MAC_BYTES]
    ),
    "1,000 results": lambda worker, result: worker.write(
        b"".join(worker.seal(msgspec.msgpack.encode(replace(result, step_id=10**6 + each))) for each in range(1000))
    ),
}
# After these, the right answer follows. The server must drop the wrong one, and may not count the right one twice.
STRAY: dict[str, Callable[[StepResult], StepResult]] = {
    "the result of a step that was not sent": lambda result: replace(result, step_id=result.step_id + 10**6),
    "a result of another epoch": lambda result: replace(result, epoch=result.epoch + 1),
    "a result twice": lambda result: result,
}
SILENCE = "silence"
TRICKLE = "a frame that arrives byte by byte"


async def lie(address: Address, name: str, chance: random.Random) -> str:
    """Join, answer some plans, and lie. Returns what happened: "thrown out", "dropped", NO_PLAN, or what is wrong."""
    try:
        worker = await Insider.join(address, LIAR)
    except (HandshakeFailed, OSError, EOFError, TimeoutError) as error:
        return f"could not join: {error!r}"
    try:
        num_honest = chance.randrange(0, 12)
        while (plan := await _next_plan(worker)) is not None:
            result = worker.answer(plan)
            if num_honest > 0 or not result.token_ids:
                num_honest -= 1
                await asyncio.sleep(0.002)  # faster than the others, so that the router gives it work
                worker.send(result)
            elif name in STRAY:
                worker.send(STRAY[name](result))
                worker.send(result)
                if num_honest < -20:
                    return "dropped"
                num_honest -= 1
            else:
                return await _throw(worker, name, result)
        return "the server closed the connection too early" if worker.closed.is_set() else NO_PLAN
    finally:
        await worker.end()


async def _next_plan(worker: Insider) -> StepPlan | None:
    deadline_s = time.monotonic() + ENOUGH_S
    while time.monotonic() < deadline_s and not worker.closed.is_set():
        with contextlib.suppress(asyncio.QueueEmpty):
            return worker.plans.get_nowait()
        await asyncio.sleep(0.002)
    return None


async def _throw(worker: Insider, name: str, result: StepResult) -> str:
    if name == SILENCE:
        worker.stop_beating()
    elif name == TRICKLE:
        worker.stop_beating()
        frame = worker.seal(msgspec.msgpack.encode(result) + bytes(10_000))
        for position in range(len(frame)):
            if worker.closed.is_set():
                break
            worker.write(frame[position : position + 1])
            await asyncio.sleep(0.02)
    else:
        LIES[name](worker, result)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENOUGH_S):
            await worker.closed.wait()
            return "thrown out"
    return "still joined"


NO_PLAN = "no plan came"
ALL_LIES = (*LIES, *STRAY, SILENCE, TRICKLE)


# -- between a worker and the server ----------------------------------------------------------------------------------


class Tamperer:
    """A proxy that changes one thing in the bytes of one connection. It passes all later connections on as they are."""

    def __init__(self, address: Address, chance: random.Random) -> None:
        self.has_tampered = asyncio.Event()
        self.both_closed = asyncio.Event()  # the connection that was tampered with
        self._address = address
        self._chance = chance
        self._is_armed = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: Read, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        is_armed, self._is_armed = self._is_armed, False
        try:
            their_reader, their_writer = await connect(self._address, "127.0.0.1")
        except OSError:
            writer.close()
            return
        offset = self._chance.randrange(1500, 30_000) if is_armed else None
        to_server = self._chance.random() < 0.5
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by `stop`
                await asyncio.gather(
                    self._pipe(reader, their_writer, offset if to_server else None),
                    self._pipe(their_reader, writer, None if to_server else offset),
                )
        finally:
            for each in (writer, their_writer):
                each.transport.abort()
            if is_armed:
                self.both_closed.set()

    async def _pipe(self, reader: Read, writer: asyncio.StreamWriter, offset: int | None) -> None:
        """Copy bytes; at the offset, flip a bit, or drop, repeat or insert some bytes."""
        num_passed = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                if offset is not None and num_passed + len(data) > offset:
                    data, offset = self._tamper(data, max(0, offset - num_passed)), None
                    self.has_tampered.set()
                num_passed += len(data)
                writer.write(data)
        with contextlib.suppress(OSError):
            writer.close()

    def _tamper(self, data: bytes, at: int) -> bytes:
        match self._chance.randrange(4):
            case 0:
                return data[:at] + bytes([data[at] ^ 1 << self._chance.randrange(8)]) + data[at + 1 :]
            case 1:
                return data[:at] + data[at + self._chance.randrange(1, 50) :]
            case 2:
                return data[:at] + data[max(0, at - 60) : at + 1] + data[at:]
            case _:
                return data[:at] + self._chance.randbytes(self._chance.randrange(1, 50)) + data[at:]
