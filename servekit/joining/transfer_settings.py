"""Say how an agent's transfers of KV blocks go over the network."""

from __future__ import annotations

import ipaddress
import ssl

from msgspec import Struct

from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress, parse_address


class TransferSettings(Struct, frozen=True):
    """The address of this machine that other agents connect to, its TLS, and what carries blocks."""

    host: str = ""  # "": the address of this machine on its way to the server
    port: int = 0  # 0: any free one
    server_tls: ssl.SSLContext | None = None  # for those that fetch from here; to fetch, TLS is as for the server
    uses_nixl: bool = False  # with agents that also use it; TCP with others, and if NIXL fails


def parse_transfer_address(text: str | None) -> TcpAddress:
    """Parse HOST or HOST:PORT, with an IPv6 address in brackets. Raises ConfigError."""
    if text is None:
        return TcpAddress("", 0)
    has_port = ":" in text.rpartition("]")[2]
    try:
        address = parse_address(f"tcp://{text}" if has_port else f"tcp://{text}:0", "--transfer-address")
    except ConfigError:
        raise ConfigError(
            f"--transfer-address = {text!r} is not an address of this machine; use HOST or HOST:PORT, as in 10.0.0.7 "
            "or 10.0.0.7:8101"
        ) from None
    assert isinstance(address, TcpAddress)
    if _is_unspecified(address.host):
        raise ConfigError(
            f"--transfer-address = {text!r} is every address of this machine, and other workers connect to one of "
            "them; name one that they can reach, as in 10.0.0.7:8101"
        )
    return address


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False
