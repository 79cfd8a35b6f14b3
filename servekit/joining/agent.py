"""Keep one worker joined to a server: connect, authenticate, run a worker process, and connect again when that ends.

The agent holds no model. For each connection it starts a worker process, or one for each rank that the server asks for,
and passes the messages between these processes and the server. A server does the same for its own workers, so a worker
that joins runs the same program as any other worker. A crash of the worker or of its device ends only children of the
agent. A new connection never sees the state of an old one.

Where the ranks of a worker are on several machines, each rank joins by a connection of its own, and the server sends it
the plans itself. An agent then has as many connections as ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import signal
import socket
import ssl
from importlib import metadata
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from servekit import __version__
from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.errors import ConfigError
from servekit.executor.placement import place_joining
from servekit.joining.address import TcpAddress, UnixAddress
from servekit.joining.local_worker import LocalWorker, start_local_worker
from servekit.joining.socket_stream import SocketStream
from servekit.joining.transfer_settings import TransferSettings
from servekit.protocol.handshake import (
    NONCE_BYTES,
    NOT_SERVEKIT,
    HandshakeFailed,
    Offer,
    Refused,
    Role,
    WorkerHandshake,
)
from servekit.protocol.lora import LoadAdapter
from servekit.protocol.messages import (
    FETCH_BLOCKS,
    BlocksFetched,
    FetchBlocks,
    FromWorker,
    Leaving,
    Loading,
    LoadModel,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from servekit.protocol.sealed_frames import SealedFrameCodec

if TYPE_CHECKING:
    from servekit.joining.block_exchange import BlockExchange

log = logging.getLogger("servekit.worker")

LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CONNECT_TIMEOUT_S = 10.0  # to connect and to authenticate
MIN_DELAY_S, MAX_DELAY_S = 0.5, 10.0  # between two attempts to join
# A worker that leaves finishes the steps that were sent to it. Supervisors often kill after 30 s.
LEAVE_TIMEOUT_S = 25.0


class NodeRanks(Struct, frozen=True):
    """The ranks of one worker on this machine, which is one of several; each has the same number of ranks."""

    num_nodes: int
    node_rank: int
    num_local_ranks: int
    rendezvous: TcpAddress  # at which rank 0 waits for the others

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.num_local_ranks

    def rank(self, local_rank: int) -> int:
        return self.node_rank * self.num_local_ranks + local_rank


class AgentSettings(Struct, frozen=True):
    """The server to join, and the settings of this worker."""

    address: UnixAddress | TcpAddress
    key: bytes
    tls: ssl.SSLContext | None
    device: str  # or several, separated by commas: one for each rank
    model: str | None  # path on this machine; None: the path that the server gives
    process_arguments: tuple[str, ...] = ()  # of each worker process
    node: str = ""  # what the server calls this machine; by default its host name
    node_of_ranks: NodeRanks | None = None  # if this machine has some ranks, and other machines the others
    local_rank: int = 0  # of the ranks on this machine, the one that joins
    role: Role = ""
    transfers: TransferSettings = TransferSettings()


class WorkerAgent:
    """Keeps one worker, or one rank of it, joined to a server, through all restarts of either of them."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._leaving = asyncio.Event()
        self._has_ended = False  # whether it must end without waiting for steps
        self._joining: asyncio.Task[_Service] | None = None
        self._service: _Service | None = None

    async def run(self) -> int:
        """Join, and join again whenever the connection ends. Returns the exit code.

        0: asked to leave (`leave`); 2: the operator must change something first.
        """
        num_failures = 0
        while not self._leaving.is_set():
            self._joining = asyncio.create_task(self._join(), name="joins the server")
            await asyncio.wait([self._joining])
            if self._joining.cancelled():
                break  # by `leave`
            try:
                service = self._joining.result()
                num_failures = 0 if await self._serve(service) else num_failures + 1
            except HandshakeFailed as error:
                if error.is_permanent:
                    raise ConfigError(f"cannot join {self._settings.address}: {error.message}") from None
                num_failures += 1
                log.warning("cannot join %s: %s", self._settings.address, error.message)
            except (OSError, TimeoutError, EOFError, ValueError) as error:
                num_failures += 1
                log.warning("cannot join %s: %s", self._settings.address, _explain(error, self._settings))
            await self._pause(num_failures)
        return 0

    def leave(self) -> None:
        """Leave the server: finish the steps in flight, and let `run` return. The second call ends at once.

        Before the server has accepted this worker there is nothing to finish, so the first call ends at once, too.
        """
        if self._leaving.is_set():
            self._has_ended = True
        self._leaving.set()
        if self._joining is not None:
            self._joining.cancel()  # does nothing if joining is complete
        if self._service is not None:
            self._service.leave(at_once=self._has_ended)

    async def _pause(self, num_failures: int) -> None:
        """Wait before the next attempt, longer after each failure. The random part keeps many workers apart."""
        delay_s = min(MAX_DELAY_S, MIN_DELAY_S * 2.0 ** min(num_failures, 10)) * random.uniform(0.5, 1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._leaving.wait()

    async def _join(self) -> _Service:
        """Connect and authenticate. Raises HandshakeFailed, OSError, TimeoutError, EOFError or ValueError."""
        settings, stream = self._settings, None
        handshake = WorkerHandshake(settings.key, secrets.token_bytes(NONCE_BYTES), _offer(settings))
        try:
            async with pause_tolerant_timeout(CONNECT_TIMEOUT_S):
                stream = await _connect(settings)
                frame: bytes | None = handshake.hello()
                while frame is not None:
                    stream.write_frame(frame)
                    frame = handshake.receive(await stream.read_frame())
        except BaseException:
            if stream is not None:
                await stream.end()
            raise
        return _Service(settings, stream, handshake.sealed_frames())

    async def _serve(self, service: _Service) -> bool:
        """Work for the server until the connection ends. Returns whether the worker was ready for steps."""
        self._service = service
        if self._leaving.is_set():
            service.leave(at_once=True)
        try:
            why = await service.run()
        finally:
            self._service = None
            await service.end()
        if not self._leaving.is_set():
            log.warning("%s; joining again", why)
        return service.is_ready


class _Service:
    """One connection, and the worker process or the ranks that work for it."""

    def __init__(self, settings: AgentSettings, stream: SocketStream, frames: SealedFrameCodec) -> None:
        self.is_ready = False  # the model is loaded
        self._settings = settings
        self._stream = stream
        self._frames = frames
        self._worker: LocalWorker | None = None
        self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._exchange: BlockExchange | None = None  # of KV blocks, where prefill and decode are apart
        self._is_used = False  # the server has sent a message after the first one, besides questions about adapters
        self._failure: ConfigError | HandshakeFailed | None = None

    async def run(self) -> str:
        """Pass frames until one side ends; returns why.

        Raises ConfigError if the worker cannot serve like this, and HandshakeFailed if the server refuses it.
        """
        self._stream.start(self._on_server_bytes, lambda what: self._finish(f"the server {what}"))
        why = await self._done
        if self._failure is not None:
            raise self._failure
        return why

    def leave(self, at_once: bool) -> None:
        """Ask the server for no more steps. It answers with Shutdown when those in flight are done."""
        if at_once or not self.is_ready:
            self._finish("left before it was ready")
            return
        log.info("leaving: the steps in flight are finished first, for %g s at most", LEAVE_TIMEOUT_S)
        self._to_server(msgspec.msgpack.encode(Leaving()))
        what = f"the server did not send Shutdown within {LEAVE_TIMEOUT_S:g} s"
        asyncio.get_running_loop().call_later(LEAVE_TIMEOUT_S, self._finish, what)

    async def end(self) -> None:
        """End the worker's processes that have not exited, and the connection, when the last frames are sent."""
        if self._exchange is not None:
            self._exchange.close()
        if self._worker is not None:
            await self._worker.end()
        await self._stream.close()
        await self._stream.end()

    def _finish(self, why: str) -> None:
        if not self._done.done():
            self._done.set_result(why)

    # -- messages from the server -------------------------------------------------------------------------------------

    def _on_server_bytes(self, data: bytes) -> None:
        try:
            for payload in self._frames.decode(data):
                if self._failure is not None:
                    return
                if self._worker is None:
                    self._load(msgspec.msgpack.decode(payload, type=ToWorker))
                elif payload.startswith(FETCH_BLOCKS):
                    self._fetch(msgspec.msgpack.decode(payload, type=FetchBlocks))
                elif self._is_used or not self._is_refused(msgspec.msgpack.decode(payload, type=ToWorker | Refused)):
                    self._worker.send(payload)
        except (ValueError, msgspec.DecodeError) as error:
            self._finish(f"the server sent an invalid message ({error})")
        except OSError as error:
            self._finish(f"the worker process did not start ({error})")

    def _load(self, message: ToWorker) -> None:
        """Start the worker process, or the ranks, at the server's first message, with the settings of this machine.

        Raises ValueError if the first message is another one.
        """
        if not isinstance(message, LoadModel):
            raise ValueError(f"{type(message).__name__} before LoadModel")
        try:
            node, local_rank = self._settings.node_of_ranks, self._settings.local_rank
            placement = place_joining(self._settings.device, message, None if node is None else node.num_local_ranks)
        except ConfigError as error:
            self._refuse(error)
            return
        load = replace(placement.apply(message), model_path=self._settings.model or message.model_path)
        if node is not None:
            load = replace(load, local_rank=local_rank)
            which = f"rank {load.rank} of {load.num_ranks} of "
        else:
            which = f"all {load.num_ranks} ranks of " if load.num_ranks > 1 else ""
        if message.kv_transfer_bytes:
            try:
                load = self._exchange_blocks(load)
            except ConfigError as error:
                self._refuse(error)
                return
        log.info("joined %s; loading %s%s on %s", self._stream.name, which, load.model_path, load.device)
        self._worker = start_local_worker(
            load, placement, self._settings.process_arguments, self._on_worker_message, self._finish
        )

    def _exchange_blocks(self, load: LoadModel) -> LoadModel:
        """Reserve memory for KV blocks that are handed over, for a worker that loads this. Raises ConfigError."""
        loop = asyncio.get_running_loop()

        def on_fetched(answer: BlocksFetched) -> None:  # in a thread
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._to_server, msgspec.msgpack.encode(answer))

        from servekit.joining.block_exchange import BlockExchange  # and numpy, which other agents do without

        settings, transfers = self._settings, self._settings.transfers
        transfers = replace(transfers, host=transfers.host or self._stream.local_host)
        if transfers.port:  # the next ranks on this machine have the next ports
            transfers = replace(transfers, port=transfers.port + settings.local_rank)
        self._exchange = BlockExchange(load, settings.key, transfers, settings.tls, on_fetched)
        return self._exchange.apply(load)

    def _fetch(self, request: FetchBlocks) -> None:
        self._is_used = True
        if self._exchange is None:
            raise ValueError("the server asks for KV blocks, and had the model loaded without memory for them")
        self._exchange.fetch(request)

    def _is_refused(self, message: ToWorker | Refused) -> bool:
        """Whether the server refuses what the worker has loaded: before its first step, or not at all.

        The server may ask for adapters before.
        """
        self._is_used = not isinstance(message, LoadAdapter)
        if isinstance(message, Refused):
            self._failure = HandshakeFailed(message.reason, message.message)
            self._finish(f"the server has refused this worker: {message.message}")
        return self._failure is not None

    def _refuse(self, why: ConfigError) -> None:
        """Tell the server and the operator why this worker cannot serve."""
        self._failure = why
        self._to_server(msgspec.msgpack.encode(WorkerFailed(why.message, is_config_error=True)))
        self._finish(why.message)

    # -- messages from the worker's processes -------------------------------------------------------------------------

    def _on_worker_message(self, payload: bytes) -> None:
        """Pass a message on. Raises DecodeError if it is not valid."""
        if not self.is_ready:
            message = msgspec.msgpack.decode(payload, type=FromWorker)
            if isinstance(message, WorkerReady) and self._exchange is not None:
                try:
                    message = replace(message, transfer_addresses=(self._exchange.open(),))
                except ConfigError as error:
                    self._refuse(error)
                    return
                payload = msgspec.msgpack.encode(message)
            self._watch_loading(message)
        self._to_server(payload)

    def _watch_loading(self, message: FromWorker) -> None:
        match message:
            case Loading():
                log.info("%s", message.stage)
            case WorkerReady():
                self.is_ready = True
                log.info("ready: %s, %s", message.model.architecture, message.place)
            case WorkerFailed(is_config_error=True):
                self._failure = ConfigError(message.message)
            case _:
                pass

    def _to_server(self, payload: bytes) -> None:
        self._stream.write(*self._frames.encode(payload))


async def _connect(settings: AgentSettings) -> SocketStream:
    """Open a connection to the server. Raises OSError."""
    address = settings.address
    if isinstance(address, UnixAddress):
        reader, writer = await asyncio.open_unix_connection(address.path)
    elif settings.tls is None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    else:
        reader, writer = await asyncio.open_connection(
            address.host, address.port, ssl=settings.tls, server_hostname=address.host
        )
    return SocketStream(reader, writer, str(address))


def _offer(settings: AgentSettings) -> Offer:
    node = settings.node or socket.gethostname()
    try:
        torch_version = metadata.version("torch")  # of the installed package; importing it would take seconds
    except metadata.PackageNotFoundError:
        torch_version = ""
    offer = Offer(node[:100], settings.device[:100], __version__, torch_version, os.getpid(), role=settings.role)
    if (ranks := settings.node_of_ranks) is None:
        return offer
    devices = settings.device.split(",")  # one for each rank, or the first one
    return replace(
        offer,
        device=devices[settings.local_rank % len(devices)],
        rendezvous=str(ranks.rendezvous),
        rank=ranks.rank(settings.local_rank),
        num_ranks=ranks.num_ranks,
    )


def _explain(error: Exception, settings: AgentSettings) -> str:
    """Return what went wrong before the server accepted this worker, and what to do about it, as a sentence."""
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"the server's certificate is not accepted ({error.verify_message})"
        return f"{what}; --tls-ca must contain the certificate that signed it"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection ({error.reason}); is TLS configured on the server (--worker-tls-cert)?"
    if isinstance(error, EOFError):
        tls = "" if settings.tls is not None or isinstance(settings.address, UnixAddress) else "; does it use TLS?"
        return f"the peer closed the connection{tls}"
    return error.strerror or str(error) if isinstance(error, OSError) else NOT_SERVEKIT


async def run_agent(settings: AgentSettings) -> int:
    """Run an agent until a signal asks it to leave; or one for each rank on this machine. Raises ConfigError."""
    num_agents = 1 if settings.node_of_ranks is None else settings.node_of_ranks.num_local_ranks
    agents = [WorkerAgent(replace(settings, local_rank=number)) for number in range(num_agents)]
    loop = asyncio.get_running_loop()

    def leave() -> None:
        for agent in agents:
            agent.leave()

    for number in LEAVE_SIGNALS:
        loop.add_signal_handler(number, leave)
    running = [asyncio.create_task(agent.run(), name="agent") for agent in agents]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        if any(not task.done() for task in running):  # one cannot serve, and the others cannot without it
            leave()
            leave()  # at once
        codes = await asyncio.gather(*running, return_exceptions=True)
        for error in codes:
            if isinstance(error, BaseException):
                raise error
        return 0
    finally:
        for number in LEAVE_SIGNALS:  # another signal must not kill this process after it has left properly
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
