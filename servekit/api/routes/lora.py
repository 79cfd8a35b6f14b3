"""Operators load and unload LoRA adapters at run time, by vLLM's routes.

Where API keys are needed, these routes need one with `admin = true`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from servekit.api.endpoint import Endpoint, caller_of, models_of
from servekit.api.model_choice import engine_for
from servekit.api.operators import check_admin
from servekit.api.request_body import read_small_body
from servekit.api.schemas.common_fields import described
from servekit.api.schemas.json_body import decode
from servekit.engine.interface import Adapters
from servekit.errors import InvalidRequest, ModelNotFound


class LoadLoraAdapter(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load."""

    lora_name: Annotated[str, described("name that requests give as model")]
    lora_path: Annotated[str, described("directory of the adapter on the server, in PEFT's format")]
    model: Annotated[str | None, described("the model that it changes; default: the server's default model")] = None


class UnloadLoraAdapter(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter to unload."""

    lora_name: Annotated[str, described("name of the adapter")]
    lora_int_id: Annotated[int | None, described("ignored: vLLM's clients may send it")] = None
    model: Annotated[str | None, described("the model that it changes; default: the server's default model")] = None


async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter; requests name it as their model from then on."""
    check_admin(request)
    wanted = decode(await read_small_body(request), LoadLoraAdapter)
    adapters = await _adapters(request, wanted.model)
    if wanted.lora_name not in adapters.paths and _is_taken(request, wanted.lora_name):
        raise InvalidRequest(
            f"{wanted.lora_name[:200]!r} is the name of a model or of another model's adapter; choose another name",
            param="lora_name",
        )
    await adapters.load(wanted.lora_name, wanted.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' added successfully.")


async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter. Requests that use it are answered to their end."""
    check_admin(request)
    wanted = decode(await read_small_body(request), UnloadLoraAdapter)
    adapters = await _adapters(request, wanted.model)
    await adapters.unload(wanted.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' removed successfully.")


async def _adapters(request: Request, model: str | None) -> Adapters:
    engine = await engine_for(request, model)
    if engine.adapters is None:
        raise InvalidRequest(
            f"the model {engine.config.model_name!r} takes no LoRA adapters; start the server with --enable-lora",
            code="not_supported",
        )
    return engine.adapters


def _is_taken(request: Request, name: str) -> bool:
    try:
        models_of(request).find(name, caller_of(request))
    except ModelNotFound:
        return False
    return True


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        load_lora_adapter,
        takes=(LoadLoraAdapter,),
        example={"lora_name": "sql", "lora_path": "/adapters/sql"},
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        unload_lora_adapter,
        takes=(UnloadLoraAdapter,),
        example={"lora_name": "sql"},
    ),
]
