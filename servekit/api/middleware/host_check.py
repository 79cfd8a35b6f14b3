"""Refuse requests whose Host header names another server: the defence against DNS rebinding."""

from __future__ import annotations

import re
from collections.abc import Set
from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.api.auth.keys import Keyring
from servekit.api.responses.http import reject
from servekit.config import ServeConfig
from servekit.errors import ConfigError, Forbidden

_HOST_HEADER = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9._-]+|[0-9a-f:.]*:[0-9a-f:.]*")


class HostCheck:
    """Answer only requests whose Host header is one of the server's own names.

    A web page can point its own domain name at this machine (DNS rebinding). To the browser, this server's answers
    would then have the page's origin, and the page could read them.

    Requests without a Host header do not come from browsers and pass. Public routes pass too: probes use any address.
    """

    def __init__(self, app: ASGIApp, hosts: list[str], public_routes: Set[tuple[str, str]]) -> None:
        self._app = app
        self._hosts = frozenset({"localhost", "127.0.0.1", "::1", *hosts})
        self._suffixes = (".localhost", *(host[1:] for host in hosts if host.startswith("*.")))
        self._public_routes = public_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (scope.get("method"), scope["path"]) not in self._public_routes:
            for header in [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]:
                if not self._is_own(header):
                    message = (
                        f"host {header[:100]!r} is not a name of this server; to accept it, add it to --allowed-hosts"
                    )
                    await reject(Forbidden(message, code="host_not_allowed"), scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_own(self, header: str) -> bool:
        match = _HOST_HEADER.fullmatch(header.lower())
        if match is None:
            return False
        host = (match[1] or match[2] or "").removesuffix(".")
        return host in self._hosts or host.endswith(self._suffixes) or is_loopback(host)


def own_hosts(config: ServeConfig, keyring: Keyring) -> list[str] | None:
    """Return the names that this server accepts besides localhost, or None to accept any. Raises ConfigError.

    Any name is accepted where API keys are needed, because a page has none, and where other machines can connect,
    because only the operator knows the names they use.
    """
    setting = config.allowed_hosts
    if setting is None:
        return [] if is_loopback(config.host) and not keyring.keys else None
    hosts = [host.strip().lower() for host in setting.split(",")]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"allowed_hosts: {host!r} is not a host name; use names like llm.example.org or *.example.org, "
                "without scheme and port, or * for any"
            )
    return None if "*" in hosts else [config.host.lower(), *hosts]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
