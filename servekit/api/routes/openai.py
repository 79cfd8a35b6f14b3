"""OpenAI's API: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, caller_of, models_of
from servekit.api.model_choice import engine_for
from servekit.api.request_body import read, read_chat
from servekit.api.responses.chat_submission import submit_chat
from servekit.api.responses.collect import new_id
from servekit.api.responses.generation import answer, submit
from servekit.api.responses.http import respond
from servekit.api.responses.openai_format import ChatResponseBuilder, CompletionResponseBuilder
from servekit.api.schemas.openai import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    Model,
    ModelList,
)
from servekit.engine.adapted_model import AdaptedModel, adapted_models
from servekit.engine.interface import ServedModel


async def completions(request: Request) -> Response:
    """Continue one or several texts, in OpenAI's format."""
    wanted = await read(request, CompletionRequest)
    engine = await engine_for(request, wanted.model)
    state = await submit(request, wanted.to_generation_request())
    builder = CompletionResponseBuilder(wanted, state, engine.tokenizer, new_id("cmpl"), engine.config.model_name)
    return await answer(request, state, builder, bool(wanted.stream))


async def chat_completions(request: Request) -> Response:
    """Write the next message of a conversation, in OpenAI's format. The model's chat template formats the prompt."""
    wanted, conversation = await read_chat(request, ChatCompletionRequest)
    engine = await engine_for(request, wanted.model, conversation)
    wanted.check()
    state, answer_format = await submit_chat(request, wanted, conversation)
    builder = ChatResponseBuilder(
        wanted, state, engine.tokenizer, new_id("chatcmpl"), engine.config.model_name, answer_format
    )
    return await answer(request, state, builder, bool(wanted.stream))


# -- models ------------------------------------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    """List the models that the caller may use."""
    caller = caller_of(request)
    served = models_of(request).served(caller)
    return respond(ModelList([_describe(request, each) for each in (*served, *adapted_models(served, caller))]))


async def model(request: Request) -> Response:
    """Describe one model."""
    # In a body an empty name means the default model. In a path it does not: "/" is a name that no model has.
    found = models_of(request).find(request.path_params["model"] or "/", caller_of(request))
    return respond(_describe(request, found))


def _describe(request: Request, served: ServedModel) -> Model:
    return Model(
        served.name,
        request.app.state.created_s,
        served.max_prompt_tokens,
        root=served.path if isinstance(served, AdaptedModel) else served.config.model,
        parent=served.parent.name if isinstance(served, AdaptedModel) else None,
        kind=served.kind,
        state=served.state if models_of(request).has_choice else UNSET,
    )


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What color is the sky?"}], "max_tokens": 20}
ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/completions",
        completions,
        takes=(CompletionRequest,),
        gives=(CompletionResponse,),
        streams=(CompletionResponse,),
        example={"prompt": "What color is the sky?", "max_tokens": 20},
        in_batches=True,
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        takes=(ChatCompletionRequest,),
        gives=(ChatCompletionResponse,),
        streams=(ChatCompletionChunk,),
        example=_CHAT,
        in_batches=True,
    ),
    Endpoint("GET", "/v1/models", models, gives=(ModelList,)),
    Endpoint("GET", "/v1/models/{model:path}", model, gives=(Model,)),
]
