"""Turn exceptions of the routes into error answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from difflib import get_close_matches

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, caller_of, counters_of, models_of
from servekit.api.refusal_rate_limit import RefusalRateLimit
from servekit.api.responses.http import CLIENT_CLOSED_REQUEST, as_written_on, note_error_code, refuse, respond
from servekit.errors import InternalError, QueueFull, RateLimited, ServekitError

Handler = Callable[[Request, Exception], Awaitable[Response]]

MAX_PATH_LENGTH = 100  # characters of a path that an error repeats, and compares with the routes
NUM_SUGGESTIONS = 3
SIMILARITY = 0.6  # difflib's ratio, from which on a route is suggested


def exception_handlers(endpoints: Sequence[Endpoint]) -> dict[type[Exception], Handler]:
    """Return the handlers by exception, for an application with these routes."""
    methods: dict[str, list[str]] = {}
    for endpoint in endpoints:
        # A path that ends with a name, like /v1/models/{model}, is suggested without it.
        path = endpoint.path.rpartition("{")[0].rstrip("/") if endpoint.path.endswith("}") else endpoint.path
        methods.setdefault(path or "/", []).append(endpoint.method)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        return _refuse_route(request, error, methods)

    return {
        ServekitError: _on_error,
        HTTPException: on_http_exception,
        ClientDisconnect: _on_client_disconnect,
        Exception: _on_bug,
    }


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServekitError)
    if isinstance(error, QueueFull | RateLimited):
        rate_limit: RefusalRateLimit = request.app.state.refusal_rate_limit
        delay_s = rate_limit.delay_s(caller_of(request).tenant, time.monotonic())
        if delay_s:
            await asyncio.sleep(delay_s)
    counters_of(request.scope, models_of(request)).request_refused(error.answer_code)
    return refuse(request, error)


def _refuse_route(request: Request, error: Exception, methods: dict[str, list[str]]) -> Response:
    """Answer Starlette's own refusals: there is no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:MAX_PATH_LENGTH]
    if error.status_code == 405:
        code = "method_not_allowed"
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} does not support {request.method[:MAX_PATH_LENGTH]}; it supports {allowed}"
    else:
        code = "not_found"
        message = f"there is no route {path}; {_suggestion(path, methods)}GET /docs describes all routes"
    note_error_code(request, code)
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    response = respond(as_written_on(request.url.path, body, error.status_code), error.status_code)
    response.headers.update(error.headers or {})
    return response


def _suggestion(path: str, methods: dict[str, list[str]]) -> str:
    """Name the routes whose paths are most like this one. Both /completions and /v1/completion are misspelt often."""
    close = get_close_matches(path.lower(), methods, n=NUM_SUGGESTIONS, cutoff=SIMILARITY)
    routes = [f"{'/'.join(sorted(set(methods[near])))} {near}" for near in close]
    return f"did you mean {' or '.join(routes)}? " if routes else ""


async def _on_client_disconnect(_: Request, error: Exception) -> Response:
    """The client disconnected before its request was complete or answered. The answer is not sent."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(request: Request, error: Exception) -> Response:
    return refuse(
        request,
        InternalError(f"internal error ({type(error).__name__}); the server's log has the details of this request"),
    )
