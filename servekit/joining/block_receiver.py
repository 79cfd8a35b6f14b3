"""Fetch KV blocks from the agents of other workers into memory that this agent's worker reads."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from servekit import __version__
from servekit.errors import ServekitError
from servekit.joining.address import TcpAddress, parse_address
from servekit.joining.nixl_transfer import NixlFailed, NixlReader, NixlReaders
from servekit.joining.socket_stream import limit_silence
from servekit.joining.transfer_log import TransferLog
from servekit.joining.transfer_socket import TransferSocket
from servekit.protocol.block_ring import BlockRing, block_sums
from servekit.protocol.handshake import NONCE_BYTES, Offer, WorkerHandshake
from servekit.protocol.kv_transfer import (
    BlockLayout,
    BlocksFound,
    BlocksInMemory,
    BlocksRead,
    RequestBlocks,
    bytes_of_block,
    max_frame_bytes,
    num_keys_at_once,
)
from servekit.protocol.messages import BlocksFetched, FetchBlocks, Key

log = logging.getLogger("servekit.worker")

MAX_PEERS = 64  # each has a thread
MAX_ASKED = 2  # batches: so a peer prepares the next one while this agent keeps the one before it
MAX_QUEUED = 16  # fetches from one peer; the server asks for four at a time
CONNECT_TIMEOUT_S = 5.0  # to connect and to authenticate
STALL_TIMEOUT_S = 3.0  # for one batch of blocks
# For all blocks of a sequence, from the server's request on, so that it has an answer within its own 30 s.
FETCH_TIMEOUT_S = 10.0
NETWORK_ERRORS = (OSError, EOFError, ValueError, msgspec.DecodeError)
IDLE_TIMEOUT_S = 300.0  # after which the connection to a peer that is not asked is closed
NIXL_PAUSE_S = 300.0  # for so long, TCP is used with a peer after NIXL failed

_Queue = queue.Queue[tuple[FetchBlocks, float] | None]  # requests, and when each must be answered; None: the end


class BlockReceiver:
    """Fetches blocks, in a thread for each peer: so one that stalls delays no other one, and no step."""

    def __init__(
        self,
        rings: Sequence[BlockRing],
        key: bytes,
        tls: ssl.SSLContext | None,
        on_fetched: Callable[[BlocksFetched], None],
        lock: threading.Lock | None = None,
        readers: NixlReaders | None = None,
    ) -> None:
        """`rings` has one for each rank, for the blocks that come. `on_fetched` is called in a thread.

        `lock` is for receivers that share a ring. With `readers`, NIXL reads the blocks of peers that also use it.
        """
        self._rings = list(rings)
        self._layouts = tuple(BlockLayout(ring.layout, ring.block_bytes) for ring in rings)
        self._key = key
        self._tls = tls
        self._on_fetched = on_fetched
        self._nixl = readers
        self._num_at_once = min(num_keys_at_once(self._layouts), *(ring.max_append for ring in self._rings))
        self._warn = TransferLog().warning
        self._lock = lock or threading.Lock()  # of the rings, and of all that follows
        self._queues: dict[str, _Queue] = {}  # by the address of the peer
        self._connections: dict[str, TransferSocket] = {}
        self._readers: dict[str, NixlReader] = {}
        self._carried_by: dict[str, str] = {}  # what carries the blocks, as the log has said
        self._tcp_until_s: dict[str, float] = {}  # of peers with which NIXL has failed
        self._is_closed = False

    def fetch(self, request: FetchBlocks) -> None:
        """Begin to fetch blocks from one agent. Does not wait; `on_fetched` gets those that came, perhaps none."""
        (address,) = request.addresses
        with self._lock:
            waiting = None if self._is_closed else self._queues.get(address)
            if waiting is None and len(self._queues) < MAX_PEERS and not self._is_closed:
                waiting = self._begin(address)
            if waiting is not None:
                with contextlib.suppress(queue.Full):
                    waiting.put_nowait((request, time.monotonic() + FETCH_TIMEOUT_S))
                    return
            is_closed = self._is_closed
        if not is_closed:
            why = f"{MAX_QUEUED} fetches wait, which is the limit"
            if waiting is None:
                why = f"{MAX_PEERS} other workers are asked already, which is the limit, or no thread can be started"
            self._warn(f"KV blocks are not fetched from {address}: {why}", "limit")
        self._on_fetched(BlocksFetched(request.number))

    def _begin(self, address: str) -> _Queue | None:
        """Start the thread of a peer, and return its queue; None if there are as many threads as there may be."""
        waiting = _Queue(MAX_QUEUED)
        name = f"fetches from {address}"
        try:
            threading.Thread(target=self._run, args=(address, waiting), name=name, daemon=True).start()
        except RuntimeError:
            return None
        self._queues[address] = waiting
        return waiting

    def close(self) -> None:
        """End all threads, whatever they wait for."""
        with self._lock:
            self._is_closed = True
            for waiting in self._queues.values():
                with contextlib.suppress(queue.Full):
                    waiting.put_nowait(None)
            connections = list(self._connections.values())
        for connection in connections:
            connection.interrupt()

    # -- in the thread of a peer --------------------------------------------------------------------------------------

    def _run(self, address: str, waiting: _Queue) -> None:
        try:
            while (next_one := self._next(address, waiting)) is not None:
                request, ends_s = next_one
                self._answer(address, request, ends_s, waiting)
        finally:
            self._disconnect(address)

    def _next(self, address: str, waiting: _Queue) -> tuple[FetchBlocks, float] | None:
        """Return the next request of a peer; None if there is none for a while, or after `close`."""
        try:
            request = waiting.get(timeout=IDLE_TIMEOUT_S)
        except queue.Empty:
            request = None
        with self._lock:
            if request is None and not waiting.empty() and not self._is_closed:  # it has come just now
                request = waiting.get_nowait()
            if request is None or self._is_closed:
                for of_peers in (self._queues, self._carried_by, self._tcp_until_s):
                    of_peers.pop(address, None)
                return None
        return request

    def _answer(self, address: str, request: FetchBlocks, ends_s: float, waiting: _Queue) -> None:
        """Fetch blocks, and report those that came. After a failure, what waits is reported as failed, too."""
        fetched: list[Key] = []
        try:
            self._fetch_or_connect_again(address, request.keys, fetched, ends_s)
        except Exception as error:
            self._disconnect(address)
            is_expected = isinstance(error, (*NETWORK_ERRORS, ServekitError))  # another one is a bug in servekit
            what = str(error) or type(error).__name__
            log.warning(
                "KV blocks could not be fetched from %s: %s", address, what, exc_info=None if is_expected else error
            )
            with contextlib.suppress(queue.Empty):
                while (other := waiting.get_nowait()) is not None:
                    self._on_fetched(BlocksFetched(other[0].number))
                waiting.put_nowait(None)
        self._on_fetched(BlocksFetched(request.number, tuple(fetched)))

    def _fetch_or_connect_again(self, address: str, wanted: Sequence[Key], fetched: list[Key], ends_s: float) -> None:
        """Fetch blocks, over another connection if the present one has ended: its peer may have started again.

        A peer that does not answer is not asked again. After NIXL fails, TCP is tried. Raises what `_fetch` raises.
        """
        is_reused = address in self._connections
        try:
            self._fetch(address, wanted, fetched, ends_s)
        except NixlFailed as error:
            self._disconnect(address)
            fetched.clear()
            self._tcp_until_s[address], self._carried_by[address] = time.monotonic() + NIXL_PAUSE_S, "TCP"
            try:
                self._fetch(address, wanted, fetched, ends_s)
            except BaseException:
                # The peer was lost, so NIXL is probably not what failed.
                del self._tcp_until_s[address], self._carried_by[address]
                raise
            log.warning(
                "KV blocks come from %s over TCP for the next %g s, because NIXL failed: %s",
                address,
                NIXL_PAUSE_S,
                error,
            )
        except (OSError, EOFError) as error:
            if not is_reused or isinstance(error, TimeoutError) or self._is_closed:
                raise
            self._disconnect(address)
            fetched.clear()  # these are here, and so are not asked for
            self._fetch(address, wanted, fetched, ends_s)

    def _fetch(self, address: str, wanted: Sequence[Key], fetched: list[Key], ends_s: float) -> None:
        """Append the keys of blocks that are there to `fetched`, up to the first one that is missing.

        Raises OSError, EOFError, ValueError or ServekitError when the connection cannot be used any more.
        """
        num_at_once = self._num_at_once
        batches = deque(wanted[first : first + num_at_once] for first in range(0, len(wanted), num_at_once))
        asked: deque[tuple[Sequence[Key], list[Key]]] = deque()  # (keys of a batch, those of them that are to come)
        is_whole = True
        while asked or batches:
            while batches and len(asked) < MAX_ASKED:
                keys = batches.popleft()
                asked.append((keys, self._ask(address, keys, ends_s)))
            keys, missing = asked.popleft()
            came = self._receive(address, missing, ends_s) if missing else ()
            if is_whole:  # otherwise this batch was asked for before another one came without a block
                here = {*keys} - {*missing} | {*came}
                num_here = [*map(here.__contains__, keys), False].index(False)
                fetched += keys[:num_here]
                is_whole = num_here == len(keys)
            if not is_whole:
                batches.clear()  # the blocks after one that is missing are of no use
        if not is_whole:
            self._warn(
                f"{address} has {len(fetched)} of the {len(wanted)} KV blocks that it was asked for; later ones have "
                "overwritten the next one, or it was damaged",
                "missing",
            )

    def _ask(self, address: str, keys: Sequence[Key], ends_s: float) -> list[Key]:
        """Ask for those of the blocks that are not here in all ranks, and return their keys."""
        with self._lock:
            missing = [key for key in keys if not all(key in ring for ring in self._rings)]
        if missing:
            connection = self._connections.get(address) or self._connect(address)
            by_nixl = self._nixl is not None and time.monotonic() >= self._tcp_until_s.get(address, -inf)
            request = msgspec.msgpack.encode(RequestBlocks(self._layouts, tuple(missing), by_nixl))
            connection.send(request, ends_s=min(ends_s, time.monotonic() + STALL_TIMEOUT_S))
        return missing

    def _receive(self, address: str, keys: Sequence[Key], ends_s: float) -> tuple[Key, ...]:
        """Keep the blocks that come of those that were asked for, and return their keys."""
        connection = self._connections[address]
        batch_ends_s = min(ends_s, time.monotonic() + STALL_TIMEOUT_S)
        found = msgspec.msgpack.decode(connection.receive(batch_ends_s), type=BlocksFound)
        if found.refusal:
            raise ValueError(found.refusal)
        if not {*found.keys} <= {*keys} or len({*found.keys}) < len(found.keys):
            raise ValueError("it offered KV blocks that this worker had not asked for, or the same ones twice")
        if not found.keys:
            return ()
        self._log_what_carries(address, "TCP" if found.in_memory is None else "NIXL")
        if found.in_memory is not None:
            return self._read(address, found.keys, found.in_memory, ends_s)
        self._keep(found.keys, self._divide(found.keys, connection.receive(batch_ends_s)))
        return found.keys

    def _log_what_carries(self, address: str, what: str) -> None:
        """Log whether NIXL or TCP carries the blocks of a peer, if this agent uses NIXL and the answer is a new one."""
        if self._nixl is None or self._carried_by.get(address) == what:
            return
        self._carried_by[address] = what
        why = (
            "" if what == "NIXL" else ", because its worker was not started with --transfer-backend nixl, or lacks NIXL"
        )
        log.info("KV blocks come from %s over %s%s", address, what, why)

    def _read(self, address: str, keys: tuple[Key, ...], where: BlocksInMemory, ends_s: float) -> tuple[Key, ...]:
        """Read blocks from the peer's memory. Returns the keys of those whose sums are right.

        A block that was damaged, or overwritten meanwhile, has another sum. Raises NixlFailed, OSError or ValueError.
        """
        if self._nixl is None or not len(where.addresses) == len(where.sums) == len(keys) * len(self._rings):
            raise ValueError("it did not say where each KV block is in its memory, or said so without being asked")
        connection = self._connections[address]
        row_bytes = [ring.rows.shape[1] for ring in self._rings]
        reader = self._readers.get(address)
        if reader is None or reader.metadata != where.metadata:
            if reader is not None:
                self._readers.pop(address).close()
            reader = self._readers[address] = self._nixl.take()
            starts_until_s = ends_s - STALL_TIMEOUT_S  # for TCP, if the process does not start
            reader.connect(where.metadata, self._num_at_once * sum(row_bytes), starts_until_s, connection.check)
        sizes = np.repeat(np.array(row_bytes, np.uint64), len(keys))
        ends_s = min(ends_s, time.monotonic() + STALL_TIMEOUT_S)
        content = reader.read(np.array(where.addresses, np.uint64), sizes, ends_s, connection.check)
        connection.send(msgspec.msgpack.encode(BlocksRead()), ends_s=ends_s)
        ends = np.cumsum([len(keys) * size for size in row_bytes])
        parts = [part.reshape(len(keys), -1) for part in np.split(content, ends[:-1])]
        expected = np.array(where.sums, np.uint64).reshape(len(self._rings), len(keys))
        is_right = np.logical_and.reduce([block_sums(part) for part in parts] == expected)
        came = tuple(key for key, is_kept in zip(keys, is_right.tolist(), strict=True) if is_kept)
        self._keep(came, [part[is_right] for part in parts])
        return came

    def _divide(self, keys: Sequence[Key], data: bytes) -> list[NDArray[np.uint8]]:
        """Return the bytes of blocks as the part of each rank, [num_blocks, bytes].

        Raises ValueError if `data` has another number of bytes.
        """
        if len(data) != len(keys) * bytes_of_block(self._layouts):
            num_expected = len(keys) * bytes_of_block(self._layouts)
            raise ValueError(
                f"it sent {len(data):,} bytes for {len(keys)} KV blocks, which have {num_expected:,} bytes"
            )
        ends = np.cumsum([len(keys) * ring.block_bytes for ring in self._rings])
        parts = np.split(np.frombuffer(data, np.uint8), ends[:-1])
        return [part.reshape(len(keys), -1) for part in parts]

    def _keep(self, keys: Sequence[Key], parts: Sequence[NDArray[np.uint8]]) -> None:
        """Let the worker read blocks. `parts` has one for each rank, [num_blocks, bytes]."""
        if not keys:
            return
        with self._lock:
            for ring, part in zip(self._rings, parts, strict=True):
                ring.rows[ring.next_rows(len(keys)), : part.shape[1]] = part
                ring.append(list(keys))
                ring.refresh()

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self, address: str) -> TransferSocket:
        """Connect to a peer, and authenticate both. Raises OSError, EOFError, ValueError or ServekitError."""
        ends_s = time.monotonic() + CONNECT_TIMEOUT_S
        is_secured = address.startswith("tls://")
        peer = parse_address(address.replace("tls://", "tcp://", 1), "the address for transfers")
        assert isinstance(peer, TcpAddress)
        if is_secured and self._tls is None:
            raise ValueError("it uses TLS for transfers; start this worker with --tls-ca")
        connected = socket.create_connection((peer.host, peer.port), timeout=CONNECT_TIMEOUT_S)
        connection = TransferSocket(connected)
        try:
            limit_silence(connected)
            with self._lock:
                if self._is_closed:
                    raise ConnectionAbortedError("the worker ends")
                self._connections[address] = connection
            if is_secured:
                assert self._tls is not None
                connection.secure(self._tls, ends_s, peer.host)
            offer = Offer(socket.gethostname()[:100], "", __version__, pid=os.getpid())
            handshake = WorkerHandshake(self._key, secrets.token_bytes(NONCE_BYTES), offer)
            frame: bytes | None = handshake.hello()
            while frame is not None:
                connection.write_frame(frame, ends_s)
                frame = handshake.receive(connection.read_frame(ends_s))
            connection.seal(handshake.sealed_frames(max_frame_bytes(self._layouts)))
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self, address: str) -> None:
        with self._lock:
            connection = self._connections.pop(address, None)
            reader = self._readers.pop(address, None)
        if reader is not None:
            reader.close()
        if connection is not None:
            connection.close()
