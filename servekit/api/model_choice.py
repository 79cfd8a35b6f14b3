"""Choose the model of a request, and wait until it is loaded.

A request uses its model until it has ended: meanwhile the model is not unloaded. `BodyBudget` ends the use, with all
else that a request holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from starlette.requests import Request

from servekit.api.endpoint import caller_of, mark, models_of
from servekit.api.mirroring import note_copy
from servekit.api.responses.generation import unless_disconnected
from servekit.api.schemas.json_body import encode
from servekit.engine.adapted_model import AdaptedModel, find_adapted
from servekit.engine.interface import (
    Engine,
    GeneratingEngine,
    InferringEngine,
    PredictingEngine,
    ServedModel,
    generates,
    infers,
    predicts,
)
from servekit.engine.model_kind import GENERATE
from servekit.engine.model_names import ANY_MODEL, MAX_NAME_SHOWN, listed
from servekit.errors import InvalidRequest, WorkerNotReady
from servekit.protocol.prediction import PredictorKind
from servekit.requests.inference import INFER
from servekit.requests.time_causes import TimeCause

Conversation = list[dict[str, Any]]

# What models of each kind do, and by which route; and what those of other kinds do not do.
DOES: dict[str, str] = {
    GENERATE: "generates text",
    PredictorKind.EMBED: "computes embeddings: POST /v1/embeddings",
    PredictorKind.RERANK: "scores documents for a query: POST /v1/rerank",
    PredictorKind.CLASSIFY: "classifies: POST /predict",
    INFER: "computes tensors: POST /predict",
}
LACKS: dict[str, str] = {
    GENERATE: "generates no text",
    PredictorKind.EMBED: "computes no embeddings",
    PredictorKind.RERANK: "scores no documents",
    PredictorKind.CLASSIFY: "classifies nothing",
    INFER: "computes no tensors",
}
MAX_KEY_CHARACTERS = 2**16  # so many characters of a conversation are in its key


async def engine_for(
    request: Request,
    name: str | None,
    conversation: Conversation | None = None,
    adapter: tuple[str, str | None] = ("adapter_id", None),
) -> GeneratingEngine:
    """Return the engine of the model that a request names, which generates text; `engine_of` returns it from now on.

    Without a name it is the default model's. `adapter` is a field and the name of a LoRA adapter in it. `conversation`
    keeps the requests of a conversation at one model of an alias. Raises ModelNotFound, InvalidRequest for a model of
    another kind, ClientDisconnect, and what `wait_for_use` raises.
    """
    field, adapter_name = adapter
    adapted = None
    if adapter_name is not None:
        adapted, name = _find_adapter(request, name, field, adapter_name), adapter_name
    begin = None if conversation is None else lambda: _beginning(conversation)
    engine = await _use(request, name, GENERATE, begin, adapted)
    assert generates(engine)
    return engine


def _find_adapter(request: Request, name: str | None, field: str, adapter: str) -> AdaptedModel:
    """Return a model with an adapter: the model that the request names, if it names one.

    Raises InvalidRequest or ModelNotFound.
    """
    models, caller = models_of(request), caller_of(request)
    served = models.served(caller)
    anywhere = find_adapted(served, adapter, caller)
    if anywhere is None:
        known = listed(name for each in served for name in each.adapters_for(caller))
        has = f"this server has {known}" if known else "it has no adapters"
        raise InvalidRequest(
            f"{field}: the server has no adapter {adapter[:MAX_NAME_SHOWN]!r}; {has} (docs/lora.md)", param=field
        )
    if name is None or name in ANY_MODEL or name == adapter:
        return anywhere
    found = find_adapted([models.find(name, caller)], adapter, caller)
    if found is None:
        raise InvalidRequest(
            f"{field}: {adapter!r} is an adapter of the model {anywhere.parent.name!r}, and the request names "
            f"{name[:MAX_NAME_SHOWN]!r}",
            param=field,
        )
    return found


async def predictor_for(request: Request, name: str | None, kind: PredictorKind) -> PredictingEngine:
    """Return the engine of the model that a request names, which embeds, reranks or classifies.

    Raises what `engine_for` raises.
    """
    engine = await _use(request, name, kind)
    assert predicts(engine)
    return engine


async def classifier_for(request: Request, name: str | None) -> PredictingEngine | InferringEngine:
    """Return the engine of the model that a request names, which classifies, or computes tensors.

    Raises what `engine_for` raises.
    """
    named = models_of(request).find(name, caller_of(request), None, PredictorKind.CLASSIFY)
    engine = await _use(request, name, INFER if named.kind == INFER else PredictorKind.CLASSIFY)
    assert predicts(engine) or infers(engine)
    return engine


async def _use(
    request: Request,
    name: str | None,
    kind: str,
    conversation: Callable[[], bytes] | None = None,
    adapted: AdaptedModel | None = None,
) -> Engine:
    models, caller = models_of(request), caller_of(request)
    model = models.find(name, caller, conversation, kind) if adapted is None else adapted
    if model.kind != kind:
        raise _wrong_kind(model, kind, models.served(caller))
    note_copy(request, name, kind)
    use, state = model.begin_use(caller), request.scope["state"]
    if use is None:
        state["waits_for_model"] = True  # for the batches, whose other lines begin meanwhile
        if "may_not_wait" in state:  # a copy of a request, for which no other model may be unloaded
            raise WorkerNotReady(f"the model {model.name!r} cannot be used at once")
        use = await unless_disconnected(request, model.wait_for_use(caller))
        mark(request, TimeCause.MODEL)
    engine = use.engine
    state["engine"], state["model_use"] = engine, use
    if engine.kind != kind:  # the models file was read again while the request waited
        raise _wrong_kind(model, kind, models.served(caller))
    return engine


def _wrong_kind(model: ServedModel, kind: str, served: Sequence[ServedModel]) -> InvalidRequest:
    """Return the error for a model that does something else. `served` are those that the caller may use."""
    shown = listed(each.name for each in served if each.kind == kind)
    remedy = f"name {shown}" if shown else f"start a model of kind {kind} (--kind, if its files do not say so)"
    does = DOES.get(model.kind, f"is of kind {model.kind}")
    return InvalidRequest(
        f"the model {model.name!r} {does}; it {LACKS[kind]}. Please {remedy}.", param="model", code="not_supported"
    )


def _beginning(conversation: Conversation) -> bytes:
    """Return a key of the conversation up to the first message of its user, which all its requests have in common.

    Of a long beginning, the key has the first characters, and the length of the text in which it is cut. The key is
    made on the event loop, and hashed there for each model of an alias. So a longer text must not take longer here.
    """
    roles = [message.get("role") for message in conversation]
    length = roles.index("user") + 1 if "user" in roles else 1
    return encode(_Room(MAX_KEY_CHARACTERS).cut(conversation[:length]))


class _Room:
    """Counts how many characters of a conversation still fit into its key."""

    def __init__(self, num_characters: int) -> None:
        self._num_left = num_characters

    def cut(self, value: Any) -> Any:
        """Return as much of a value as there is room for.

        A text that is cut is replaced by its beginning and its length. A number, a boolean or null counts as one
        character, because it is small.
        """
        if isinstance(value, str):
            kept = value[: max(0, self._num_left)]
            self._num_left -= len(kept) + 1
            return kept if len(kept) == len(value) else [kept, len(value)]
        if isinstance(value, dict):
            return {str(self.cut(name)): self.cut(each) for name, each in takewhile(self._has_room, value.items())}
        if isinstance(value, list | tuple):
            return [self.cut(each) for each in takewhile(self._has_room, value)]
        self._num_left -= 1
        return value

    def _has_room(self, _: object) -> bool:
        return self._num_left > 0
