"""Parse the address at which workers join: the path of a Unix socket, or a host and a port."""

from __future__ import annotations

import re

from msgspec import Struct

from servekit.errors import ConfigError

MAX_UNIX_PATH_BYTES = 107  # of Linux's sockaddr_un, without the zero at its end

_TCP = re.compile(r"tcp://(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:/\[\]]+)):(?P<port>\d{1,5})/?")


class UnixAddress(Struct, frozen=True):
    """A socket in the file system. The file's permissions decide who may connect."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class TcpAddress(Struct, frozen=True):
    """A host, by its name or its IP address, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_address(text: str, setting: str) -> UnixAddress | TcpAddress:
    """Parse unix:PATH or tcp://HOST:PORT. Raises ConfigError, which names the setting."""
    scheme, _, path = text.partition(":")
    if scheme == "unix":
        path = path.removeprefix("//")
        if path.startswith("/") and len(path.encode()) <= MAX_UNIX_PATH_BYTES and "\0" not in path:
            return UnixAddress(path)
        raise ConfigError(
            f"{setting} = {text!r}: the path of a Unix socket must be absolute and of {MAX_UNIX_PATH_BYTES} bytes at "
            "most, as in unix:/run/servekit.sock"
        )
    found = _TCP.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ConfigError(
            f"{setting} = {text!r} is not an address; use unix:PATH, as in unix:/run/servekit.sock, or "
            "tcp://HOST:PORT, as in tcp://10.0.0.7:8100"
        )
    return TcpAddress(found["ipv6"] or found["host"], int(found["port"]))
