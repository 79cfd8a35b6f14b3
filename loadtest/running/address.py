"""Addresses of servers, and local addresses to connect from."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from loadtest.errors import LoadTestError


class Address(NamedTuple):
    """The address of a server."""

    family: int
    socket_address: tuple[str, int]
    host: str  # for the Host header


def resolve(url: str) -> list[Address]:
    """Return the addresses of a URL without a path, the preferred one first. Raises LoadTestError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
        raise LoadTestError(f"--url {url!r} is not supported; write http://HOST:PORT, without TLS and without a path")
    try:
        port = parts.port or 80
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise LoadTestError(f"--url {url!r} cannot be resolved: {error}; check the host name and the port") from None
    return [Address(int(family), at[:2], parts.netloc) for family, _, _, _, at in found if isinstance(at[0], str)]


def check_sources(sources: Sequence[str], addresses: Sequence[Address]) -> None:
    """Check that connections can be made from `sources`. Raises LoadTestError.

    An address that is not of this machine, or of another family than a server's, would fail in a run with the same
    error number as an address without a free port.
    """
    for source in sources:
        for family in {address.family for address in addresses}:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    socket.inet_pton(family, source)
                    probe.bind((source, 0))
                except OSError as error:
                    kind = "IPv6" if family == socket.AF_INET6 else "IPv4"
                    why = f"an {kind} address" if error.errno is None else f"of this machine: {error.strerror}"
                    raise LoadTestError(
                        f"--sources {source}: cannot connect from this address, it is not {why}; use local {kind} "
                        "addresses, such as 127.0.0.2 for a server at 127.0.0.1"
                    ) from None
