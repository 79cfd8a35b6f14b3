"""Give every request an id, and log it when it has ended."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.api.disconnect import disconnect_of
from servekit.engine.caller import Caller
from servekit.engine.interface import ModelUse
from servekit.engine.prediction_state import PredictionState
from servekit.engine.request_state import RequestState
from servekit.protocol.logging import fields

log = logging.getLogger("servekit")

ROUTINE_PATHS = frozenset({"/health", "/ready", "/metrics"})  # polled every few seconds; logged at debug level
MAX_LOGGED_PATH = 200
MAX_LOGGED_ADDRESS = 64  # a proxy that uvicorn trusts sets the address, and may set it to any text

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")


class RequestLog:
    """Give each request its id, and write one log entry when it has ended. Prompts and answers are never in it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["state"]["caller"] = Caller(request_id=request_id)
        exchange = _Exchange(request_id, scope["state"], send)
        started_s = time.monotonic()
        try:
            await self._app(scope, receive, exchange.send)
        except Exception:
            # The layers below have answered as far as they could. If the answer is incomplete, the protocol closes the
            # connection.
            log.exception("internal error in a request", extra=fields(request_id=request_id))
        finally:
            _log_end(scope, exchange, time.monotonic() - started_s)


def _request_id(scope: Scope) -> str:
    """Return the client's own id if it is safe to log and send back; otherwise a random one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return secrets.token_hex(16)


class _Exchange:
    """Adds the request id and the headers of the model choice to one response, and notes its status for the log."""

    def __init__(self, request_id: str, state: dict[str, Any], send: Send) -> None:
        self._id_header = (b"x-request-id", request_id.encode())
        self._state = state
        self._send = send
        self.status: int | None = None

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            use: ModelUse | None = self._state.get("model_use")
            of_model = () if use is None else use.headers
            message["headers"] = [*message.get("headers", ()), *of_model, self._id_header]
        return self._send(message)


def _log_end(scope: Scope, exchange: _Exchange, duration_s: float) -> None:
    path, status = scope["path"], exchange.status
    code: str | None = scope["state"].get("error_code")
    level = _level(path, status, code)
    if not log.isEnabledFor(level):
        return
    caller: Caller = scope["state"]["caller"]
    entry = {
        "method": scope["method"],
        "path": path[:MAX_LOGGED_PATH],  # without the query string, which may contain a prompt
        "status": status,
        "duration_ms": round(1e3 * duration_s, 1),
        "client_left": disconnect_of(scope).has_happened,
        "request_id": caller.request_id,
    }
    if code is not None:
        entry["code"] = code
    if caller.tenant:
        entry["tenant"] = caller.tenant
    client = scope.get("client")
    if client is not None:
        entry["client"] = client[0][:MAX_LOGGED_ADDRESS]
    state: RequestState | None = scope["state"].get("request_state")
    if state is not None:
        entry["prompt_tokens"] = state.num_prompt_tokens
        entry["generated_tokens"] = state.num_generated_tokens
        if state.num_drafted_tokens:
            entry["drafted_tokens"] = state.num_drafted_tokens
            entry["accepted_tokens"] = state.num_accepted_tokens
        entry["finish_reasons"] = state.finish_reasons
    prediction: PredictionState | None = scope["state"].get("prediction")
    if prediction is not None:
        entry["inputs"] = prediction.num_inputs
        entry["prompt_tokens"] = prediction.num_tokens
    log.log(level, "request", extra=fields(**entry))


def _level(path: str, status: int | None, code: str | None) -> int:
    if path in ROUTINE_PATHS and status in (200, 503):
        return logging.DEBUG
    # The status of a stream that failed is 200, because it was sent before the failure.
    has_failed = code is not None and (status is None or status == 200 or status >= 500)
    return logging.WARNING if has_failed else logging.INFO
