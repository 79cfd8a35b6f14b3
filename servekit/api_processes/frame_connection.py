"""Connect an API process and the engine process: frames over a Unix socket pair.

A socket pair lives as long as both processes. When one of them ends, for any reason, the other one reads the end of the
stream within milliseconds. Writing never waits. What a peer has not read is bounded: a sender of output stops while
`is_full`, and a peer that leaves MAX_UNSENT_BYTES unread is cut off.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from servekit.protocol.frames import FrameCodec

log = logging.getLogger("servekit")

SOCKET_BYTES = 2**20  # the kernel's buffer in each direction; a frame of 256 tokens has some kilobytes
FULL_BYTES = 2**20  # output waits while the kernel has not taken this many bytes
MAX_UNSENT_BYTES = 2**28

Incoming = TypeVar("Incoming")


class FrameConnection(asyncio.Protocol, Generic[Incoming]):
    """Sends and receives messages. All methods are called on the event loop's thread."""

    def __init__(self, incoming: object, on_message: Callable[[Incoming], None], on_end: Callable[[], None]) -> None:
        """`incoming` is the type of the messages that arrive. `on_end` is called once, when the peer is gone."""
        self.is_full = False
        self.on_room: Callable[[], None] = lambda: None  # called when the connection is not full any more
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(incoming).decode
        self._frames = FrameCodec()
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(
        cls,
        connected: socket.socket,
        incoming: object,
        on_message: Callable[[Incoming], None],
        on_end: Callable[[], None],
    ) -> FrameConnection[Incoming]:
        """Begin to exchange messages through one end of a socket pair, which the connection then owns."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        connected.setblocking(False)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(lambda: cls(incoming, on_message, on_end), sock=connected)
        return protocol

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Does not wait. Ignored when the connection has ended."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        payload = self._encode(message)
        transport.writelines(self._frames.encode(payload))
        if self.is_full and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.error("an API process or its engine process does not read: %d bytes are unsent", MAX_UNSENT_BYTES)
            transport.abort()

    def close(self) -> None:
        """Close the connection when all that was sent has been taken by the kernel."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=FULL_BYTES)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.decode(data):
                self._on_message(self._decode(payload))
        except (ValueError, msgspec.DecodeError):  # cannot happen: both ends run the same version
            log.exception("an invalid message between an API process and its engine process")
            assert self._transport is not None
            self._transport.abort()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self.on_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()
