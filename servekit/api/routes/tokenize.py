"""POST /tokenize and /detokenize. POST /tokenize is shared with TGI's clients: see routes/shared_paths.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from servekit.aio.pause_tolerant_timer import pause_tolerant_timeout
from servekit.api.endpoint import Endpoint, caller_of
from servekit.api.model_choice import engine_for
from servekit.api.request_body import read
from servekit.api.responses.http import respond_at_length
from servekit.api.responses.long_json import ItemList
from servekit.api.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TgiTokenizeRequest,
    TgiTokenSpan,
    TokenizeRequest,
    TokenizeResponse,
)
from servekit.engine.interface import GeneratingEngine
from servekit.engine.tokenizer import MAX_SPANS, TooManyTokens
from servekit.errors import InvalidRequest, QueueFull

MAX_TOKENS = 2**19  # of a text; making a longer list holds the interpreter's lock for more than some milliseconds
TOKENS_PER_SLICE = 2**12  # of /detokenize; between two slices the event loop runs everything else
ENCODE_TIMEOUT_S = 60.0  # of a text, including the wait for others

Result = TypeVar("Result")


async def tokenize(request: Request, wanted: TokenizeRequest) -> Response:
    """Return the token ids of a text, in vLLM's format."""
    engine = await engine_for(request, wanted.model)
    tenant, special = caller_of(request).tenant, wanted.add_special_tokens is not False
    token_ids = await encode_text(engine, tenant, wanted.prompt, special, "prompt")
    limit, decode_one = engine.scheduler_config.max_total_tokens, engine.tokenizer.decode

    def response(items: ItemList) -> TokenizeResponse:
        texts = items(decode_one([token_id]) for token_id in token_ids) if wanted.return_token_strs else None
        return TokenizeResponse(len(token_ids), limit, items(token_ids), texts)

    return await respond_at_length(response, len(token_ids))


async def tokenize_for_tgi(request: Request, wanted: TgiTokenizeRequest) -> Response:
    """Return the tokens of a text and the characters that each covers, in TGI's format."""
    engine = await engine_for(request, None)
    text, tenant = wanted.inputs, caller_of(request).tenant
    engine.input_processor.check_text(text, "inputs")
    engine.tokenizer.check_queue(tenant, text)
    try:
        spans = await _in_time(engine.tokenizer.spans(tenant, text, wanted.add_special_tokens is not False))
    except TooManyTokens as error:
        raise _too_many_tokens(error, MAX_SPANS, "inputs") from None
    return await respond_at_length(
        lambda items: items(TgiTokenSpan(token_id, text[start:stop], start, stop) for token_id, start, stop in spans),
        len(spans),
    )


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    wanted = await read(request, DetokenizeRequest)
    engine = await engine_for(request, wanted.model)
    token_bytes = engine.tokenizer.token_bytes_of(bool(wanted.skip_special_tokens))
    assert engine.worker is not None
    vocab_size = engine.worker.model.vocab_size
    limit, text = engine.config.max_body_bytes, bytearray()
    for start in range(0, len(wanted.tokens), TOKENS_PER_SLICE):
        token_ids = wanted.tokens[start : start + TOKENS_PER_SLICE]
        if max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"tokens has {max(token_ids)}; the model's token ids are below {vocab_size}", param="tokens"
            )
        text += b"".join(map(token_bytes, token_ids))
        if len(text) > limit:
            raise InvalidRequest(
                f"the text of these tokens is longer than {limit} bytes (max_body_bytes); send fewer tokens",
                param="tokens",
            )
        await asyncio.sleep(0)
    return await respond_at_length(
        lambda _: DetokenizeResponse(text.decode("utf-8", "replace")),
        len(wanted.tokens),
    )


async def encode_text(
    engine: GeneratingEngine, tenant: str, text: str, add_special_tokens: bool, param: str
) -> Sequence[int]:
    """Return the token ids of a text that a request sent. Raises InvalidRequest, or QueueFull if it takes too long."""
    engine.input_processor.check_text(text, param)
    engine.tokenizer.check_queue(tenant, text)
    try:
        (token_ids,) = await _in_time(engine.tokenizer.encode(tenant, [text], add_special_tokens, MAX_TOKENS))
    except TooManyTokens as error:
        raise _too_many_tokens(error, MAX_TOKENS, param) from None
    return token_ids


async def _in_time(encoding: Awaitable[Result]) -> Result:
    try:
        async with pause_tolerant_timeout(ENCODE_TIMEOUT_S):
            return await encoding
    except TimeoutError:
        raise QueueFull(
            f"the text was not encoded within {ENCODE_TIMEOUT_S:g} s, because others were encoded before it; try again "
            "later, or send shorter texts",
            retry_after_s=5,
        ) from None


def _too_many_tokens(error: TooManyTokens, limit: int, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} has {error.num_tokens} tokens; the limit of this route is {limit}: send the text in parts",
        param=param,
    )


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        takes=(DetokenizeRequest,),
        gives=(DetokenizeResponse,),
        example={"tokens": [72, 105]},
    ),
]
