"""TGI's API: bodies with `inputs` and `parameters`, on POST /, /generate and /generate_stream.

POST / is where Hugging Face's clients send every task of a model whose URL they are given. This server generates text;
requests that are recognizably for another task are refused with an error that names the task.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, engine_of
from servekit.api.request_body import read_body
from servekit.api.responses.generation import answer, submit
from servekit.api.responses.http import use_tgi_errors
from servekit.api.responses.tgi_format import TgiResponseBuilder
from servekit.api.schemas.json_body import MAX_BODY_DECODED_TWICE, decode
from servekit.api.schemas.tgi import TgiRequest, TgiResponse, TgiStreamEvent, other_task
from servekit.errors import InvalidRequest


async def root(request: Request) -> Response:
    """Generate text for TGI's clients, which send requests to the server's bare URL.

    With `stream` the answer is events, otherwise a list with one object.
    """
    # huggingface_hub reads an object, too. Its classes for other tasks need a list: an object makes them fail, where a
    # list would become, say, a label without a name.
    return await generate(request, await read_body(request), in_list=not _is_from_huggingface_hub(request))


async def generate(request: Request, body: bytes, stream: bool = False, in_list: bool = False) -> Response:
    """Answer a body in TGI's format. It is streamed if the route or the body says so."""
    use_tgi_errors(request)
    wanted = _decode(request, body)
    stream = stream or bool(wanted.stream)
    generation = wanted.to_generation_request(stream)
    if stream and generation.best_of > 1:
        raise InvalidRequest(
            f"best_of = {generation.best_of} cannot be streamed: the best answer is known only when all have ended; "
            "leave out stream",
            param="parameters.best_of",
        )
    state = await submit(request, generation)
    builder = TgiResponseBuilder(wanted, state, engine_of(request).tokenizer, in_list)
    return await answer(request, state, builder, stream)


def _decode(request: Request, body: bytes) -> TgiRequest:
    """Decode the body. Raises InvalidRequest, with the task's name if the request is recognizably for another task."""
    try:
        wanted = decode(body, TgiRequest)
    except InvalidRequest:
        task = other_task(body) if len(body) <= MAX_BODY_DECODED_TWICE else None
        if task is not None:
            raise _unsupported(task) from None
        raise
    # Two more tasks can be recognized by the client that sends them. huggingface_hub's text_generation always sends
    # `parameters`. Its text_classification, fill_mask, summarization and translation do, too, and without options they
    # send the very same request as text_generation.
    if _is_from_huggingface_hub(request) and wanted.parameters is None and wanted.stream is None:
        raise _unsupported("feature_extraction")
    if request.headers.get("accept", "").startswith("image/"):
        raise _unsupported("text_to_image")
    return wanted


def _is_from_huggingface_hub(request: Request) -> bool:
    return "hf_hub/" in request.headers.get("user-agent", "")


def _unsupported(task: str) -> InvalidRequest:
    return InvalidRequest(
        f"the request is for the task {task}; this server supports text_generation and chat_completion only",
        code="not_supported",
    )


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/",
        root,
        takes=(TgiRequest,),
        gives=(list[TgiResponse],),
        streams=(TgiStreamEvent,),
        example={"inputs": "What color is the sky?", "parameters": {"max_new_tokens": 20, "details": True}},
    )
]
