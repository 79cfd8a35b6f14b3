"""OpenAI's API of responses: POST /v1/responses. Nothing is stored, so there is nothing to fetch or to continue."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint
from servekit.api.model_choice import engine_for
from servekit.api.request_body import read_chat
from servekit.api.responses.chat_submission import submit_chat
from servekit.api.responses.generation import answer
from servekit.api.responses.responses_api_format import ResponsesBuilder
from servekit.api.schemas.responses_api import AnyResponsesEvent, ResponseObject, ResponsesRequest


async def responses(request: Request) -> Response:
    """Answer a conversation, in OpenAI's format of responses. The model's chat template formats the prompt."""
    wanted, conversation = await read_chat(request, ResponsesRequest)
    engine = await engine_for(request, wanted.model, conversation)
    wanted.check()
    state, answer_format = await submit_chat(request, wanted.to_chat(), conversation)
    builder = ResponsesBuilder(wanted, state, answer_format, engine.config.model_name)
    return await answer(request, state, builder, bool(wanted.stream))


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/responses",
        responses,
        takes=(ResponsesRequest,),
        gives=(ResponseObject,),
        streams=(AnyResponsesEvent,),
        example={"input": "What color is the sky?", "max_output_tokens": 20},
    ),
]
