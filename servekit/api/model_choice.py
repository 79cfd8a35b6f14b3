"""Choose the model of a request, and wait until it is loaded.

A request uses its model until it has ended: meanwhile the model is not unloaded. `BodyBudget` ends the use, with all
else that a request holds.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from servekit.api.endpoint import caller_of, models_of
from servekit.api.responses.generation import unless_disconnected
from servekit.api.schemas.json_body import encode
from servekit.engine.interface import GENERATE, Engine
from servekit.errors import InvalidRequest

Conversation = list[dict[str, Any]]


async def engine_for(
    request: Request, name: str | None, conversation: Conversation | None = None, kind: str = GENERATE
) -> Engine:
    """Return the engine of the model that a request names; `engine_of` returns it from now on.

    Without a name it is the default model's. `conversation` keeps the requests of a conversation at one model of an
    alias. Raises ModelNotFound, InvalidRequest for a model of another kind, ClientDisconnect, and what `wait_for_use`
    raises.
    """
    models, caller = models_of(request), caller_of(request)
    begin = None if conversation is None else lambda: _beginning(conversation)
    model = models.find(name, caller, begin)
    if model.kind != kind:
        raise InvalidRequest(
            f"the model {model.name!r} is of kind {model.kind!r}; this route is for models of kind {kind!r}",
            param="model",
        )
    use = model.begin_use()
    if use is None:
        use = await unless_disconnected(request, model.wait_for_use(caller))
    engine, state = use.engine, request.scope["state"]
    state["engine"], state["model_use"] = engine, use
    return engine


def _beginning(conversation: Conversation) -> bytes:
    """Return the conversation up to the first message of its user, which all its requests have in common."""
    roles = [message.get("role") for message in conversation]
    length = roles.index("user") + 1 if "user" in roles else 1
    return encode(conversation[:length])
