"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.http import Endpoint, engine_of, read_body, respond_at_length, speaks_tgi
from servekit.api.openai import check_model
from servekit.errors import InvalidRequest
from servekit.schemas.decoding import decode, is_for_tgi
from servekit.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TgiTokenizeRequest,
    TgiTokenSpan,
    TokenizeRequest,
    TokenizeResponse,
)


async def tokenize(request: Request) -> Response:
    """The token ids of a text; asked with `inputs`, with the characters that each covers."""
    engine = engine_of(request)
    body = await read_body(request)
    if is_for_tgi(body):
        speaks_tgi(request)
        text = decode(body, TgiTokenizeRequest)
        engine.intake.check_text(text.inputs, "inputs")
        spans = await engine.tokenizer.spans(text.inputs, text.add_special_tokens is not False)
        return await respond_at_length(
            lambda: [TgiTokenSpan(id_, text.inputs[a:b], a, b) for id_, a, b in spans], len(spans)
        )
    asked = decode(body, TokenizeRequest)
    check_model(engine.config, asked.model)
    engine.intake.check_text(asked.prompt, "prompt")
    (token_ids,) = await engine.tokenizer.encode([asked.prompt], asked.add_special_tokens is not False)
    limit, decode_one = engine.manager.config.max_total_tokens, engine.tokenizer.decode

    def told() -> TokenizeResponse:
        texts = [decode_one([token_id]) for token_id in token_ids] if asked.return_token_strs else None
        return TokenizeResponse(len(token_ids), limit, token_ids, texts)

    return await respond_at_length(told, len(token_ids))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    engine = engine_of(request)
    asked = decode(await read_body(request), DetokenizeRequest)
    check_model(engine.config, asked.model)
    assert engine.worker is not None
    vocab_size = engine.worker.model.vocab_size
    if asked.tokens and max(asked.tokens) >= vocab_size:
        raise InvalidRequest(f"tokens has {max(asked.tokens)}; the model has {vocab_size} tokens", param="tokens")
    return await respond_at_length(
        lambda: DetokenizeResponse(engine.tokenizer.decode(asked.tokens, bool(asked.skip_special_tokens))),
        len(asked.tokens),
    )


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        *("POST", "/tokenize", tokenize),
        takes=(TokenizeRequest, TgiTokenizeRequest),
        gives=(TokenizeResponse, list[TgiTokenSpan]),
        example={"prompt": "What color is the sky?"},
    ),
    Endpoint(
        *("POST", "/detokenize", detokenize),
        takes=(DetokenizeRequest,),
        gives=(DetokenizeResponse,),
        example={"tokens": [72, 105]},
    ),
]
