"""Anthropic's API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, caller_of
from servekit.api.model_choice import engine_for
from servekit.api.request_body import read_chat
from servekit.api.responses.anthropic_format import AnthropicResponseBuilder
from servekit.api.responses.chat_submission import may_reason, render, submit_chat
from servekit.api.responses.collect import new_id
from servekit.api.responses.generation import answer, unless_disconnected
from servekit.api.responses.http import respond
from servekit.api.routes.tokenize import encode_text
from servekit.api.schemas.anthropic import (
    AnthropicError,
    AnthropicEvent,
    AnthropicMessage,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)


async def messages(request: Request) -> Response:
    """Write the next message of a conversation, in Anthropic's format. The model's chat template formats the prompt."""
    wanted, conversation = await read_chat(request, MessagesRequest)
    engine = await engine_for(request, wanted.model, conversation)
    wanted.check()
    chat = wanted.to_chat()
    if engine.takes_messages or not may_reason(engine):
        chat.thinking_token_budget = None  # the model uses none of it, or its server does not take one
    state, answer_format = await submit_chat(request, chat, conversation)
    builder = AnthropicResponseBuilder(state, answer_format, new_id("msg", "_"), engine.config.model_name)
    return await answer(request, state, builder, bool(wanted.stream))


async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation's prompt, in Anthropic's format."""
    wanted, conversation = await read_chat(request, CountTokensRequest)
    engine, tenant = await engine_for(request, wanted.model, conversation), caller_of(request).tenant
    wanted.check()
    text = await unless_disconnected(request, render(engine, tenant, wanted.to_chat(), conversation))
    token_ids = await encode_text(engine, tenant, text, add_special_tokens=False, param="messages")
    return respond(TokenCount(len(token_ids)))


_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "What color is the sky?"}]}
ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/messages",
        messages,
        takes=(MessagesRequest,),
        gives=(AnthropicMessage,),
        streams=(AnthropicEvent, AnthropicError),
        error=AnthropicError,
        example=_EXAMPLE | {"max_tokens": 20},
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        takes=(CountTokensRequest,),
        gives=(TokenCount,),
        error=AnthropicError,
        example=_EXAMPLE,
    ),
]
