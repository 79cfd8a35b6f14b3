"""Carry bytes between a worker and its server through a socket, with TLS or without it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.executor.byte_stream import OnBytes, OnEnd
from servekit.protocol.frames import HEADER_BYTES, Bytes, add_header, frame_length
from servekit.protocol.handshake import MAX_HANDSHAKE_BYTES

log = logging.getLogger("servekit")

READ_BYTES = 2**18
# Of one connection. Few steps are in flight, and each is sent as soon as it is planned. So only a peer that does not
# read reaches this limit.
MAX_UNSENT_BYTES = 2**30
CLOSE_TIMEOUT_S = 1.0  # to send the last frames, and to end TLS
# If a peer acknowledges nothing for this long, the peer or the network is lost. Without a limit, the kernel sends again
# for a quarter of an hour.
TCP_USER_TIMEOUT_S = 15.0
# Where nothing is sent for long, nothing is left unacknowledged either: a rank that waits for the others sends no
# heartbeat before it loads. So the kernel asks, by default after two hours.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # s, s, questions; not all platforms have them


class SocketStream:
    """A connected socket as a `ByteStream`. Before `start`, single frames of a handshake can be exchanged."""

    pid = None

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._ended = asyncio.Event()
        self._is_stopped = False
        self._reading: asyncio.Task[None] | None = None
        limit_silence(writer.get_extra_info("socket"))

    @property
    def local_host(self) -> str:
        """This machine's address on the way to the peer; on a Unix socket, of this machine for itself."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    # -- the handshake ------------------------------------------------------------------------------------------------

    async def read_frame(self) -> bytes:
        """Return the next frame of a handshake. Raises EOFError, OSError, or ValueError if it is too long."""
        length = frame_length(await self._reader.readexactly(HEADER_BYTES))
        if not 0 <= length <= MAX_HANDSHAKE_BYTES:
            raise ValueError(f"a frame of {length} bytes; the limit is {MAX_HANDSHAKE_BYTES}")
        return await self._reader.readexactly(length)

    def write_frame(self, frame: bytes) -> None:
        self._writer.write(add_header(frame))

    async def close(self) -> None:
        """Close the connection when all that was written is sent, or a second later."""
        self.stop()
        self._writer.close()
        with contextlib.suppress(TimeoutError, OSError):
            async with pause_tolerant_timeout(CLOSE_TIMEOUT_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()

    # -- ByteStream ---------------------------------------------------------------------------------------------------

    def start(self, on_bytes: OnBytes, on_end: OnEnd) -> None:
        assert self._reading is None
        self._on_end = on_end
        self._reading = asyncio.create_task(self._read(on_bytes), name=f"reads {self.name}")

    def write(self, *data: Bytes) -> None:
        if self._is_stopped:
            return
        self._writer.writelines(data)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._report_end("does not read what is sent to it")

    def stop(self) -> None:
        self._is_stopped = True

    async def wait_ended(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with pause_tolerant_timeout(timeout_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def end(self, is_hung: bool = False) -> None:
        """Close the connection at once. What the kernel has taken is still sent."""
        self.stop()
        self._writer.transport.abort()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    async def _read(self, on_bytes: OnBytes) -> None:
        """Deliver what arrives until the end. After `stop` it only waits for the end."""
        what = "closed the connection"
        try:
            while data := await self._reader.read(READ_BYTES):
                if not self._is_stopped:
                    on_bytes(data)
        except OSError as error:  # includes TLS errors
            what = f"was disconnected ({error.strerror or error})"
        except Exception as error:  # a bug in `on_bytes`; without this, nothing would read the connection any more
            log.exception("the connection to %s failed", self.name)
            what = f"was disconnected by an internal error ({type(error).__name__}: {error})"
        finally:
            self._ended.set()
        self._report_end(what)

    def _report_end(self, what: str) -> None:
        if not self._is_stopped:
            self.stop()
            self._on_end(what)


def limit_silence(connected: socket.socket | None) -> None:
    """Set TCP options so that the kernel ends a connection whose peer acknowledges nothing."""
    if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):  # some kernels and sandboxes lack them; heartbeats detect losses, too
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_USER_TIMEOUT_S * 1e3))
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
