"""The listening socket: bind it, and close it without a reset for clients that have connected.

The kernel connects clients before the server accepts them: it answers the SYN of a client, and when the client's ACK
has arrived, the connection waits in the *accept queue*. Closing the socket resets what is in that queue, and what
arrives there a moment later. So before the close, a socket filter drops SYNs. Clients send a SYN again after a second:
then it reaches another server that shares the port, or is refused.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import socket
import struct
from collections.abc import Sequence

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError

log = logging.getLogger("servekit")

BACKLOG = 4096  # connections that the kernel holds until they are accepted; Linux's own default limit
# A handshake that has begun takes one round trip to the client. With a larger value, more clients wait a
# second for their next SYN. With a smaller one, clients with a slower network are reset.
HANDSHAKE_TIMEOUT_S = 0.3
ACCEPT_TICK_S = 0.01
MAX_ACCEPT_TICKS = 100  # without a socket filter, clients may connect faster than the server accepts

_SO_ATTACH_FILTER = 26  # the socket module has no name for it
_TCP_INFO_ACCEPT_QUEUE = 24  # the offset of tcpi_unacked, which of a listening socket is the length of that queue
_SYN, _ACK, _FLAGS_AT = 0x02, 0x10, 13  # of a TCP header
# Classic BPF, as (code, jump if true, jump if false, k). The packet begins with its TCP header.
_DROP_SYNS = (
    (0x30, 0, 0, _FLAGS_AT),  # load the byte with the flags
    (0x54, 0, 0, _SYN | _ACK),  # and with the mask
    (0x15, 0, 1, _SYN),  # if it is a SYN without an ACK,
    (0x06, 0, 0, 0),  # keep 0 bytes of the packet, which drops it
    (0x06, 0, 0, 0xFFFFFFFF),  # else keep all of them
)


def bind_all(config: ServeConfig) -> list[socket.socket]:
    """Bind one socket for each API process, all to one address. Raises ConfigError.

    The kernel distributes the clients among them. It does so by a hash of the addresses, so each gets about as many.
    """
    if not config.reuse_port:
        bind(config).close()  # raises if another server has the address: with SO_REUSEPORT both would get clients
    listeners: list[socket.socket] = []
    for _ in range(config.api_processes):
        port = listeners[0].getsockname()[1] if listeners else config.port
        listener = bind(replace(config, port=port, reuse_port=True))
        if not config.reuse_port:
            listener.listen(BACKLOG)
        listeners.append(listener)
    return listeners


def bind(config: ServeConfig) -> socket.socket:
    """Bind the address; uvicorn listens on it later. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        if not config.reuse_port:
            return socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
        listener = socket.socket(family)  # create_server would listen
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.bind((config.host, config.port))
        return listener
    except OSError as error:
        # create_server adds to the system's words what they are about.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        remedy = "choose another --port or --host"
        if error.errno == errno.EADDRINUSE:
            remedy = "another program has this port: end it (servekit doctor names it), or choose another --port"
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}; {remedy}") from None


def url(listener: socket.socket) -> str:
    """Return the server's address as an HTTP URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def stop_connecting(listeners: Sequence[socket.socket]) -> None:
    """Let no further client connect. Returns when all that had begun to connect are accepted.

    The event loop goes on accepting meanwhile. The sockets can then be closed.
    """
    try:
        for listener in listeners:
            drop_syns(listener)
    except OSError as error:  # a kernel, or a sandbox around it, without socket filters
        log.warning(
            "the kernel refuses a socket filter (%s), so clients that connect while the port closes may be reset",
            error.strerror,
        )
    await asyncio.sleep(HANDSHAKE_TIMEOUT_S)
    for _ in range(MAX_ACCEPT_TICKS):  # if the loop was busy
        if not any(map(num_to_accept, listeners)):
            break
        await asyncio.sleep(ACCEPT_TICK_S)


def drop_syns(listener: socket.socket) -> None:
    """Make the kernel drop SYNs, the packets with which clients begin to connect. Raises OSError."""
    instructions = b"".join(struct.pack("=HBBI", *each) for each in _DROP_SYNS)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = struct.pack("@HP", len(_DROP_SYNS), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def num_to_accept(listener: socket.socket) -> int:
    """Return how many connections wait to be accepted."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_ACCEPT_QUEUE + 4)
    (number,) = struct.unpack_from("=I", info, _TCP_INFO_ACCEPT_QUEUE)
    return int(number)
