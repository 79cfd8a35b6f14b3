"""The HTTP face of one engine: the doors, each in its own module, and what is common to them in `http`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from servekit.api import about, console, live, native, openai, openapi, profile, tgi, tokens
from servekit.api.access import guard
from servekit.api.event_stream import KeepAlive
from servekit.api.http import CLIENT_CLOSED_REQUEST, Endpoint, engine_of, note_code, refuse, respond
from servekit.api.measure import Measure
from servekit.config import ServeConfig
from servekit.engine import LLMEngine
from servekit.errors import InternalError, ServekitError
from servekit.keys import Key, Keyring, parse_api_key
from servekit.request_trace import RequestTrace

MAX_PATH_TOLD = 100  # characters of a path that an error repeats

ENDPOINTS: list[Endpoint] = [
    *native.ENDPOINTS,
    *tgi.ENDPOINTS,
    *openai.ENDPOINTS,
    *tokens.ENDPOINTS,
    *about.ENDPOINTS,
    *profile.ENDPOINTS,
    *live.ENDPOINTS,
]


def create_app(
    engine: LLMEngine, keys_of_file: Sequence[Key] = (), record: Callable[[RequestTrace], None] | None = None
) -> Starlette:
    """All routes, over one engine, for who has a key: one of --api-key, or of the file that was read from
    --api-keys-file. `record` gets a trace of each request that has ended. Raises ConfigError.
    """
    config = engine.config
    assert keys_of_file or config.api_keys_file is None, "the keys file was not read: nobody would need a key"
    keyring = Keyring(_all_keys(config, keys_of_file))
    endpoints = [endpoint for endpoint in ENDPOINTS if config.ui or endpoint not in live.ENDPOINTS]
    app = Starlette(
        routes=[
            *(console.routes() if config.ui else ()),
            *(Route(endpoint.path, _Handler(endpoint), methods=[endpoint.method]) for endpoint in endpoints),
            *openapi.routes(endpoints),
        ],
        exception_handlers={
            ServekitError: _on_error,
            HTTPException: _on_http_exception,
            ClientDisconnect: _on_client_gone,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False  # it would build the address from the client's own Host header
    app.state.engine = engine
    app.state.keep_alive = KeepAlive(config.sse_keep_alive_interval)
    app.state.feed = live.Feed(engine)
    app.state.keyring = keyring
    app.state.created_s = int(time.time())  # what /v1/models tells
    # Outside of Starlette's own layers, so that what these answer passes the guard too.
    is_open = console.is_open if config.ui else lambda _: False
    guarded = guard(app.build_middleware_stack(), config, keyring, is_open)
    app.middleware_stack = Measure(guarded, engine, app.routes, record)
    return app


class _Handler:
    """An endpoint as a plain ASGI application. Of a function, Starlette makes one with a layer for exceptions round it,
    beside the one that is there for all: a kilobyte for each stream."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._handler = endpoint.handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


def renew_keys(app: Starlette, keys_of_file: Sequence[Key]) -> None:
    """From the next request on, the file has these keys; requests that were let in with others go on."""
    assert keys_of_file, "without any key nobody would need one"
    app.state.keyring.keys = _all_keys(app.state.engine.config, keys_of_file)


def _all_keys(config: ServeConfig, keys_of_file: Sequence[Key]) -> list[Key]:
    keys_of_setting = [] if config.api_key is None else parse_api_key(config.api_key)
    return [*keys_of_setting, *keys_of_file]


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServekitError)
    engine_of(request).metrics.refused(error.answer_code)
    return refuse(request, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, no such method."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    message = f"{request.method} {request.url.path[:MAX_PATH_TOLD]}: {error.detail}"
    note_code(request, code)
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    response = respond(body, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_client_gone(_: Request, error: Exception) -> Response:
    """The client left before its request was whole, or answered."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    return refuse(request, InternalError(f"an internal error: {type(error).__name__}"))
