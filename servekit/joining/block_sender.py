"""Send the KV blocks of a worker to the agents of other workers that ask for them."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from servekit.joining.nixl_transfer import NixlFailed, NixlSource
from servekit.joining.socket_stream import limit_silence
from servekit.joining.transfer_log import TransferLog
from servekit.joining.transfer_socket import TransferSocket
from servekit.protocol.block_ring import BlockRing
from servekit.protocol.handshake import NONCE_BYTES, HandshakeFailed, ServerHandshake
from servekit.protocol.kv_transfer import (
    MAX_REQUEST_BYTES,
    BlockLayout,
    BlocksFound,
    BlocksInMemory,
    BlocksRead,
    RequestBlocks,
    num_keys_at_once,
)
from servekit.protocol.messages import Key

MAX_CONNECTIONS = 64  # each has a thread
ACCEPT_INTERVAL_S = 0.02
HANDSHAKE_TIMEOUT_S = 10.0  # TLS included
SEND_TIMEOUT_S = 10.0  # of one answer: a peer that does not read is disconnected
READ_TIMEOUT_S = 10.0  # for a peer to read the blocks of one answer with NIXL; after that it is disconnected
IDLE_TIMEOUT_S = 600.0  # without a request; the peer connects again when it needs a block
BACKLOG = 16


class BlockSender:
    """Listens for agents that need blocks. Each connection has a thread, so a slow peer delays itself only."""

    def __init__(
        self,
        rings: Sequence[BlockRing],
        key: bytes,
        address: tuple[str, int],
        tls: ssl.SSLContext | None,
        nixl: NixlSource | None = None,
    ) -> None:
        """`rings` has one for each rank. `nixl` is for peers that read blocks with NIXL; the caller closes it later.

        Raises OSError if the address cannot be used, or RuntimeError.
        """
        self._rings = {BlockLayout(ring.layout, ring.block_bytes): ring for ring in rings}
        self._number_of = {ring: number for number, ring in enumerate(rings)}
        self._key = key
        self._tls = tls
        self._nixl = nixl
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=BACKLOG)
        self._lock = threading.Lock()  # of all that follows
        self._connections: dict[TransferSocket, bool] = {}  # the oldest first: whether each is authenticated
        self._is_closed = False
        self._warn = TransferLog().warning
        try:
            threading.Thread(target=self._accept, name="accepts transfers", daemon=True).start()
        except RuntimeError:  # there are as many as there may be
            self._listener.close()
            raise

    @property
    def port(self) -> int:
        """The port that it listens at."""
        port: int = self._listener.getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening, and end all connections. Idempotent."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in connections:
            connection.interrupt()

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connected, peer = self._listener.accept()
            except OSError as error:
                if not self._is_closed:  # no file descriptor is left, for example
                    self._warn(
                        f"a connection of an agent that fetches KV blocks could not be accepted: {error.strerror}"
                    )
                    time.sleep(ACCEPT_INTERVAL_S)
                continue
            handler = threading.Thread(target=self._handle, args=(connected, peer[0]), name="sends blocks", daemon=True)
            try:
                handler.start()
            except RuntimeError as error:  # there are as many threads as there may be
                self._warn(f"{peer[0]} was refused, which asked for KV blocks: {error}", "threads")
                connected.close()
            time.sleep(ACCEPT_INTERVAL_S)

    def _handle(self, connected: socket.socket, host: str) -> None:
        """Take one connection from its first byte to its end."""
        connection: TransferSocket | None = None
        try:
            limit_silence(connected)
            connection = self._admit(connected)
            if connection is None:
                if not self._is_closed:
                    self._warn(
                        f"{host} was refused, which asked for KV blocks: {MAX_CONNECTIONS} other agents are connected, "
                        "which is the limit for one worker; use fewer decode workers"
                    )
                return
            ends_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
            if self._tls is not None:
                connection.secure(self._tls, ends_s)
            self._authenticate(connection, ends_s)
            self._serve(connection)
        except HandshakeFailed as error:
            self._warn(f"{host} was refused, which asked for KV blocks: {error.message}")
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            if connection is not None and not self._connections.get(connection):
                self._warn(
                    f"{host} connected to ask for KV blocks, and did not prove that it has the workers' key "
                    f"({type(error).__name__}: {error}); if it is a worker of this server, check its --tls-ca, and "
                    "--transfer-tls-cert of this one"
                )
            elif not self._is_closed and not isinstance(error, EOFError):
                self._warn(f"the connection over which {host} fetched KV blocks was closed: {error}")
        finally:
            with self._lock:
                if connection is not None:
                    self._connections.pop(connection, None)
            (connection or connected).close()

    def _admit(self, connected: socket.socket) -> TransferSocket | None:
        """Give a connection its place, if necessary that of the oldest one that is not authenticated."""
        with self._lock:
            if self._is_closed:
                return None
            if len(self._connections) >= MAX_CONNECTIONS:
                unknown = next((each for each, is_known in self._connections.items() if not is_known), None)
                if unknown is None:
                    return None
                del self._connections[unknown]
                unknown.interrupt()
            connection = TransferSocket(connected)
            self._connections[connection] = False
            return connection

    def _authenticate(self, connection: TransferSocket, ends_s: float) -> None:
        """Raises HandshakeFailed, OSError, EOFError or ValueError."""
        handshake = ServerHandshake(self._key, secrets.token_bytes(NONCE_BYTES))
        try:
            while (answer := handshake.receive(connection.read_frame(ends_s))) is not None:
                connection.write_frame(answer, ends_s)
        except HandshakeFailed as error:
            if error.answer is not None:
                connection.write_frame(error.answer, ends_s)
            raise
        with self._lock:
            if connection in self._connections:  # otherwise another one has its place
                self._connections[connection] = True
        connection.write_frame(handshake.accept(), ends_s)
        connection.seal(handshake.sealed_frames(MAX_REQUEST_BYTES))

    # -- blocks -------------------------------------------------------------------------------------------------------

    def _serve(self, connection: TransferSocket) -> None:
        """Answer requests until the connection ends. Raises OSError, EOFError or ValueError."""
        readings: deque[object] = deque()  # of answers whose blocks the peer reads with NIXL, the oldest first
        try:
            while True:
                payload = connection.receive(time.monotonic() + (READ_TIMEOUT_S if readings else IDLE_TIMEOUT_S))
                request = msgspec.msgpack.decode(payload, type=RequestBlocks | BlocksRead)
                if isinstance(request, RequestBlocks):
                    self._answer(connection, request, readings)
                elif readings:
                    self._end_reads([readings.popleft()])
        finally:
            self._end_reads(readings)

    def _answer(self, connection: TransferSocket, request: RequestBlocks, readings: deque[object]) -> None:
        """Answer a request. Raises OSError or ValueError.

        If the peer reads the blocks itself, `readings` has that read then, also if the answer could not be sent.
        """
        ends_s = time.monotonic() + SEND_TIMEOUT_S
        # A peer may have some of the ranks only, if these are on several machines.
        rings = [self._rings[layout] for layout in request.layouts if layout in self._rings]
        if len(rings) < len(request.layouts):
            refusal = "it stores keys and values in another way: both need the same model, data types and devices"
            connection.send(msgspec.msgpack.encode(BlocksFound(refusal=refusal)), ends_s=ends_s)
            return
        if len(request.keys) > num_keys_at_once(request.layouts):
            raise ValueError(f"it asked for {len(request.keys)} blocks at once, which are too many for one frame")
        if request.by_nixl and (located := self._locate(request.keys, rings, readings)) is not None:
            connection.send(msgspec.msgpack.encode(located), ends_s=ends_s)
            return
        keys, parts = self._find(request.keys, rings)
        connection.send(msgspec.msgpack.encode(BlocksFound(keys)), ends_s=ends_s)
        if keys:
            connection.send(*parts, ends_s=ends_s)

    def _find(self, wanted: Sequence[Key], rings: Sequence[BlockRing]) -> tuple[tuple[Key, ...], list[memoryview]]:
        """Return those of the keys that all of the ranks have, and the parts of their blocks, rank by rank."""
        with self._lock:
            keys = _present(wanted, rings)
            if not keys:
                return (), []
            found = [ring.read(keys) for ring in rings]
        is_found = np.logical_and.reduce([is_right for _, is_right in found])
        parts = []
        for ring, (blocks, _) in zip(rings, found, strict=True):
            sent = blocks if is_found.all() else blocks[is_found]  # of megabytes, each copy takes milliseconds
            parts.append(np.ascontiguousarray(sent[:, : ring.block_bytes]).data.cast("B"))
        return tuple(key for key, is_sent in zip(keys, is_found.tolist(), strict=True) if is_sent), parts

    def _locate(self, wanted: Sequence[Key], rings: Sequence[BlockRing], readings: deque[object]) -> BlocksFound | None:
        """Return those of the keys that all of the ranks have, and where the parts of their blocks are.

        The peer may then read them, until `_end_reads` gets what is appended to `readings`. Returns None if NIXL cannot
        be used.
        """
        if self._nixl is None:
            return None
        try:
            metadata, first_rows = self._nixl.metadata()
        except NixlFailed as error:
            self._warn(f"KV blocks are sent over TCP, because NIXL cannot be used: {error}", "nixl")
            return None
        with self._lock:
            keys = _present(wanted, rings)
            if not keys:
                return BlocksFound()
            located = [ring.locate(keys) for ring in rings]
        is_found = np.logical_and.reduce([is_there for *_, is_there in located])
        addresses: list[int] = []
        sums: list[int] = []
        for ring, (offsets, sums_of_rank, _) in zip(rings, located, strict=True):
            addresses += (offsets[is_found] + np.uint64(first_rows[self._number_of[ring]])).tolist()
            sums += sums_of_rank[is_found].tolist()
        found = tuple(key for key, is_sent in zip(keys, is_found.tolist(), strict=True) if is_sent)
        if not found:
            return BlocksFound()
        readings.append(self._nixl.begin())
        return BlocksFound(found, in_memory=BlocksInMemory(metadata, tuple(addresses), tuple(sums)))

    def _end_reads(self, readings: Iterable[object]) -> None:
        """Note that the peer no longer reads the blocks of these answers."""
        for reading in readings:
            if self._nixl is not None:
                self._nixl.end(reading)


def _present(wanted: Sequence[Key], rings: Sequence[BlockRing]) -> list[Key]:
    """Return those of the keys that all of the rings have now."""
    for ring in rings:
        ring.refresh()
    return [key for key in wanted if all(key in ring for ring in rings)]
