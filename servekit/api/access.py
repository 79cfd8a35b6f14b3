"""Who may come in, in whose name, how much, and what the log says of it: the layers round all routes.

    RequestLog       gives a request its id, and a line in the log when it has ended
    HostCheck        lets nobody by who calls the server by a name that is not its own
    CORSMiddleware   Starlette's: answers browsers that ask before they ask, for which they have no key
    KeyCheck         lets nobody by without a key, or over the limits of theirs
    BodyBudget       counts what is read of all bodies together
    Starlette        its own 500s, the routes, and what is said where there is none

All are plain ASGI, and see each message as it comes: what wraps handlers in tasks of its own delays streams and hides
that a client has left.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import ip_address

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.api.http import BodyBudget, engine_of, refuse
from servekit.caller import ANYBODY, Caller
from servekit.config import ServeConfig
from servekit.departure import departure_of
from servekit.errors import ConfigError, Forbidden, RateLimited, ServekitError, Unauthorized
from servekit.keys import Key, Keyring
from servekit.logs import fields
from servekit.rate_limits import Allowance
from servekit.submission import Submission

log = logging.getLogger("servekit")

# What those who start, watch and route may ask without a key. Whatever is not here needs one, if there are any.
PUBLIC = frozenset((method, path) for method in ("GET", "HEAD") for path in ("/health", "/ready"))
METRICS = frozenset({("GET", "/metrics"), ("HEAD", "/metrics")})
WATCHING = ("GET", "/ui/events")

ROUTINE = frozenset({"/health", "/ready", "/metrics"})  # asked every few seconds, for ever
MAX_LOGGED_PATH = 200
MAX_LOGGED_ADDRESS = 64  # a proxy that uvicorn trusts tells it, and may tell anything

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOST_HEADER = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")
_HOST = re.compile(r"\*|(\*\.)?[a-z0-9._-]+|[0-9a-f:.]*:[0-9a-f:.]*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/?#]+")


def guard(
    app: ASGIApp, config: ServeConfig, keyring: Keyring, is_open: Callable[[Scope], bool] = lambda _: False
) -> ASGIApp:
    """The application with the layers round it that the settings want. Raises ConfigError.

    `is_open` says what else needs no key; unlike what is public, it is told to those only who know the server's name.
    """
    app = BodyBudget(app, config.max_total_body_bytes)
    if keyring.keys:
        app = KeyCheck(app, keyring, is_open)
    if config.cors_origins is not None:
        app = CORSMiddleware(
            app,
            allow_origins=_origins(config.cors_origins),
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # clients' libraries send many of their own
            expose_headers=("X-Request-Id", "Retry-After", "X-Should-Retry"),
        )
    if (hosts := _own_hosts(config, keyring)) is not None:
        app = HostCheck(app, hosts)
    return RequestLog(app)


def _origins(setting: str) -> list[str]:
    origins = [origin.strip() for origin in setting.split(",")]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins: {origin!r} is no origin; they look like https://example.org or http://localhost:3000, "
                "without a path, or all of them are *"
            )
    return origins


# -- names -------------------------------------------------------------------------------------------------------------


class HostCheck:
    """Answers only by a name of its own: a page can have its own name point at this machine (DNS rebinding), and could
    then read what it asks for.

    Who sends no Host is no browser, and is let in; so is everybody to what is public, which probes ask by any address.
    """

    def __init__(self, app: ASGIApp, hosts: list[str]) -> None:
        self._app = app
        self._hosts = frozenset({"localhost", *hosts})
        self._suffixes = (".localhost", *(host[1:] for host in hosts if host.startswith("*.")))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and (scope.get("method"), scope["path"]) not in PUBLIC:
            for told in Headers(scope=scope).getlist("host"):
                if not self._is_own(told):
                    message = f"this server has no name {told[:100]!r}; if it is to have, add that to --allowed-hosts"
                    await _refuse(Forbidden(message, code="host_not_allowed"), scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_own(self, told: str) -> bool:
        if (match := _HOST_HEADER.fullmatch(told.lower())) is None:
            return False
        host = (match[1] or match[2] or "").removesuffix(".")
        return host in self._hosts or host.endswith(self._suffixes) or is_loopback(host)


def _own_hosts(config: ServeConfig, keyring: Keyring) -> list[str] | None:
    """What the server may be called beside localhost, or None if that does not matter: a page has no key, and where
    others than this machine may come, only the operator knows by which names."""
    setting = config.allowed_hosts
    if setting is None:
        return [] if is_loopback(config.host) and not keyring.keys else None
    hosts = [host.strip().lower() for host in setting.split(",")]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"allowed_hosts: {host!r} is no name of a host; they look like llm.example.org or *.example.org, "
                "without scheme and port, or all of them are *"
            )
    return None if "*" in hosts else [config.host.lower(), *hosts]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


# -- keys --------------------------------------------------------------------------------------------------------------


class KeyCheck:
    """Lets in who shows a key, in the name of its tenant and within its limits; everybody to what is public or open."""

    def __init__(self, app: ASGIApp, keyring: Keyring, is_open: Callable[[Scope], bool]) -> None:
        self._app = app
        self._keyring = keyring
        self._is_open = is_open
        self._allowances: dict[bytes, Allowance] = {}  # by digest; also of keys that are no longer there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The router looks at the same `path`, so a path that is public by another spelling is still the public one.
        needs_none = scope["type"] == "http" and ((scope["method"], scope["path"]) in PUBLIC or self._is_open(scope))
        if needs_none or scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            key = self._find(scope)
            caller: Caller = scope["state"].get("caller", ANYBODY)
            scope["state"]["caller"] = replace(caller, tenant=key.tenant, min_priority=key.min_priority)
            if key.only == "metrics" and (scope.get("method"), scope["path"]) not in METRICS:
                raise Forbidden("this API key is for GET /metrics and nothing else (only = 'metrics')")
            allowance = self._allowance(key)
            allowance.enter(time.monotonic())
        except (Unauthorized, Forbidden, RateLimited) as error:
            await _refuse(error, scope, receive, send)
            return
        if (scope["method"], scope["path"]) == WATCHING:
            # It lasts as long as a page is open. Were it one of the requests that the key may have at the same time,
            # who may have one could look at the page, or ask something there, but not both.
            allowance.leave(0, time.monotonic())
            await self._app(scope, receive, send)
            return
        # From here to the response's very end, however it comes, the request is one of the key's.
        try:
            await self._app(scope, receive, send)
        finally:
            submission: Submission | None = scope["state"].get("submission")
            num_tokens = submission.num_prompt_tokens + submission.num_generated_tokens if submission else 0
            allowance.leave(num_tokens, time.monotonic())

    def _allowance(self, key: Key) -> Allowance:
        """The key's account: the one it had, however often the file is read, unless its limits are others now."""
        allowance = self._allowances.get(key.digest)
        if allowance is None or allowance.limits != key.limits:
            allowance = self._allowances[key.digest] = Allowance(key.limits, time.monotonic())
        return allowance

    def _find(self, scope: Scope) -> Key:
        is_any_shown = False
        for shown in _keys_shown(Headers(scope=scope)):
            is_any_shown = True
            if (key := self._keyring.find(shown)) is not None:
                return key
        if is_any_shown:
            raise Unauthorized("the API key is none that this server knows")
        raise Unauthorized("this server wants an API key; send it in a header, `Authorization: Bearer KEY`")


def _keys_shown(headers: Headers) -> Iterator[bytes]:
    for value in headers.getlist("authorization"):
        scheme, _, credentials = value.partition(" ")
        if scheme.lower() == "bearer":
            yield credentials.strip().encode("latin-1")
    for value in headers.getlist("x-api-key"):
        yield value.strip().encode("latin-1")


async def _refuse(error: ServekitError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":  # a WebSocket, of which there are none: closed before it is open
        await send({"type": "websocket.close", "code": 1008})
        return
    request = Request(scope)
    engine_of(request).metrics.refused(error.answer_code)
    await refuse(request, error)(scope, receive, send)


# -- the log -----------------------------------------------------------------------------------------------------------


class RequestLog:
    """Gives each request its id, and a line in the log when it has ended. What was asked and answered is not in it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["state"]["caller"] = Caller(request_id=request_id)
        exchange = _Exchange(request_id, send)
        started_s = time.monotonic()
        try:
            await self._app(scope, receive, exchange.send)
        except Exception:
            # The client has been told as far as it could be, by the layers below. If its answer is not whole, the
            # protocol closes the connection.
            log.exception("a request failed", extra=fields(request_id=request_id))
        finally:
            _log_end(scope, exchange, time.monotonic() - started_s)


def _request_id(scope: Scope) -> str:
    """The client's, if nobody could be harmed by it."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(16)


class _Exchange:
    """One request's answer on its way out: it gets its id, and its status is noted for the log."""

    def __init__(self, request_id: str, send: Send) -> None:
        self._id_header = (b"x-request-id", request_id.encode())
        self._send = send
        self.status: int | None = None

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), self._id_header]
        return self._send(message)


def _log_end(scope: Scope, exchange: _Exchange, duration_s: float) -> None:
    path, status = scope["path"], exchange.status
    code: str | None = scope["state"].get("error_code")
    level = _level(path, status, code)
    if not log.isEnabledFor(level):
        return
    caller: Caller = scope["state"]["caller"]
    told = {
        "method": scope["method"],
        "path": path[:MAX_LOGGED_PATH],  # not the query, where prompts can be
        "status": status,
        "duration_ms": round(1e3 * duration_s, 1),
        "client_left": departure_of(scope).has_happened,
        "request_id": caller.request_id,
    }
    if code is not None:
        told["code"] = code
    if caller.tenant:
        told["tenant"] = caller.tenant
    if (client := scope.get("client")) is not None:
        told["client"] = client[0][:MAX_LOGGED_ADDRESS]
    submission: Submission | None = scope["state"].get("submission")
    if submission is not None:
        told["prompt_tokens"] = submission.num_prompt_tokens
        told["generated_tokens"] = submission.num_generated_tokens
        told["finish_reasons"] = submission.finish_reasons
    log.log(level, "request", extra=fields(**told))


def _level(path: str, status: int | None, code: str | None) -> int:
    if path in ROUTINE and status in (200, 503):
        return logging.DEBUG
    # A stream that failed began as 200.
    has_failed = code is not None and (status is None or status == 200 or status >= 500)
    return logging.WARNING if has_failed else logging.INFO
