"""HTTP over plain sockets, for clients that do what no library does."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from tests.support.server_process import ServerProcess


def connect(server: ServerProcess, receive_buffer: int | None = None, timeout_s: float = 60) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:  # before connecting: it decides the window
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(timeout_s)
    connection.connect(("127.0.0.1", server.port))
    return connection


def post(path: str, headers: str = "", **fields: Any) -> bytes:
    """Return a complete request."""
    body = json.dumps(fields).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode() + body


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Return (status, headers, body) of an answer with a content-length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _receive(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += _receive(connection)
    return int(status.split()[1]), headers, body


def read_error(connection: socket.socket) -> tuple[int, str]:
    """Return (status, code) of an error in the error schema."""
    status, headers, body = read_answer(connection)
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return status, error["code"]


def seconds_until_closed(connection: socket.socket) -> float:
    """Read to the end, which may be a reset. Returns the seconds it took. Raises TimeoutError if it does not come."""
    started = time.monotonic()
    try:
        while connection.recv(2**16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - started


def _receive(connection: socket.socket) -> bytes:
    received = connection.recv(2**16)
    assert received, "the connection was closed before the answer was complete"
    return received
