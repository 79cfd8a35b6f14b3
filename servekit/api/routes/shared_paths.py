"""The paths that two APIs share. A body with the field `inputs` is in TGI's format, any other in the path's own.

The format must be read from the body: clients of both APIs use these paths, with the same headers.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint
from servekit.api.request_body import read
from servekit.api.routes import native, tgi, tokenize
from servekit.api.schemas.native import BatchGenerateResponse, GenerateRequest, GenerateResponse, StreamEvent
from servekit.api.schemas.tgi import TgiRequest, TgiResponse, TgiStreamEvent
from servekit.api.schemas.tokens import TgiTokenizeRequest, TgiTokenSpan, TokenizeRequest, TokenizeResponse


async def generate(request: Request) -> Response:
    """Generate text for one prompt or a list of prompts. The answer is sent when it is complete.

    With `stream` it is sent as server-sent events. A body with `inputs` is answered in TGI's format.
    """
    wanted = await read(request, GenerateRequest, TgiRequest)
    if isinstance(wanted, TgiRequest):
        return await tgi.generate(request, wanted)
    return await native.generate(request, wanted)


async def generate_stream(request: Request) -> Response:
    """Generate text for one prompt, as a stream with one server-sent event for each token.

    The last event has the whole text. A body with `inputs` is answered in TGI's format.
    """
    wanted = await read(request, GenerateRequest, TgiRequest)
    if isinstance(wanted, TgiRequest):
        return await tgi.generate(request, wanted, stream=True)
    return await native.generate_stream(request, wanted)


async def tokenize_text(request: Request) -> Response:
    """Return the token ids of a text.

    A body with `inputs` is answered in TGI's format: tokens with the characters that each one covers.
    """
    wanted = await read(request, TokenizeRequest, TgiTokenizeRequest)
    if isinstance(wanted, TgiTokenizeRequest):
        return await tokenize.tokenize_for_tgi(request, wanted)
    return await tokenize.tokenize(request, wanted)


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/generate",
        generate,
        takes=(GenerateRequest, TgiRequest),
        gives=(GenerateResponse, BatchGenerateResponse, TgiResponse),
        streams=(StreamEvent, TgiStreamEvent),
        example=native.EXAMPLE,
    ),
    Endpoint(
        "POST",
        "/generate_stream",
        generate_stream,
        takes=(GenerateRequest, TgiRequest),
        streams=(StreamEvent, TgiStreamEvent),
        example=native.EXAMPLE,
    ),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize_text,
        takes=(TokenizeRequest, TgiTokenizeRequest),
        gives=(TokenizeResponse, list[TgiTokenSpan]),
        example={"prompt": "What color is the sky?"},
    ),
]
