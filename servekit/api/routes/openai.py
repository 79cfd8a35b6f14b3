"""OpenAI's API: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint, engine_of
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
from servekit.config import ServeConfig
from servekit.errors import ModelNotFound

# Names that clients of one-model servers send: huggingface_hub sends "dummy", TGI's own clients "tgi".
ANY_MODEL = ("", "dummy", "tgi")


async def completions(request: Request) -> Response:
    """Continue one or several texts, in OpenAI's format."""
    engine = engine_of(request)
    wanted = await read(request, CompletionRequest)
    check_model(engine.config, wanted.model)
    state = await submit(request, wanted.to_generation_request())
    builder = CompletionResponseBuilder(wanted, state, engine.tokenizer, new_id("cmpl"), engine.config.model_name)
    return await answer(request, state, builder, bool(wanted.stream))


async def chat_completions(request: Request) -> Response:
    """Write the next message of a conversation, in OpenAI's format. The model's chat template formats the prompt."""
    engine = engine_of(request)
    wanted, conversation = await read_chat(request, ChatCompletionRequest)
    check_model(engine.config, wanted.model)
    wanted.check()
    state, answer_format = await submit_chat(request, wanted, conversation)
    builder = ChatResponseBuilder(
        wanted, state, engine.tokenizer, new_id("chatcmpl"), engine.config.model_name, answer_format
    )
    return await answer(request, state, builder, bool(wanted.stream))


# -- models ------------------------------------------------------------------------------------------------------------


def check_model(config: ServeConfig, name: str | None) -> None:
    """Raise ModelNotFound if the name is not the served model's."""
    if name is not None and name not in (*ANY_MODEL, config.model_name, config.model):
        raise ModelNotFound(
            f"The model {name[:100]!r} does not exist. This server has {config.model_name!r}.", param="model"
        )


async def models(request: Request) -> Response:
    """List the models: this server has one."""
    return respond(ModelList([_model(request)]))


async def model(request: Request) -> Response:
    """Describe one model."""
    # In a body an empty name means the served model. In a path it does not: "/" is a name that no model has.
    check_model(engine_of(request).config, request.path_params["model"] or "/")
    return respond(_model(request))


def _model(request: Request) -> Model:
    engine = engine_of(request)
    return Model(
        engine.config.model_name,
        request.app.state.created_s,
        engine.scheduler_config.max_total_tokens,
        root=engine.config.model,
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
