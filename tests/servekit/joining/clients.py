"""A server's engine and workers that join, for tests: both in this process, with real sockets between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import msgspec
from msgspec.structs import replace

from servekit import __version__
from servekit.executor.joined_worker import JoinedWorker
from servekit.joining.address import TcpAddress, UnixAddress
from servekit.joining.listener import JoinRefusal, ListenerSettings, WorkerListener
from servekit.joining.socket_stream import SocketStream
from servekit.protocol.handshake import Offer, Reason, Refused, WorkerHandshake
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import FetchBlocks, FromWorker, LoadModel, ModelInfo, ToWorker, WorkerReady

KEY = b"k" * 32
MODEL = ModelInfo("Stand-in", 1, 10, 100, (), 1.0, 0, 1.0, fingerprint="f" * 64)
READY = WorkerReady(MODEL, "cpu", "float32", 8, 1, 0.0)
LOAD = LoadModel("/model", "auto", "cpu", 16, 1, 1, None, 1, None, 0.9)
OFFER = Offer("gpu-7", "cuda:1", __version__, "2.9.0", 77)
ANY_PORT = TcpAddress("127.0.0.1", 0)
ENOUGH_S = 30.0  # for what takes milliseconds on an idle machine


_connected: list[SocketStream] = []  # by the test that runs; closed at its end


class RecordingHandler:
    """A JoinHandler that records the workers that join."""

    def __init__(self, model: ModelInfo | None = MODEL) -> None:
        self.model = model
        self.load = LOAD
        self.refuses: tuple[Reason, str] | None = None
        self.needed: list[LoraAdapter] = []
        self.joined: asyncio.Queue[JoinedWorker] = asyncio.Queue()
        self.workers: list[JoinedWorker] = []  # all of them
        self.refusals: list[JoinRefusal] = []

    @property
    def first(self) -> WorkerReady | None:
        return None if self.model is None else replace(READY, model=self.model)

    def load_model(self) -> LoadModel:
        return self.load

    def refusal(self, offer: Offer) -> tuple[Reason, str] | None:
        return self.refuses

    def adapters(self) -> Collection[LoraAdapter]:
        return self.needed

    def join_refused(self, reason: JoinRefusal) -> None:
        self.refusals.append(reason)

    def worker_joined(self, worker: JoinedWorker) -> None:
        self.joined.put_nowait(worker)
        self.workers.append(worker)

    async def next_worker(self) -> JoinedWorker:
        async with asyncio.timeout(ENOUGH_S):
            return await self.joined.get()


@contextlib.asynccontextmanager
async def listening(
    handler: RecordingHandler, address: UnixAddress | TcpAddress | Path = ANY_PORT, **settings: object
) -> AsyncIterator[WorkerListener]:
    """Run a listener on a free port, or on a socket in a folder."""
    if isinstance(address, Path):
        address = UnixAddress(str(address / "workers.sock"))
    defaults: dict[str, object] = {
        "key": KEY,
        "tls": None,
        "heartbeat_timeout_s": 10.0,
        "load_timeout_s": ENOUGH_S,
        "accept_interval_s": 0.0,
        "handshake_timeout_s": ENOUGH_S,
    }
    listener = WorkerListener(ListenerSettings(address=address, **{**defaults, **settings}), handler)  # type: ignore[arg-type]
    listener.start()
    try:
        yield listener
    finally:
        await listener.stop()
        for worker in handler.workers:
            await worker.connection.end()
        await close_all()


async def connect(address: UnixAddress | TcpAddress, ssl: object = None) -> SocketStream:
    """Connect to a listener, and send nothing."""
    if isinstance(address, UnixAddress):
        reader, writer = await asyncio.open_unix_connection(address.path)
    else:
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=ssl)  # type: ignore[arg-type]
    _connected.append(SocketStream(reader, writer, str(address)))
    return _connected[-1]


async def close_all() -> None:
    """Close what `connect` has opened."""
    while _connected:
        await _connected.pop().end()
    await asyncio.sleep(0)


async def closed(stream: SocketStream) -> bytes:
    """Return what the server sends until it closes the connection."""
    received = b""
    async with asyncio.timeout(ENOUGH_S):
        with contextlib.suppress(OSError):
            while piece := await stream._reader.read(2**16):
                received += piece
    return received


async def shake_hands(stream: SocketStream, key: bytes = KEY, offer: Offer = OFFER) -> WorkerHandshake:
    """Play the worker's side of a handshake. Raises HandshakeFailed if it is refused."""
    handshake = WorkerHandshake(key, os.urandom(32), offer)
    frame: bytes | None = handshake.hello()
    async with asyncio.timeout(ENOUGH_S):
        while frame is not None:
            stream.write_frame(frame)
            frame = handshake.receive(await stream.read_frame())
    return handshake


class StandInWorker:
    """A worker that has joined and computes nothing."""

    def __init__(self, stream: SocketStream, handshake: WorkerHandshake) -> None:
        self.stream = stream
        self._frames = handshake.sealed_frames()
        self._received: asyncio.Queue[ToWorker | FetchBlocks | Refused] = asyncio.Queue()
        self.ended = asyncio.Event()
        stream.start(self._on_bytes, lambda _: self.ended.set())

    @classmethod
    async def join(cls, address: UnixAddress | TcpAddress, ssl: object = None) -> StandInWorker:
        stream = await connect(address, ssl)
        return cls(stream, await shake_hands(stream))

    def _on_bytes(self, data: bytes) -> None:
        for payload in self._frames.decode(data):
            self._received.put_nowait(msgspec.msgpack.decode(payload, type=ToWorker | FetchBlocks | Refused))

    async def receive(self) -> ToWorker | FetchBlocks | Refused:
        async with asyncio.timeout(ENOUGH_S):
            return await self._received.get()

    def send(self, message: FromWorker) -> None:
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, payload: bytes, header_only: bool = False) -> None:
        """Send a sealed frame, or only its header."""
        frame = b"".join(self._frames.encode(payload))
        self.write(frame[: self._frames.header_bytes] if header_only else frame)

    def write(self, data: bytes) -> None:
        self.stream.write(data)

    async def wait_ended(self) -> None:
        async with asyncio.timeout(ENOUGH_S):
            await self.ended.wait()
