"""The native API: /generate, /generate_stream, /basic_generate and /abort_request.

POST /generate and /generate_stream are shared with TGI's clients; routes/shared_paths.py chooses between the two.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, caller_of, models_of
from servekit.api.model_choice import engine_for
from servekit.api.request_body import read
from servekit.api.responses.generation import answer, submit
from servekit.api.responses.http import respond
from servekit.api.responses.native_format import BasicResponseBuilder, NativeResponseBuilder
from servekit.api.schemas.json_body import decode_query
from servekit.api.schemas.native import (
    AbortRequest,
    AbortResponse,
    BasicGenerateResponse,
    GenerateRequest,
    StreamEvent,
)
from servekit.errors import InvalidRequest, ModelNotFound, RequestNotFound

EXAMPLE = {"prompt": "What color is the sky?", "max_tokens": 20}


async def generate(request: Request, wanted: GenerateRequest) -> Response:
    """Answer one prompt or a list of prompts; with `stream`, as events."""
    if wanted.stream:
        return await _stream(request, wanted)
    generation = wanted.to_generation_request()
    engine = await engine_for(request, wanted.model, adapter=("adapter_id", wanted.adapter_id))
    state = await submit(request, generation)
    builder = NativeResponseBuilder(state, engine.tokenizer, is_batch=not wanted.gives_one_text)
    return await answer(request, state, builder, stream=False)


async def generate_stream(request: Request, wanted: GenerateRequest) -> Response:
    """Answer one prompt as events."""
    return await _stream(request, wanted)


async def generate_stream_for_browsers(request: Request) -> Response:
    """Stream the answer to one prompt to a browser's EventSource, which can only send GET.

    The fields are query parameters: a list repeats its name, and an object is written as JSON. An EventSource connects
    again when a stream has ended, with the header Last-Event-ID. The answer to that is 204, which makes it stop.
    """
    if "last-event-id" in request.headers:
        return Response(status_code=204)
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    return await _stream(request, decode_query(query, GenerateRequest), numbers_events=True)


async def basic_generate(request: Request) -> Response:
    """Return the answer to one prompt as text, without any details."""
    wanted = _check_one_text(await read(request, GenerateRequest))
    for param in ("ttft_ms", "deadline_ms", "logprobs", "prompt_logprobs"):
        if getattr(wanted, param) is not None:
            raise InvalidRequest(
                f"POST /basic_generate returns text only and does not support {param}; use POST /generate", param=param
            )
    generation = wanted.to_generation_request()
    engine = await engine_for(request, wanted.model, adapter=("adapter_id", wanted.adapter_id))
    state = await submit(request, generation)
    return await answer(request, state, BasicResponseBuilder(state, engine.tokenizer), stream=False)


async def abort_request(request: Request) -> Response:
    """End a running or waiting request of the same tenant, of any API, by its id.

    Its client gets the answer as far as it is, with the finish reason `abort`.
    """
    wanted = await read(request, AbortRequest)
    request_id = wanted.wanted_id()
    num_aborted = await models_of(request).abort_request(caller_of(request).tenant, request_id)
    if not num_aborted:
        raise RequestNotFound(
            f"there is no unfinished request {request_id!r} of this tenant; send the X-Request-Id of one that runs",
            param="rid" if wanted.request_id is None else "request_id",
        )
    return respond(AbortResponse(num_aborted))


async def _stream(request: Request, wanted: GenerateRequest, numbers_events: bool = False) -> Response:
    generation = _check_one_text(wanted).to_generation_request()
    if generation.best_of > 1:
        raise InvalidRequest(
            f"best_of = {generation.best_of} cannot be streamed: the best answer is known only when all have ended; "
            "use POST /generate without stream",
            param="best_of",
        )
    engine = await engine_for(request, wanted.model, adapter=("adapter_id", wanted.adapter_id))
    state = await submit(request, generation)
    builder = NativeResponseBuilder(state, engine.tokenizer, numbers_events=numbers_events)
    return await answer(request, state, builder, stream=True)


def _check_one_text(wanted: GenerateRequest) -> GenerateRequest:
    """Raise InvalidRequest unless the request asks for one answer to one prompt."""
    if wanted.prompts is not None:
        raise InvalidRequest(
            "this route takes one prompt, as 'prompt'; for several 'prompts' use POST /generate without stream",
            param="prompts",
        )
    if not wanted.gives_one_text:
        raise InvalidRequest(
            f"n = {wanted.n}: this route returns one answer; for several use POST /generate without stream", param="n"
        )
    return wanted


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "GET",
        "/generate_stream",
        generate_stream_for_browsers,
        takes=(GenerateRequest,),
        not_in_query=("prompts", "n", "best_of", "stream"),
        streams=(StreamEvent,),
        example=EXAMPLE,
        own_errors=(ModelNotFound,),  # of a GET: `model` is a query parameter
    ),
    Endpoint(
        "POST",
        "/basic_generate",
        basic_generate,
        takes=(GenerateRequest,),
        gives=(BasicGenerateResponse,),
        example=EXAMPLE,
    ),
    Endpoint(
        "POST",
        "/abort_request",
        abort_request,
        takes=(AbortRequest,),
        gives=(AbortResponse,),
        own_errors=(RequestNotFound,),
        example={"rid": "my-request"},
    ),
]
