"""Operators load and unload models, and divide and remove aliases: of servers with several models.

Where API keys are needed, these routes need one with `admin = true`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, models_of
from servekit.api.operators import check_admin
from servekit.api.request_body import read_small_body
from servekit.api.responses.generation import unless_disconnected
from servekit.api.responses.http import respond
from servekit.api.schemas.json_body import decode
from servekit.errors import InvalidRequest, ModelNotFound


class ModelStatus(Struct):
    """A model, and what it does: cold, waiting, loading, ready, unloading or failed."""

    id: str
    state: str


class DivideAlias(Struct, kw_only=True, forbid_unknown_fields=True):
    """How an alias divides requests: the weight of each model, what stays at its model, and who gets copies."""

    models: dict[str, Annotated[float, Meta(ge=0.0, le=1e6)]]
    sticky: Literal["key", "conversation"] | None = None  # as before; key for a new alias
    mirror: str | None = None
    mirror_percent: Annotated[float, Meta(ge=0.0, le=100.0)] = 100.0


class Aliases(Struct, omit_defaults=True):
    """Of each alias: the weights of models, what keeps requests at one of them, and the percentage that is copied."""

    aliases: Mapping[str, Mapping[str, float]]
    sticky: Mapping[str, Literal["key", "conversation"]] = {}
    mirrors: Mapping[str, Mapping[str, float]] = {}


async def load_model(request: Request) -> Response:
    """Load a model, and answer when it is loaded. It may have to wait until others have made room."""
    check_admin(request)
    model = await unless_disconnected(request, models_of(request).load_model(request.path_params["model"]))
    return respond(ModelStatus(model.name, model.state))


async def unload_model(request: Request) -> Response:
    """Unload a model as soon as no request uses it. The next request that names it loads it again."""
    check_admin(request)
    model = models_of(request).unload_model(request.path_params["model"])
    return respond(ModelStatus(model.name, model.state))


async def list_aliases(request: Request) -> Response:
    """List the aliases that divide requests, and the weight of each model."""
    check_admin(request)
    return _aliases(request)


async def divide_alias(request: Request) -> Response:
    """Let an alias divide requests among models by weight, from the next request on, until the file is read again."""
    check_admin(request)
    wanted = decode(await read_small_body(request), DivideAlias)
    models_of(request).divide(
        *(request.path_params["alias"], wanted.models, wanted.sticky, wanted.mirror, wanted.mirror_percent)
    )
    return _aliases(request)


async def remove_alias(request: Request) -> Response:
    """Remove an alias that divides requests, until the file is read again."""
    check_admin(request)
    models_of(request).remove_alias(request.path_params["alias"])
    return _aliases(request)


def _aliases(request: Request) -> Response:
    models = models_of(request)
    return respond(Aliases(models.divided(), models.sticky(), models.mirrored()))


ENDPOINTS: list[Endpoint] = [
    Endpoint("POST", "/v1/models/{model:path}/load", load_model, gives=(ModelStatus,), own_errors=(InvalidRequest,)),
    Endpoint(
        "POST", "/v1/models/{model:path}/unload", unload_model, gives=(ModelStatus,), own_errors=(InvalidRequest,)
    ),
    Endpoint("GET", "/v1/aliases", list_aliases, gives=(Aliases,)),
    Endpoint(
        "POST",
        "/v1/aliases/{alias:path}",
        divide_alias,
        takes=(DivideAlias,),
        gives=(Aliases,),
        example={"models": {"a": 90, "b": 10}, "sticky": "key"},
    ),
    Endpoint(
        "DELETE",
        "/v1/aliases/{alias:path}",
        remove_alias,
        gives=(Aliases,),
        own_errors=(InvalidRequest, ModelNotFound),
    ),
]
