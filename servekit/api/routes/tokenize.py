"""POST /tokenize and /detokenize. POST /tokenize is shared with TGI's clients: see routes/shared_paths.py."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, engine_of
from servekit.api.request_body import read
from servekit.api.responses.http import respond_at_length
from servekit.api.routes.openai import check_model
from servekit.api.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TgiTokenizeRequest,
    TgiTokenSpan,
    TokenizeRequest,
    TokenizeResponse,
)
from servekit.errors import InvalidRequest


async def tokenize(request: Request, wanted: TokenizeRequest) -> Response:
    """Return the token ids of a text, in vLLM's format."""
    engine = engine_of(request)
    check_model(engine.config, wanted.model)
    engine.input_processor.check_text(wanted.prompt, "prompt")
    (token_ids,) = await engine.tokenizer.encode([wanted.prompt], wanted.add_special_tokens is not False)
    limit, decode_one = engine.scheduler_config.max_total_tokens, engine.tokenizer.decode

    def response() -> TokenizeResponse:
        texts = [decode_one([token_id]) for token_id in token_ids] if wanted.return_token_strs else None
        return TokenizeResponse(len(token_ids), limit, token_ids, texts)

    return await respond_at_length(response, len(token_ids))


async def tokenize_for_tgi(request: Request, wanted: TgiTokenizeRequest) -> Response:
    """Return the tokens of a text and the characters that each covers, in TGI's format."""
    engine = engine_of(request)
    text = wanted.inputs
    engine.input_processor.check_text(text, "inputs")
    spans = await engine.tokenizer.spans(text, wanted.add_special_tokens is not False)
    return await respond_at_length(
        lambda: [TgiTokenSpan(token_id, text[start:stop], start, stop) for token_id, start, stop in spans], len(spans)
    )


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    engine = engine_of(request)
    wanted = await read(request, DetokenizeRequest)
    check_model(engine.config, wanted.model)
    assert engine.worker is not None
    vocab_size = engine.worker.model.vocab_size
    if wanted.tokens and max(wanted.tokens) >= vocab_size:
        raise InvalidRequest(
            f"tokens has {max(wanted.tokens)}; the model's token ids are below {vocab_size}", param="tokens"
        )
    return await respond_at_length(
        lambda: DetokenizeResponse(engine.tokenizer.decode(wanted.tokens, bool(wanted.skip_special_tokens))),
        len(wanted.tokens),
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
