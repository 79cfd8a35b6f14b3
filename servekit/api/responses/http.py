"""Write JSON answers and error answers.

A request is admitted or refused before its answer begins, so that a refusal has its own HTTP status. Once a stream has
started, an error can only be an event in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from servekit.api.endpoint import counters_of, models_of
from servekit.api.responses.long_json import ITEMS_PER_PIECE, ItemList, LongJson
from servekit.api.schemas.anthropic import error_type
from servekit.api.schemas.json_body import encode
from servekit.api.schemas.tgi import ERROR_TYPES, tgi_param
from servekit.errors import RequestCrashesWorker, RequestTimeout, ServekitError, StorageFailed

# The status that nginx logs for a client that disconnected before its answer. It is never sent.
CLIENT_CLOSED_REQUEST = 499

OLLAMA_PATHS = "/api/"  # the beginning of all paths of Ollama's API
ANTHROPIC_PATHS = "/v1/messages"  # and of Anthropic's

# From this many tokens on, an answer is formatted in a thread: with top logprobs for each, it takes milliseconds.
NUM_TOKENS_FOR_THREAD = 256


def respond(value: Any, status: int = 200) -> Response:
    """Return the value as a JSON answer."""
    return Response(encode(value), status, media_type="application/json")


async def respond_at_length(
    make: Callable[[ItemList], Any], num_tokens: int, items_per_piece: int = ITEMS_PER_PIECE
) -> Response:
    """Respond with `make(items)`, which calls `items` for each list that may be long.

    A long answer is made in a thread and encoded in pieces, so that the event loop stays free for others.
    """
    if num_tokens < NUM_TOKENS_FOR_THREAD:
        return respond(make(list))
    long_json = LongJson(items_per_piece)
    return LongResponse(await asyncio.to_thread(lambda: long_json.pieces(make(long_json.items))))


class LongResponse(Response):
    """A JSON answer in pieces. Each one is sent when the client has taken most of those before it."""

    def __init__(self, pieces: list[bytes]) -> None:
        length = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(length)}, media_type="application/json")
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._pieces.reverse()  # so that each one is freed when it is sent
        while self._pieces:
            piece = self._pieces.pop()
            await send({"type": "http.response.body", "body": piece, "more_body": bool(self._pieces)})
            await asyncio.sleep(0)


def error_body(error: ServekitError, in_tgi_format: bool = False) -> dict[str, Any]:
    """Return OpenAI's error object; for TGI's clients with `error_type` and TGI's parameter names."""
    param = tgi_param(error.param) if in_tgi_format else error.param
    body: dict[str, Any] = {
        "error": {"message": error.message, "type": error.type, "param": param, "code": error.answer_code}
    }
    if in_tgi_format:
        body["error_type"] = ERROR_TYPES.get(error.type, "generation")
    return body


def as_written_on(path: str, body: dict[str, Any], status: int) -> dict[str, Any]:
    """Return an error as the API writes it that has this path. Ollama's clients read one text.

    The path decides, because some errors come before the route: of the key, the host, or a route that is not there.
    """
    if path.startswith(OLLAMA_PATHS):
        return {"error": body["error"]["message"]}
    if path.startswith(ANTHROPIC_PATHS):
        return {"type": "error", "error": body["error"] | {"type": error_type(status, body["error"]["type"])}}
    return body


def use_tgi_errors(request: Request) -> None:
    """Write this request's errors so that TGI's clients understand them, too."""
    request.state.in_tgi_format = True


def error_body_for(request: Request, error: ServekitError) -> dict[str, Any]:
    """Return the error in the format of the request's API, and note its code for the log."""
    note_error_code(request, error.answer_code)
    body = error_body(error, getattr(request.state, "in_tgi_format", False))
    return as_written_on(request.url.path, body, error.status)


def note_error_code(request: Request, code: str) -> None:
    """Add the error code to the request's log entry."""
    request.state.error_code = code


def refuse(request: Request, error: ServekitError) -> Response:
    """Return the error as an answer with its status and headers."""
    response = respond(error_body_for(request, error), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, RequestTimeout):
        response.headers["Connection"] = "close"  # the rest of the body is not expected to arrive
    if isinstance(error, RequestCrashesWorker | StorageFailed):
        response.headers["X-Should-Retry"] = "false"  # else OpenAI's clients retry twice
    return response


async def reject(error: ServekitError, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request from an ASGI layer, before it reaches the router. Counts the refusal in the metrics."""
    if scope["type"] != "http":  # a WebSocket handshake; no route accepts one
        await send({"type": "websocket.close", "code": 1008})
        return
    request = Request(scope)
    counters_of(scope, models_of(request)).request_refused(error.answer_code)
    await refuse(request, error)(scope, receive, send)
