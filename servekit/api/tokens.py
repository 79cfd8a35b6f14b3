"""POST /tokenize and /detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.http import Endpoint, engine_of, read_body, respond, speaks_tgi
from servekit.api.openai import check_model
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
        spans = await engine.tokenizer.spans(text.inputs, text.add_special_tokens is not False)
        return respond([TgiTokenSpan(token_id, text.inputs[a:b], a, b) for token_id, a, b in spans])
    asked = decode(body, TokenizeRequest)
    check_model(engine.config, asked.model)
    (token_ids,) = await engine.tokenizer.encode([asked.prompt], asked.add_special_tokens is not False)
    texts = [engine.tokenizer.decode([token_id]) for token_id in token_ids] if asked.return_token_strs else None
    return respond(TokenizeResponse(len(token_ids), engine.manager.max_total_tokens, token_ids, texts))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    engine = engine_of(request)
    asked = decode(await read_body(request), DetokenizeRequest)
    check_model(engine.config, asked.model)
    return respond(DetokenizeResponse(engine.tokenizer.decode(asked.tokens, bool(asked.skip_special_tokens))))


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
