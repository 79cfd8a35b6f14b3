"""TGI's API: bodies with `inputs` and `parameters`, on POST /, /generate and /generate_stream.

POST / is where Hugging Face's clients send every task of a model whose URL they are given. This server generates text;
requests that are recognizably for another task are refused with an error that names the task.
"""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, models_of
from servekit.api.model_choice import engine_for
from servekit.api.request_body import read
from servekit.api.responses.generation import answer, submit
from servekit.api.responses.tgi_format import TgiResponseBuilder
from servekit.api.schemas.tgi import TgiRequest, TgiResponse, TgiStreamEvent, unsupported_task
from servekit.errors import InvalidRequest


async def root(request: Request) -> Response:
    """Generate text for TGI's clients, which send requests to the server's bare URL.

    With `stream` the answer is events, otherwise a list with one object.
    """
    # huggingface_hub reads an object, too. Its classes for other tasks need a list: an object makes them fail, where a
    # list would become, say, a label without a name.
    return await generate(request, await read(request, TgiRequest), in_list=not _is_from_huggingface_hub(request))


async def generate(request: Request, wanted: TgiRequest, stream: bool = False, in_list: bool = False) -> Response:
    """Answer a body in TGI's format. It is streamed if the route or the body says so."""
    _check_task(request, wanted)
    stream = stream or bool(wanted.stream)
    generation = wanted.to_generation_request(stream)
    if stream and generation.best_of > 1:
        raise InvalidRequest(
            f"best_of = {generation.best_of} cannot be streamed: the best answer is known only when all have ended; "
            "leave out stream",
            param="parameters.best_of",
        )
    name = wanted.model if models_of(request).has_choice else None
    engine = await engine_for(request, name, adapter=("parameters.adapter_id", wanted.given_parameters.adapter_id))
    if stream and engine.takes_messages and not wanted.given_parameters.top_n_tokens:
        generation = replace(generation, logprobs=None)  # these events can do without, and a remote model has none
    state = await submit(request, generation)
    builder = TgiResponseBuilder(wanted, state, engine.tokenizer, in_list)
    return await answer(request, state, builder, stream)


def _check_task(request: Request, wanted: TgiRequest) -> None:
    """Raise InvalidRequest, with the task's name, if the request is recognizably for another task."""
    # By their fields, bodies for other tasks were refused already. Two more tasks can be recognized by the client that
    # sends them. huggingface_hub's text_generation always sends `parameters`. Its text_classification, fill_mask,
    # summarization and translation do, too, and without options they send the very same request as text_generation.
    if _is_from_huggingface_hub(request) and wanted.parameters is None and wanted.stream is None:
        raise unsupported_task("feature_extraction")
    if request.headers.get("accept", "").startswith("image/"):
        raise unsupported_task("text_to_image")


def _is_from_huggingface_hub(request: Request) -> bool:
    return "hf_hub/" in request.headers.get("user-agent", "")


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
