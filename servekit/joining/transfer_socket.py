"""Exchange frames through a connected socket, in a thread of its own. Each call has a time by which it must be done.

A peer that sends one byte after the other gains nothing: the time is that of the whole call.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from servekit.protocol.frames import HEADER_BYTES, Bytes, FrameCodec, add_header, frame_length
from servekit.protocol.handshake import MAX_HANDSHAKE_BYTES

READ_BYTES = 2**18


class TransferSocket:
    """One end of a connection between two agents. First single frames of a handshake, then sealed frames."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        with contextlib.suppress(OSError):  # not a TCP socket, in tests
            # A frame is several writes: each would otherwise wait for the peer's acknowledgement of the one before it.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._frames: FrameCodec | None = None
        self._received: list[bytes] = []  # payloads that came together with the one before them
        self._is_ended = False

    def read_frame(self, ends_s: float) -> bytes:
        """Return the next frame of the handshake. Raises OSError, EOFError or ValueError."""
        length = frame_length(self._read_exactly(HEADER_BYTES, ends_s))
        if not 0 <= length <= MAX_HANDSHAKE_BYTES:
            raise ValueError(f"a frame of {length} bytes; the limit is {MAX_HANDSHAKE_BYTES}")
        return self._read_exactly(length, ends_s)

    def write_frame(self, frame: bytes, ends_s: float) -> None:
        """Send a frame of the handshake. Raises OSError."""
        self._write(add_header(frame), ends_s)

    def secure(self, tls: ssl.SSLContext, ends_s: float, peer_name: str | None = None) -> None:
        """Use TLS from now on: as the client of a peer with this name, or as the server. Raises OSError."""
        self._limit(ends_s)
        is_server = peer_name is None
        self._socket = tls.wrap_socket(
            self._socket, server_side=is_server, server_hostname=peer_name, do_handshake_on_connect=False
        )
        self.check()  # `interrupt` has no effect on a socket that is wrapped meanwhile
        self._socket.do_handshake()

    def seal(self, frames: FrameCodec) -> None:
        """Exchange frames of this codec from now on."""
        self._frames = frames

    def send(self, *payload: Bytes, ends_s: float) -> None:
        """Send a payload, which may be in parts. Raises OSError."""
        assert self._frames is not None
        for part in self._frames.encode(*payload):
            self._write(part, ends_s)

    def receive(self, ends_s: float) -> bytes:
        """Return the next payload. Raises OSError, EOFError, or ValueError for one that was altered."""
        assert self._frames is not None
        while not self._received:
            self._received = self._frames.decode(self._read(READ_BYTES, ends_s))
        return self._received.pop(0)

    def check(self) -> None:
        """Raise ConnectionAbortedError if the connection was ended here."""
        if self._is_ended:
            raise ConnectionAbortedError("the connection was ended here")

    def interrupt(self) -> None:
        """End the connection from another thread: the one that uses it gets an EOFError or OSError, and must close it.

        To close it here would free the number of its file while that thread may still write to that number. The next
        file that is opened would have it: another connection, or the memory of KV blocks.
        """
        self._is_ended = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # that of TLS takes its state from the other thread

    def close(self) -> None:
        """Close the connection, in the thread that uses it."""
        self.interrupt()
        self._socket.close()

    def _read_exactly(self, num_bytes: int, ends_s: float) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data += self._read(num_bytes - len(data), ends_s)
        return data

    def _read(self, max_bytes: int, ends_s: float) -> bytes:
        self._limit(ends_s)
        data = self._socket.recv(max_bytes)
        if not data:
            raise EOFError("the peer closed the connection")
        return data

    def _write(self, data: Bytes, ends_s: float) -> None:
        view = memoryview(data).cast("B")
        while view:
            self._limit(ends_s)
            view = view[self._socket.send(view) :]

    def _limit(self, ends_s: float) -> None:
        """Let the next call on the socket end in time. Raises TimeoutError or OSError."""
        left_s = ends_s - time.monotonic()
        self.check()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)
