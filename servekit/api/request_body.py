"""Read request bodies, with bounds on size, time and the memory that all bodies hold together."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

from msgspec import Struct
from starlette.requests import Request

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.api.body_budget import BodyBudget
from servekit.api.body_decoder import BodyDecoder, error_of, unpack
from servekit.api.endpoint import caller_of, mark, models_of
from servekit.api.mirroring import keep_body
from servekit.api.responses.generation import unless_disconnected
from servekit.api.responses.http import use_tgi_errors
from servekit.api.schemas.packed_body import (
    KINDS,
    MAX_INLINE_BYTES,
    TGI_KINDS,
    ChatBody,
    Refusal,
    choose_kind,
    decode_kind,
)
from servekit.errors import RequestTimeout, RequestTooLarge, UnsupportedEncoding
from servekit.requests.time_causes import TimeCause

MAX_BYTES_AT_ONCE = 2**13  # of a body that is decoded and used without a pause between

Body = TypeVar("Body", bound=Struct)
TgiBody = TypeVar("TgiBody", bound=Struct)
Chat = TypeVar("Chat", bound=ChatBody)


async def read_body(request: Request) -> bytearray:
    """Return the whole body. It is not copied: copying 8 MB holds the event loop for 5 ms.

    Raises RequestTooLarge as soon as the declared or received length is over a limit, QueueFull if all bodies together
    are over theirs, UnsupportedEncoding for a compressed body, and RequestTimeout for a slow one.
    """
    config = models_of(request).config
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise UnsupportedEncoding(
            f"content-encoding {encoding[:40]!r} is not supported; send the body uncompressed", param="content-encoding"
        )
    try:
        async with pause_tolerant_timeout(config.body_timeout):
            return await _read_up_to(config.max_body_bytes, request)
    except TimeoutError:
        raise RequestTimeout(
            f"the request body did not arrive within {config.body_timeout:g} s (body_timeout); send it faster"
        ) from None


async def read_small_body(request: Request) -> bytes:
    """Return the body of a route whose bodies are small, and are decoded on the event loop.

    Raises RequestTooLarge if it is larger than such a body may be, and what `read_body` raises.
    """
    body = await read_body(request)
    if len(body) > MAX_INLINE_BYTES:
        raise RequestTooLarge(f"the request body has {len(body)} bytes; the limit is {MAX_INLINE_BYTES} on this route")
    return bytes(body)


async def read(request: Request, kind: type[Body], tgi_kind: type[TgiBody] | None = None) -> Body | TgiBody:
    """Return the body, decoded and checked. `tgi_kind` is that of a body with `inputs`, where TGI has the same path.

    Raises InvalidRequest, and what `read_body` raises.
    """
    kinds: list[type[Struct]] = [kind] if tgi_kind is None else [kind, tgi_kind]
    wanted, _ = await _read(request, kinds)
    return cast("Body | TgiBody", wanted)


async def read_chat(request: Request, kind: type[Chat]) -> tuple[Chat, list[dict[str, Any]]]:
    """Return a chat, decoded and checked, and its conversation as chat templates expect it.

    Raises InvalidRequest, and what `read_body` raises.
    """
    wanted, conversation = await _read(request, [cast("type[Struct]", kind)])
    return wanted, wanted.conversation() if conversation is None else conversation


async def _read(request: Request, kinds: list[type[Any]]) -> tuple[Any, list[dict[str, Any]] | None]:
    body = await read_body(request)
    if len(body) <= MAX_INLINE_BYTES:
        small = bytes(body)
        kind = choose_kind(small, kinds)
        _note_kind(request, kind)
        decoded = decode_kind(small, kind)
        mark(request, TimeCause.BODY)
        keep_body(request, small)
        if len(small) > MAX_BYTES_AT_ONCE:
            await asyncio.sleep(0)  # what follows, for thousands of prompts, takes as long again
        return decoded, None
    decoder: BodyDecoder = request.app.state.body_decoder
    max_prompt_tokens = models_of(request).max_prompt_tokens
    work = decoder.decode(body, kinds, max_prompt_tokens, caller_of(request).tenant)
    packed = await unless_disconnected(request, work)
    _note_kind(request, KINDS[packed.kind])
    if isinstance(packed, Refusal):
        raise error_of(packed)
    unpacked = await unpack(packed)
    mark(request, TimeCause.BODY)
    return unpacked


def _note_kind(request: Request, kind: type[Struct]) -> None:
    if kind in TGI_KINDS:
        use_tgi_errors(request)


async def _read_up_to(limit: int, request: Request) -> bytearray:
    declared = request.headers.get("content-length", "0")
    budget: BodyBudget = request.state.body_budget
    body = bytearray()
    if declared.isdecimal() and int(declared) <= limit:
        # What has no room is refused before it is read. It is counted as it arrives, because it may never arrive.
        budget.check(request, int(declared))
        async for chunk in request.stream():
            budget.reserve(request, len(body) + len(chunk))
            body += chunk
            if len(body) > limit:
                break
        else:
            return body
    raise RequestTooLarge(
        f"the request body is larger than {limit} bytes (max_body_bytes); send fewer or shorter prompts"
    )
