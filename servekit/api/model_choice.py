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
from servekit.engine.no_generation import ROUTES
from servekit.errors import InvalidRequest
from servekit.protocol.prediction import PredictorKind

Conversation = list[dict[str, Any]]

# What models of each kind do, and what those of other kinds do not do.
DOES: dict[str, str] = {GENERATE: "generates text", **ROUTES}
LACKS: dict[str, str] = {
    GENERATE: "generates no text",
    PredictorKind.EMBED: "computes no embeddings",
    PredictorKind.RERANK: "scores no documents",
    PredictorKind.CLASSIFY: "classifies nothing",
}


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
        does = DOES.get(model.kind, f"is of kind {model.kind}")
        raise InvalidRequest(
            f"the model {model.name!r} {does}; it {LACKS[kind]}. Name or start a model of kind {kind} (--kind, if its "
            "files do not say so)",
            param="model",
            code="not_supported",
        )
    use, state = model.begin_use(), request.scope["state"]
    if use is None:
        state["waits_for_model"] = True  # for the batches, whose other lines begin meanwhile
        use = await unless_disconnected(request, model.wait_for_use(caller))
    engine = use.engine
    state["engine"], state["model_use"] = engine, use
    return engine


def _beginning(conversation: Conversation) -> bytes:
    """Return the conversation up to the first message of its user, which all its requests have in common."""
    roles = [message.get("role") for message in conversation]
    length = roles.index("user") + 1 if "user" in roles else 1
    return encode(conversation[:length])
