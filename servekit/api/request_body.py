"""Read request bodies, with bounds on size, time and the memory that all bodies hold together."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from msgspec import Struct
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.api.body_decoder import BodyDecoder, error_of, unpack
from servekit.api.endpoint import caller_of, mark, models_of
from servekit.api.mirroring import note_copy
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
from servekit.engine.caller import ANONYMOUS
from servekit.engine.interface import ModelUse
from servekit.engine.request_state import RequestState
from servekit.errors import QueueFull, RequestTimeout, RequestTooLarge, UnsupportedEncoding
from servekit.shared_budget import SharedBudget
from servekit.time_causes import TimeCause

# The first bytes of each body are not counted. When large bodies fill the budget, small requests still pass; what the
# uncounted bytes add up to is bounded by max_connections.
UNCOUNTED_BODY_BYTES = 2**14
BODY_RETRY_AFTER_S = 5

Body = TypeVar("Body", bound=Struct)
TgiBody = TypeVar("TgiBody", bound=Struct)
Chat = TypeVar("Chat", bound=ChatBody)


class BodyBudget:
    """Bound the bytes that all request bodies hold in memory. An ASGI layer: it releases a body when its request ends.

    Releasing it earlier would undercount. While sequences wait and run, handlers hold the body or objects made from it.
    The scheduler's own bounds count tokens, which do not cover whitespace, user names and truncated prompts. What a
    request's result may take is released here, too: until then, the answer is in memory. So is its model, which may be
    unloaded from then on.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self.budget = SharedBudget(max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state.update(body_budget=self, num_body_bytes=0)
        try:
            await self._app(scope, receive, send)
        finally:
            self.budget.release(state.get("caller", ANONYMOUS).tenant, state["num_body_bytes"])
            request_state: RequestState | None = state.get("request_state")
            if request_state is not None:
                request_state.release_result()
            model_use: ModelUse | None = state.get("model_use")
            if model_use is not None:
                model_use.release()

    def reserve(self, request: Request, length: int) -> None:
        """Count the request's body, which now has `length` bytes. Raises as `check` does, and then counts no more."""
        more = self.check(request, length)
        if more > 0:
            self.budget.take(caller_of(request).tenant, more)
            request.state.num_body_bytes += more

    def check(self, request: Request, length: int) -> int:
        """Return how many bytes `reserve` would count.

        Raises RequestTooLarge for more than the tenant may ever hold, and QueueFull for more than it may hold now.
        """
        budget, tenant = self.budget, caller_of(request).tenant
        most = UNCOUNTED_BODY_BYTES + budget.max_share(tenant)
        if length > most:
            raise RequestTooLarge(
                f"the request body has {length} bytes or more; the bodies of one tenant may have {most} bytes (as "
                f"max_total_body_bytes = {budget.limit} is shared); send fewer or shorter prompts"
            )
        more: int = length - UNCOUNTED_BODY_BYTES - request.state.num_body_bytes
        if more > 0 and not budget.has_room(tenant, more):
            raise QueueFull(
                f"request bodies hold {budget.total} bytes of memory{budget.describe_share(tenant)}; the limit is "
                f"{budget.limit} (max_total_body_bytes). Try again in {BODY_RETRY_AFTER_S} s.",
                retry_after_s=BODY_RETRY_AFTER_S,
            )
        return more


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
        note_copy(request, getattr(decoded, "model", None), small)
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
