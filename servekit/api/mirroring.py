"""Send copies of requests to another model, and discard its answers: a test of a new version under real traffic.

A copy must not hurt real requests. So it begins when its original has been answered, with the lowest priority, and only
if its model is loaded and nothing waits; otherwise it is dropped. It does not take the last connection to a model's own
server, and never waits until a model is loaded, which could unload another one. There are MAX_COPIES at the same time.
Only requests that were admitted and whose JSON bodies are small are copied. A copy counts against no rate limit of its
key.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.api.endpoint import caller_of, models_of
from servekit.api.inner_request import answer_inner_request
from servekit.api.schemas.json_body import encode
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.interface import Models
from servekit.errors import ServekitError
from servekit.protocol.logging import fields

log = logging.getLogger("servekit")

MAX_COPIES = 8
LOWEST_PRIORITY = 1000


class Copy(Struct, frozen=True):
    """A request that may be copied: its body, and which model gets the copy."""

    model: str
    path: str
    body: bytes


def keep_body(request: Request, body: bytes) -> None:
    """Keep a body, which is a JSON object, until `note_copy` knows whether it is copied."""
    models = models_of(request)
    if models.has_choice and models.mirrored():
        request.state.body_to_copy = body


def note_copy(request: Request, name: str | None, kind: str) -> None:
    """Note that a request is copied, if the name of its model says so, which does what `kind` says."""
    body: bytes | None = request.scope["state"].pop("body_to_copy", None)
    target = None if body is None else models_of(request).mirror_of(name, caller_of(request), kind)
    if body is not None and target is not None:
        request.state.mirrored = Copy(target, request.scope["path"], body)


class Mirroring:
    """An ASGI layer that sends the copies which routes ask for: in `mirrored` of a request's state."""

    def __init__(self, app: ASGIApp, models: Models, app_scope: dict[str, Any]) -> None:
        """`app_scope` is what all scopes of the application contain."""
        self._app = app
        self._models = models
        self._app_scope = app_scope
        self._copies: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
        state = scope.get("state", {})
        copy: Copy | None = state.get("mirrored")
        if copy is not None and "engine" in state and "error_code" not in state:
            self._offer(copy, state.get("caller", ANONYMOUS))

    def _offer(self, copy: Copy, caller: Caller) -> None:
        """Begin to answer a copy, or drop it."""
        models = self._models
        if len(self._copies) >= MAX_COPIES or models.state != "ready" or not self._has_room(copy.model, caller):
            models.note_mirrored(copy.model, "dropped")
            return
        task = asyncio.create_task(self._answer(copy, caller), name="mirrored request")
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)

    def _has_room(self, name: str, caller: Caller) -> bool:
        """Whether the model is loaded and can be asked, and nothing waits for any model: they may share a device."""
        try:
            model = self._models.find(name, caller)
        except ServekitError:  # the caller's tenant may not use it, or it is gone
            return False
        engine = model.engine
        if engine is None or model.state != "ready" or not engine.has_spare_connections:
            return False
        return self._models.has_free_slots and not self._models.has_waiting

    async def _answer(self, copy: Copy, caller: Caller) -> None:
        status = 500

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        caller = Caller(caller.tenant, caller.request_id, LOWEST_PRIORITY)
        state: dict[str, Any] = {"caller": caller, "may_not_wait": True}
        try:
            body = encode({**msgspec.json.decode(copy.body), "model": copy.model})
            await answer_inner_request(self._app, self._app_scope, copy.path, body, state, note)
        except Exception:
            log.exception("internal error in a mirrored request", extra=fields(request_id=caller.request_id))
        result = "answered" if status == 200 and "error_code" not in state else "failed"
        self._models.note_mirrored(copy.model, "dropped" if "waits_for_model" in state else result)

    async def stop(self) -> None:
        """End all copies."""
        copies = list(self._copies)
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)
