"""OpenAI's door: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.answers import new_id
from servekit.api.completions import ChatTeller, CompletionTeller, Teller
from servekit.api.event_stream import EventStream, event
from servekit.api.http import (
    Endpoint,
    answers_to,
    engine_of,
    length,
    read_body,
    respond,
    respond_at_length,
    submit,
    unless_disconnected,
)
from servekit.config import ServeConfig
from servekit.engine import LLMEngine
from servekit.errors import ModelNotFound
from servekit.schemas.decoding import decode
from servekit.schemas.openai import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    Model,
    ModelList,
    OpenAIFields,
)
from servekit.submission import Submission

# What clients send that were made for servers with one model: huggingface_hub's, TGI's own.
ANY_MODEL = ("", "dummy", "tgi")


async def completions(request: Request) -> Response:
    """OpenAI's completions: text after text."""
    engine = engine_of(request)
    asked = decode(await read_body(request), CompletionRequest)
    check_model(engine.config, asked.model)
    submission = await submit(request, asked.read())
    tell = CompletionTeller(asked, submission, engine.tokenizer, new_id("cmpl"), engine.config.model_name)
    return await _answer(request, asked, submission, tell)


async def chat_completions(request: Request) -> Response:
    """OpenAI's chat completions: the assistant's next message, by the model's own chat template."""
    engine = engine_of(request)
    asked = decode(await read_body(request), ChatCompletionRequest)
    check_model(engine.config, asked.model)
    asked.check()
    arrival_s = engine.let_in()  # its deadlines do not wait for the template
    rendered = await unless_disconnected(request, _render(engine, asked))
    submission = await submit(request, asked.read(rendered), arrival_s)
    tell = ChatTeller(asked, submission, engine.tokenizer, new_id("chatcmpl"), engine.config.model_name)
    return await _answer(request, asked, submission, tell)


async def _render(engine: LLMEngine, asked: ChatCompletionRequest) -> str:
    return await engine.intake.render_chat(
        [message.read(index) for index, message in enumerate(asked.messages)],
        asked.chat_template,
        asked.chat_template_kwargs,
        asked.add_generation_prompt is not False,
        bool(asked.continue_final_message),
    )


async def _answer(request: Request, asked: OpenAIFields, submission: Submission, tell: Teller) -> Response:
    if asked.stream:
        return EventStream(
            request,
            submission,
            lambda deltas: b"".join(map(event, tell.chunks(deltas))),
            lambda: b"".join(map(event, tell.last_chunks())),
            DONE,
        )
    prompts = await answers_to(request, submission, keeps_tokens=tell.tells_logprobs)
    return await respond_at_length(lambda: tell.response(prompts), length(submission, prompts))


DONE = b"data: [DONE]\n\n"  # the mark of the end, after an error too

# -- models ------------------------------------------------------------------------------------------------------------


def check_model(config: ServeConfig, name: str | None) -> None:
    """Raise ModelNotFound for any name but that of the model there is."""
    if name is not None and name not in (*ANY_MODEL, config.model_name, config.model):
        raise ModelNotFound(
            f"The model {name[:100]!r} does not exist. This server has {config.model_name!r}.", param="model"
        )


async def models(request: Request) -> Response:
    """The models there are: one."""
    return respond(ModelList([_model(request)]))


async def model(request: Request) -> Response:
    """One model."""
    name = request.path_params["model"]
    check_model(
        engine_of(request).config, name or "/"
    )  # an empty name means the model there is in a body, but not in a path
    return respond(_model(request))


def _model(request: Request) -> Model:
    engine = engine_of(request)
    config = engine.config
    return Model(
        config.model_name, request.app.state.created_s, engine.manager.config.max_total_tokens, root=config.model
    )


_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "What color is the sky?"}], "max_tokens": 20}
ENDPOINTS: list[Endpoint] = [
    Endpoint(
        *("POST", "/v1/completions", completions),
        takes=(CompletionRequest,),
        gives=(CompletionResponse,),
        streams=(CompletionResponse,),
        example={"prompt": "What color is the sky?", "max_tokens": 20},
    ),
    Endpoint(
        *("POST", "/v1/chat/completions", chat_completions),
        takes=(ChatCompletionRequest,),
        gives=(ChatCompletionResponse,),
        streams=(ChatCompletionChunk,),
        example=_CHAT,
    ),
    Endpoint("GET", "/v1/models", models, gives=(ModelList,)),
    Endpoint("GET", "/v1/models/{model:path}", model, gives=(Model,)),
]
