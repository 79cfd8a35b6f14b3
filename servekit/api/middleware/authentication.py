"""Authenticate requests by API key, and apply the key's limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.api.auth.keys import Key, Keyring
from servekit.api.key_accounts import KeyAccounts
from servekit.api.responses.http import reject
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.errors import Forbidden, ServekitError, Unauthorized

MAX_KEYS_SHOWN = 4  # in one request: clients send one or two, and more are guesses
METRICS_ROUTES = frozenset({("GET", "/metrics"), ("HEAD", "/metrics")})  # what a key with only = "metrics" may call


class Authentication:
    """Let requests with a valid API key pass, with the key's tenant and limits.

    Public routes need no key, and neither do the console's files: `is_open` recognizes those.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        accounts: KeyAccounts,
        public_routes: Set[tuple[str, str]],
        is_open: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._accounts = accounts
        self._public_routes = public_routes
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._needs_no_key(scope):
            await self._app(scope, receive, send)
            return
        try:
            key = self._find_key(scope)
            caller: Caller = scope["state"].get("caller", ANONYMOUS)
            scope["state"]["caller"] = replace(caller, tenant=key.tenant, min_priority=key.min_priority)
            scope["state"]["api_key"] = key
            if key.only == "metrics" and (scope.get("method"), scope["path"]) not in METRICS_ROUTES:
                raise Forbidden("this API key may only call GET /metrics (its entry has only = 'metrics')")
            account = await self._accounts.enter(key.digest, key.limits)
        except ServekitError as error:
            await reject(error, scope, receive, send)
            return
        scope["state"]["account"] = account
        try:
            await self._app(scope, receive, send)
        finally:
            account.end()

    def _needs_no_key(self, scope: Scope) -> bool:
        # The router compares the same `path`, so another spelling of a public path is that public path or no route.
        return scope["type"] == "http" and (
            (scope["method"], scope["path"]) in self._public_routes or self._is_open(scope)
        )

    def _find_key(self, scope: Scope) -> Key:
        shown = list(_keys_in(Headers(scope=scope)))
        if len(shown) > MAX_KEYS_SHOWN:
            raise Unauthorized(
                f"the request has {len(shown)} API keys; at most {MAX_KEYS_SHOWN} are tried. Send one, in the header "
                "`Authorization: Bearer KEY`"
            )
        for each in shown:
            key = self._keyring.find(each)
            if key is not None:
                return key
        if shown:
            raise Unauthorized("unknown API key; check the key, or ask the operator of this server for one")
        raise Unauthorized("an API key is required; send it in the header `Authorization: Bearer KEY`")


def _keys_in(headers: Headers) -> Iterator[bytes]:
    for value in headers.getlist("authorization"):
        scheme, _, credentials = value.partition(" ")
        if scheme.lower() == "bearer":
            yield credentials.strip().encode("latin-1")
    for value in headers.getlist("x-api-key"):
        yield value.strip().encode("latin-1")
