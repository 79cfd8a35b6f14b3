"""Put the layers of the HTTP application in order, around Starlette's router.

    RequestMetrics   counts every request, and records its trace
    RequestLog       gives a request its id, and logs it when it has ended
    HostCheck        refuses requests whose Host header names another server
    CORSMiddleware   Starlette's: answers the preflight requests of browsers, which carry no key
    Authentication   refuses requests without a valid key, or over the limits of their key
    Mirroring        with several models: sends copies of requests to another model
    BodyBudget       bounds the memory of all request bodies together; the lines of batches and copies enter here
    Starlette        internal errors (500), the routes, and 404 and 405 where there is none

All layers are plain ASGI and pass each message on at once. Middleware that runs handlers in tasks of its own, such as
Starlette's BaseHTTPMiddleware, delays streams and hides that a client has disconnected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Set

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Scope

from servekit.api.auth.keys import Keyring
from servekit.api.key_accounts import KeyAccounts
from servekit.api.middleware.authentication import Authentication
from servekit.api.middleware.host_check import HostCheck, own_hosts
from servekit.api.middleware.request_log import RequestLog
from servekit.config import ServeConfig
from servekit.errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")


def add_access_layers(
    app: ASGIApp,
    config: ServeConfig,
    keyring: Keyring,
    accounts: KeyAccounts,
    public_routes: Set[tuple[str, str]],
    is_open: Callable[[Scope], bool],
) -> ASGIApp:
    """Return the application inside the layers from RequestLog to Authentication that the settings ask for.

    `public_routes`, (method, path) pairs, need no key and accept any Host header. `is_open` recognizes requests that
    need no key but must use a name of this server: the console's files. Raises ConfigError.
    """
    if keyring.keys:
        app = Authentication(app, keyring, accounts, public_routes, is_open)
    if config.cors_origins is not None:
        app = CORSMiddleware(
            app,
            allow_origins=_parse_origins(config.cors_origins),
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # client libraries send many headers of their own
            expose_headers=("X-Request-Id", "Retry-After", "X-Should-Retry"),
        )
    hosts = own_hosts(config, keyring)
    if hosts is not None:
        app = HostCheck(app, hosts, public_routes)
    return RequestLog(app)


def _parse_origins(setting: str) -> list[str]:
    origins = [origin.strip() for origin in setting.split(",")]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins: {origin!r} is not an origin; use origins like https://example.org or "
                "http://localhost:3000, without a path, or * for any"
            )
    return origins
