"""Listen for workers that join: authenticate them, let them load the model, and hand them to the engine.

Every process that can reach the socket can connect. So everything before a successful handshake is bounded: the number
of open connections, the connections accepted in a second, the time of a handshake, and the size of its frames. When the
limit of connections is reached, the oldest connection of the host with the most connections is closed. So a host that
opens many connections loses its own. The handshake of a worker takes milliseconds, so its connection is among the
newest and is not closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from servekit import __version__
from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.errors import ConfigError, ServekitError
from servekit.executor.joined_worker import JoinedWorker
from servekit.executor.worker_connection import WorkerConnection
from servekit.executor.worker_group import WorkerGroup
from servekit.joining.adapter_check import adapter_refusal
from servekit.joining.address import TcpAddress, UnixAddress
from servekit.joining.gathered_ranks import GatheredRanks, JoinedRank, make_group, offer_of, size_mismatch, with_hosts
from servekit.joining.socket_stream import SocketStream
from servekit.protocol.handshake import (
    MAX_REFUSAL_LENGTH,
    NONCE_BYTES,
    HandshakeFailed,
    Offer,
    Reason,
    Refused,
    ServerHandshake,
)
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import LoadModel, WorkerReady

log = logging.getLogger("servekit")

BACKLOG = 128
MAX_HANDSHAKES = 64  # at the same time
# One connection in so many seconds. With TLS each connection takes a millisecond of this process, before the key is
# checked.
ACCEPT_INTERVAL_S = 0.02
HANDSHAKE_TIMEOUT_S = 10.0  # TLS included
MAX_JOINED = 1024
# The manager has an object for each block. 2**24 blocks of 16 tokens are more than any device holds today.
MAX_BLOCKS = 2**24
LOG_INTERVAL_S = 1.0  # between two log lines about refused connections

# Why a connection was not accepted as a worker: the reason that was sent to it, or what happened. The metric counts
# connections by these reasons.
JoinRefusal = Reason | Literal["timeout", "displaced", "load_failed"]


class JoinHandler(Protocol):
    """The engine's side: decide which workers may join with which model, and take over those that have joined."""

    @property
    def first(self) -> WorkerReady | None:
        """What the first worker reported; the others must compute the same. None before the first worker."""

    def load_model(self) -> LoadModel:
        """Return the first message to each worker. Its path may be another one on the worker's machine."""

    def refusal(self, offer: Offer) -> tuple[Reason, str] | None:
        """Return why no worker, or not this one, may join now. Return None if it may join."""

    def adapters(self) -> Collection[LoraAdapter]:
        """Return the LoRA adapters that a worker must have on its machine, those that are being loaded included."""

    def join_refused(self, reason: JoinRefusal) -> None:
        """Count a connection that does not become a worker."""

    def worker_joined(self, worker: JoinedWorker) -> None:
        """Take over a worker, and set its `on_loss` and `on_leaving`. It may be lost or leaving already."""


class ListenerSettings(Struct, frozen=True):
    """Where to listen, and what a worker must prove."""

    address: UnixAddress | TcpAddress
    key: bytes
    tls: ssl.SSLContext | None
    heartbeat_timeout_s: float
    load_timeout_s: float
    accept_interval_s: float = ACCEPT_INTERVAL_S
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S


class WorkerListener:
    """The socket that workers join at. Create it and call it on the event loop's thread."""

    def __init__(self, settings: ListenerSettings, handler: JoinHandler) -> None:
        self.num_refused = 0  # connections that did not become workers
        self._settings = settings
        self._handler = handler
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        # Every connection until it is refused or handed over. The first ones began first.
        self._handshakes: dict[asyncio.Task[None], str] = {}  # the values are the hosts of the connections
        self._loading: set[asyncio.Task[None]] = set()
        self._gathered = GatheredRanks()
        self._joined: set[WorkerConnection | WorkerGroup] = set()
        self._log = _RateLimitedLog()

    @property
    def address(self) -> UnixAddress | TcpAddress:
        """Where it listens: with port 0, the port that the kernel has chosen."""
        address = self._settings.address
        if isinstance(address, TcpAddress) and self._socket is not None:
            return TcpAddress(address.host, self._socket.getsockname()[1])
        return address

    def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be used."""
        self._socket = _bind(self._settings.address)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket), name="accepts workers")
        log.info("workers can join at %s", self.address)

    async def stop(self) -> None:
        """Stop listening, and close the connections of workers that are not handed over yet. Idempotent."""
        if self._socket is None:
            return
        tasks = [self._accepting, *self._handshakes, *self._loading]
        for task in tasks:
            assert task is not None
            task.cancel()
        await asyncio.gather(*[task for task in tasks if task is not None], return_exceptions=True)
        await self._gathered.stop()
        self._socket.close()
        self._socket = None
        if isinstance(self._settings.address, UnixAddress):
            with contextlib.suppress(OSError):
                os.unlink(self._settings.address.path)

    # -- connections --------------------------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections, one in `accept_interval_s`, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, peer = await loop.sock_accept(listener)
            except OSError as error:  # the connection is closed already, or no file descriptor is left
                self._log.warning(f"a worker's connection could not be accepted: {error.strerror}")
            else:
                name, host = _peer(peer, self._settings.address)
                self._make_room()
                task = loop.create_task(self._handle(connected, name), name=f"handshake with {name}")
                self._handshakes[task] = host
                task.add_done_callback(self._forget)
            await asyncio.sleep(self._settings.accept_interval_s)

    def _make_room(self) -> None:
        """If all places are taken, close the oldest connection of the host that has the most."""
        if len(self._handshakes) < MAX_HANDSHAKES:
            return
        host, _ = Counter(self._handshakes.values()).most_common(1)[0]
        oldest = next(task for task, its_host in self._handshakes.items() if its_host == host)
        oldest.cancel()
        del self._handshakes[oldest]
        why = f"a connection from {host} was closed in its handshake: {MAX_HANDSHAKES} others came after it"
        self._refused("displaced", why)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        self._loading.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker could not join", exc_info=error)

    def _refused(self, reason: JoinRefusal, why: str) -> None:
        """Count and log a connection of an unauthenticated client."""
        self.num_refused += 1
        self._handler.join_refused(reason)
        self._log.warning(why)

    def _worker_refused(self, reason: JoinRefusal, why: str) -> None:
        """Count and log a worker that has the key.

        There is no limit on these lines, because clients without the key cannot cause them.
        """
        self.num_refused += 1
        self._handler.join_refused(reason)
        log.warning("%s", why)

    async def _handle(self, connected: socket.socket, name: str) -> None:
        """Take one connection from its first byte to the engine."""
        try:
            joining = await self._admit(connected, name)
        except TimeoutError:
            why = f"{name} did not finish its handshake within {self._settings.handshake_timeout_s:g} s"
            self._refused("timeout", why)
        except _OfferRefused as error:
            self._worker_refused(error.reason, f"worker {error.worker_name} was refused: {error.message}")
        except HandshakeFailed as error:
            self._refused(error.reason, f"{name} was refused: {error.message}")
        except (EOFError, ValueError, OSError) as error:
            self._refused("invalid", f"{name} is not a worker of this server: {type(error).__name__}: {error}")
        else:
            task = asyncio.current_task()
            assert task is not None
            self._handshakes.pop(task, None)  # it is authenticated, so other connections cannot close it
            self._loading.add(task)
            await self._join(*joining)

    async def _admit(self, connected: socket.socket, name: str) -> tuple[WorkerConnection, Offer]:
        """Open a connection and authenticate the worker.

        Raises TimeoutError, HandshakeFailed, EOFError, ValueError or OSError; the connection is closed then.
        """
        stream: SocketStream | None = None
        handshake = ServerHandshake(self._settings.key, secrets.token_bytes(NONCE_BYTES))
        try:
            async with pause_tolerant_timeout(self._settings.handshake_timeout_s):
                stream = await self._open(connected, name)
                offer = await self._authenticate(stream, handshake)
            heartbeat_timeout_s = self._settings.heartbeat_timeout_s
            frames = handshake.sealed_frames(self._handler.load_model().max_answer_bytes)
            stream.name = _worker_name(offer)
            return WorkerConnection(stream, heartbeat_timeout_s, lambda: None, frames), offer
        except BaseException as error:
            if stream is None:
                connected.close()
            elif isinstance(error, HandshakeFailed) and error.answer is not None:
                stream.write_frame(error.answer)
                await stream.close()
            else:
                await stream.end()
            raise

    async def _open(self, connected: socket.socket, name: str) -> SocketStream:
        """Wrap a connected socket; with TLS, after its handshake. Raises OSError."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        timeout_s = None if self._settings.tls is None else self._settings.handshake_timeout_s
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connected, ssl=self._settings.tls, ssl_handshake_timeout=timeout_s
        )
        return SocketStream(reader, asyncio.StreamWriter(transport, protocol, reader, loop), name)

    async def _authenticate(self, stream: SocketStream, handshake: ServerHandshake) -> Offer:
        """Exchange the messages of a handshake, and accept the offer.

        Raises HandshakeFailed, or what `read_frame` raises.
        """
        while (answer := handshake.receive(await stream.read_frame())) is not None:
            stream.write_frame(answer)
        assert handshake.offer is not None
        refusal = self._refusal(handshake.offer)
        if refusal is not None:
            reason, message = refusal
            raise _OfferRefused(_worker_name(handshake.offer), reason, message, handshake.refuse(reason, message))
        stream.write_frame(handshake.accept())
        return handshake.offer

    def _refusal(self, offer: Offer) -> tuple[Reason, str] | None:
        if offer.servekit_version != __version__:
            return "other_version", (
                f"the worker is servekit {offer.servekit_version}, and the server is {__version__}; install the same "
                "version on both"
            )
        self._joined = {worker for worker in self._joined if worker.loss is None}
        if len(self._joined) + len(self._loading) + len(self._gathered) >= MAX_JOINED:
            return "too_many", f"{MAX_JOINED} workers have joined already, which is the limit"
        if (why := size_mismatch(offer, self._handler.load_model())) is not None:
            return "other_size", why
        return self._handler.refusal(offer)

    async def _join(self, worker: WorkerConnection, offer: Offer) -> None:
        """Let a worker serve. If it is one rank of several, the last one of them lets all of them serve."""
        if not offer.num_ranks:
            await self._load(worker, offer)
        elif (ranks := self._gathered.add(JoinedRank(worker, offer))) is not None:
            await self._load(make_group(ranks, self._handler.load_model()), offer_of(ranks), ranks)

    async def _load(
        self, worker: WorkerConnection | WorkerGroup, offer: Offer, ranks: Sequence[JoinedRank] = ()
    ) -> None:
        """Let a worker load the model, and hand it over when it is ready."""
        name, is_handed_over = f"worker {worker.name}", False
        try:
            log.info("%s is joining; it loads the model", name)
            first = self._handler.first
            fingerprint = "" if first is None else first.model.fingerprint
            worker.send(replace(self._handler.load_model(), fingerprint=fingerprint))
            message = await worker.receive(self._settings.load_timeout_s)
            if not isinstance(message, WorkerReady):
                self._worker_refused("invalid", f"{name} answered {type(message).__name__} to its first message")
            elif (refusal := await self._refusal_when_loaded(worker, message)) is not None:
                reason, why = refusal
                self._worker_refused(reason, f"{name} was refused: {why}")
                # This goes to the agent, which does not pass it on to a worker process. So it is not one of the
                # workers' messages.
                worker.send_payload(worker.encode(Refused(reason, why[:MAX_REFUSAL_LENGTH])))
                await worker.end(graceful=True)  # the agent closes the connection when it has read the reason
            else:
                is_handed_over = True
                self._joined.add(worker)
                log.info("%s has joined, %.1f s to load the model", name, message.load_time_s)
                ready = with_hosts(message, ranks) if ranks else message
                self._handler.worker_joined(JoinedWorker(worker, offer, ready))
        except ServekitError as error:
            self._worker_refused("load_failed", f"{name} did not join: {error.message}")
        finally:
            if not is_handed_over:
                await worker.end()

    async def _refusal_when_loaded(
        self, worker: WorkerConnection | WorkerGroup, ready: WorkerReady
    ) -> tuple[Reason, str] | None:
        """Return why a worker that has loaded the model cannot serve; None if it can. Raises WorkerError.

        Adapters may be loaded while the worker is asked about others. So it is asked until none is left, and the caller
        must hand it over without an `await` in between.
        """
        if (why := _mismatch(ready, self._handler.first)) is not None:
            return "other_model", why
        checked: set[LoraAdapter] = set()
        while unchecked := [adapter for adapter in self._handler.adapters() if adapter not in checked]:
            if (why := await adapter_refusal(worker, unchecked)) is not None:
                return "other_adapters", why
            checked.update(unchecked)
        return None


def _mismatch(ready: WorkerReady, first: WorkerReady | None) -> str | None:
    """Return why a worker that has loaded a model cannot be used; None if it can."""
    if not 1 <= ready.num_blocks <= MAX_BLOCKS:
        return f"it reports {ready.num_blocks} KV blocks; 1 to {MAX_BLOCKS} can be used"
    if first is None:
        return None
    if ready.kv_layout != first.kv_layout:
        return (
            f"it stores keys and values in another layout ({ready.device:.100}, {ready.attention:.100}) than other "
            f"workers ({first.device:.100}, {first.attention:.100}), and they cannot be handed over; use devices of "
            "one kind, or leave out --prefill-replicas"
        )
    return ready.difference(first)


def _worker_name(offer: Offer) -> str:
    """Return the name of a worker in log lines: its agent's process, and where that runs."""
    return f"{offer.pid} on {offer.host}, {offer.device}"


def _peer(peer: object, address: UnixAddress | TcpAddress) -> tuple[str, str]:
    """Return (name, host) of a peer, from its address as sock_accept returns it.

    On a Unix socket all peers have the same host.
    """
    if isinstance(address, UnixAddress) or not isinstance(peer, tuple):
        return f"a connection to {address}", "this machine"
    return str(TcpAddress(peer[0], peer[1])), str(peer[0])


def _bind(address: UnixAddress | TcpAddress) -> socket.socket:
    """Return a listening socket. Raises ConfigError."""
    try:
        if isinstance(address, TcpAddress):
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
        return _bind_unix(address.path)
    except OSError as error:
        raise ConfigError(
            f"cannot listen for workers on {address}: {error.strerror or error}; choose another --listen-workers"
        ) from None


def _bind_unix(path: str) -> socket.socket:
    """Listen at a Unix socket that only this user may connect to. The socket file of an ended server is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
            raise OSError(errno.EADDRINUSE, "another server listens there")
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError(errno.EEXIST, "a file that is not a socket has this name")
            os.unlink(path)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
        return listener
    except BaseException:
        listener.close()
        raise


class _OfferRefused(HandshakeFailed):
    """A worker that has proved the key is refused."""

    def __init__(self, worker_name: str, reason: Reason, message: str, answer: bytes) -> None:
        super().__init__(reason, message, answer)
        self.worker_name = worker_name


class _RateLimitedLog:
    """Log lines about refused connections: at most one in LOG_INTERVAL_S, with the number of those left out."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._next_s = 0.0
        self._num_left_out = 0

    def warning(self, message: str) -> None:
        if self._clock() < self._next_s:
            self._num_left_out += 1
            return
        more = f" ({self._num_left_out} more since the last such line)" if self._num_left_out else ""
        log.warning("%s%s", message, more)
        self._next_s, self._num_left_out = self._clock() + LOG_INTERVAL_S, 0
