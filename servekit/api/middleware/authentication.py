"""Authenticate requests by API key, and apply the key's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Set

from msgspec.structs import replace
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.api.auth.keys import Key, Keyring
from servekit.api.auth.rate_limits import Allowance, RunningRequest
from servekit.api.responses.http import reject
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.request_state import RequestState
from servekit.errors import Forbidden, RateLimited, Unauthorized

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
        public_routes: Set[tuple[str, str]],
        is_open: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._public_routes = public_routes
        self._is_open = is_open
        # By digest. Keys that were removed keep theirs, so that removing and adding a key does not reset its limits.
        self._allowances: dict[bytes, Allowance] = {}

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
            allowance = self._allowance(key)
            allowance.enter(time.monotonic())
        except (Unauthorized, Forbidden, RateLimited) as error:
            await reject(error, scope, receive, send)
            return
        running = RunningRequest(allowance)
        scope["state"]["running_request"] = running
        try:
            await self._app(scope, receive, send)
        finally:
            state: RequestState | None = scope["state"].get("request_state")
            num_tokens = state.num_prompt_tokens + state.num_generated_tokens if state else 0
            running.end(num_tokens, time.monotonic())

    def _needs_no_key(self, scope: Scope) -> bool:
        # The router compares the same `path`, so another spelling of a public path is that public path or no route.
        return scope["type"] == "http" and (
            (scope["method"], scope["path"]) in self._public_routes or self._is_open(scope)
        )

    def _allowance(self, key: Key) -> Allowance:
        """Return the key's account. It survives a reload of the keys file, unless the key's limits changed."""
        allowance = self._allowances.get(key.digest)
        if allowance is None or allowance.limits != key.limits:
            allowance = self._allowances[key.digest] = Allowance(key.limits, time.monotonic())
        return allowance

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
