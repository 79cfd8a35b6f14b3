"""Let agents read KV blocks from each other's memory with NIXL, which uses RDMA where the machines have it.

NIXL carries the bytes of blocks, and nothing else. Two agents use their own connection, as without NIXL, to agree on
who may read, which blocks there are, and where they are (`servekit/protocol/kv_transfer.py`). NIXL itself runs in
processes of its own (`nixl_process.py`), which are started and ended here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from servekit.joining.nixl_process import BEGIN, END, PACKAGES, READY, ReadMemory
from servekit.protocol.block_ring import open_memory

START_TIMEOUT_S = 8.0
SEND_TIMEOUT_S = 2  # of a message to a process, which may have been stopped (SIGSTOP)
RETRY_S = 300.0  # for so long, a process that could not be started is not tried again
CHECK_S = 0.02  # how often `check` is called during a wait
MAX_ANSWER_BYTES = 2**21
STDERR = 2
# How the names of environment variables begin that the processes get. Others may have secrets, and peers may read the
# memory of these processes.
ENVIRONMENT = ("CUDA_", "LANG", "LC_", "LD_", "MLX", "NIXL_", "PATH", "PYTHON", "UCX_", "VIRTUAL_ENV")
DEFAULTS = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"}


class NixlFailed(OSError):
    """NIXL could not be set up, or could not read: its peer has ended, does not answer, or cannot be reached."""


def has_nixl() -> bool:
    """Whether NIXL is installed."""
    return any(find_spec(package) is not None for package in PACKAGES)


class _Process:
    """A process that carries blocks with NIXL. It gets its orders over a socket."""

    def __init__(self, role: str, fds: Sequence[int]) -> None:
        """Start it with this memory, as `source` or `reader`. Raises NixlFailed."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise NixlFailed(f"its process did not start: {error.strerror}") from error
        with theirs:
            command = [sys.executable, "-P", "-m", "servekit.joining.nixl_process", role, str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(
                    [*command, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,  # to which these libraries write
                    pass_fds=(theirs.fileno(), *fds),
                    env={
                        **DEFAULTS,
                        **{name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
                    },
                    process_group=0,  # Ctrl-C in a terminal ends the agent, which ends this process
                )
            except OSError as error:
                ours.close()
                raise NixlFailed(f"its process did not start: {error.strerror}") from error
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        self._connection: Connection[Any, Any] = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: bytes) -> None:
        """Send a message. Raises NixlFailed if the process has ended, or does not read."""
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise NixlFailed("its process has ended") from error

    def order(self, message: bytes, ends_s: float, check: Callable[[], None]) -> bytes:
        """Send a message, and return the answer. Raises NixlFailed.

        `check` is called during the wait, and may raise.
        """
        with contextlib.suppress(NixlFailed):  # the process may have said why it ended: see the answer
            self.send(message)
        while not self._connection.poll(CHECK_S):
            check()
            if time.monotonic() > ends_s:
                raise NixlFailed("timed out")
        try:
            answer: bytes = self._connection.recv_bytes(MAX_ANSWER_BYTES)
        except (EOFError, OSError):
            raise NixlFailed("its process has ended") from None
        if answer[:1] != READY:
            raise NixlFailed(answer[1:500].decode(errors="replace"))
        return answer[1:]

    def kill(self) -> None:
        """End all that is under way, from any thread."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, in the thread that uses it. Idempotent."""
        self.kill()
        self._process.wait()
        self._connection.close()


class NixlSource:
    """Memory with blocks that other agents may read, if they have its metadata and addresses. For several threads."""

    def __init__(self, fds: Sequence[int]) -> None:
        """Start its process, and do not wait for it. `fds` are the memory of each rank.

        A worker must have laid out the memory before `metadata` is called first. Raises NixlFailed.
        """
        self._fds = fds
        self._lock = threading.Lock()  # of all that follows
        self._process: _Process | None = _Process("source", fds)
        self._metadata = b""
        self._first_rows: list[int] = []
        self._retry_s = 0.0
        self._is_closed = False

    def metadata(self) -> tuple[bytes, list[int]]:
        """Return what peers need to reach the memory, and the address of each rank's first row in it.

        If the process has ended, another one is started. Raises NixlFailed.
        """
        with self._lock:
            self._check()
            if self._metadata and self._process is not None and self._process.has_ended:
                self._end()
            if not self._metadata:
                if time.monotonic() < self._retry_s:
                    raise NixlFailed("its process could not be started; the next try is some minutes later")
                try:
                    self._process = self._process or _Process("source", self._fds)
                    answer = self._process.order(b"laid out", time.monotonic() + START_TIMEOUT_S, self._check)
                except NixlFailed:
                    self._retry_s = time.monotonic() + RETRY_S
                    self._end()
                    raise
                self._metadata, self._first_rows = msgspec.msgpack.decode(answer, type=tuple[bytes, list[int]])
            return self._metadata, self._first_rows

    def begin(self) -> object:
        """Let peers read, until `end` gets what this returns."""
        with self._lock:
            self._tell(BEGIN)
            return self._process

    def end(self, reading: object) -> None:
        """End what one call of `begin` has begun."""
        with self._lock:
            if reading is self._process:  # otherwise it has ended, and its successor was not told of this read
                self._tell(END)

    def close(self) -> None:
        """End all reads. Idempotent."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()  # so no thread waits for it any more
        with self._lock:
            self._end()

    def _check(self) -> None:
        if self._is_closed:
            raise NixlFailed("the worker ends")

    def _tell(self, message: bytes) -> None:
        if self._process is not None:
            with contextlib.suppress(NixlFailed):  # the peer notices that its read has failed
                self._process.send(message)

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process, self._metadata = None, b""


class NixlReader:
    """Reads from the memory of one peer. For one thread."""

    def __init__(self) -> None:
        """Start its process, and do not wait for it. Raises NixlFailed."""
        self.metadata = b""  # of its peer
        self._bytes = np.empty(0, np.uint8)
        try:
            (self._fd,) = open_memory(["nixl"], 0)
        except OSError as error:
            raise NixlFailed(f"there is no file for its memory: {error.strerror}") from error
        try:
            self._process = _Process("reader", [self._fd])
        except NixlFailed:
            os.close(self._fd)
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.has_ended

    def connect(self, metadata: bytes, num_bytes: int, ends_s: float, check: Callable[[], None]) -> None:
        """Reserve `num_bytes` for one read, and wait until the process has started, or until that time.

        From then on, `read` reads from the peer with this metadata. `check` is called during the wait, and may raise.
        Raises NixlFailed.
        """
        try:
            os.ftruncate(self._fd, num_bytes)
            self._bytes = np.frombuffer(mmap.mmap(self._fd, num_bytes, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise NixlFailed(f"there is no memory for what it reads: {error.strerror}") from error
        self.metadata = metadata
        self._process.order(b"sized", min(time.monotonic() + START_TIMEOUT_S, ends_s), check)

    def read(
        self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64], ends_s: float, check: Callable[[], None]
    ) -> NDArray[np.uint8]:
        """Return the bytes at these addresses of the peer, one part behind the other. The next call overwrites them.

        `addresses` and `sizes` (in bytes) have one number for each part. `check` is called during the wait, and may
        raise. Raises NixlFailed; then this reader must be closed.
        """
        limit_s = ends_s - time.monotonic()
        request = ReadMemory(self.metadata, addresses.tobytes(), sizes.tobytes(), limit_s)
        self._process.order(msgspec.msgpack.encode(request), ends_s + CHECK_S, check)
        return self._bytes[: int(sizes.sum())]

    def close(self) -> None:
        """End what is under way, disconnect, and give the memory back."""
        self._process.end()
        os.close(self._fd)


class NixlReaders:
    """Readers for the peers of one agent. One is started ahead, because that takes a second. For several threads."""

    def __init__(self) -> None:
        """Start the first one. Raises NixlFailed."""
        self._lock = threading.Lock()  # of all that follows
        self._next: NixlReader | None = NixlReader()

    def take(self) -> NixlReader:
        """Return a reader for another peer, which the caller closes. Raises NixlFailed."""
        with self._lock:
            if (reader := self._next) is None:
                raise NixlFailed("the worker ends")
            self._next = NixlReader()
        if reader.has_ended:
            reader.close()
            reader = NixlReader()
        return reader

    def close(self) -> None:
        """End the reader that was started ahead. Idempotent."""
        with self._lock:
            reader, self._next = self._next, None
        if reader is not None:
            reader.close()
