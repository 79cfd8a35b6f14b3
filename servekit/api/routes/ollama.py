"""Ollama's API: /api/chat, /api/generate, and what its clients ask about the served models.

What manages models in Ollama is refused in words: the server's command line names the models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from servekit import __version__
from servekit.api.endpoint import Endpoint, caller_of, engine_of, models_of
from servekit.api.model_choice import engine_for, predictor_for
from servekit.api.request_body import read, read_chat
from servekit.api.responses.chat_submission import Conversation, may_reason, submit_chat
from servekit.api.responses.generation import answer, submit
from servekit.api.responses.http import OLLAMA_PATHS, respond
from servekit.api.responses.ollama_format import AnswerKind, OllamaResponseBuilder, loaded, timestamp
from servekit.api.schemas.ollama import (
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaError,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    OllamaModel,
    OllamaModelDetails,
    OllamaModels,
    OllamaShowRequest,
    OllamaShowResponse,
    OllamaVersion,
)
from servekit.config import ServeConfig
from servekit.engine.interface import GeneratingEngine, ServedModel, WorkerReport
from servekit.errors import InvalidRequest, ModelNotFound
from servekit.protocol.messages import WorkerReady
from servekit.protocol.prediction import PredictorKind

# Clients compare it with the version that they need. This is the one whose API these routes follow.
OLLAMA_VERSION = "0.13.0"
NEVER = "9999-12-31T23:59:59Z"  # a model that is loaded stays so until another one needs its memory


async def chat(request: Request) -> Response:
    """Write the next message of a conversation, in Ollama's format: in lines of JSON, unless `stream` is false.

    Without messages the answer is empty, because the model is loaded already.
    """
    wanted, conversation = await read_chat(request, OllamaChatRequest)
    engine = await _engine(request, wanted, conversation)
    wanted.check()
    if not conversation:
        return respond(loaded(OllamaChatResponse, engine.config.model_name))
    return await _answer_chat(request, wanted, conversation, OllamaChatResponse)


async def generate(request: Request) -> Response:
    """Answer one prompt, in Ollama's format: in lines of JSON, unless `stream` is false.

    The prompt is a message in the model's chat template, unless `raw` or a `suffix` is given. Without a prompt the
    answer is empty, because the model is loaded already.
    """
    wanted, conversation = await read_chat(request, OllamaGenerateRequest)
    engine = await _engine(request, wanted, conversation)
    wanted.check()
    prompt: str = conversation[-1]["content"]
    if not prompt and not wanted.suffix:
        return respond(loaded(OllamaGenerateResponse, engine.config.model_name))
    has_template = engine.takes_messages or engine.input_processor.has_chat_template
    if has_template and not wanted.raw and not wanted.suffix:
        return await _answer_chat(request, wanted, conversation, OllamaGenerateResponse)
    state = await submit(request, wanted.to_generation_request(prompt))
    name = engine.config.model_name
    builder = OllamaResponseBuilder(OllamaGenerateResponse, state, engine.tokenizer, name, None, shows_thinking=False)
    return await answer(request, state, builder, wanted.streams)


async def _answer_chat(
    request: Request,
    wanted: OllamaChatRequest | OllamaGenerateRequest,
    conversation: Conversation,
    kind: AnswerKind,
) -> Response:
    engine = engine_of(request)
    state, answer_format = await submit_chat(request, wanted.chat(), conversation)
    name = engine.config.model_name
    builder = OllamaResponseBuilder(kind, state, engine.tokenizer, name, answer_format, wanted.shows_thinking)
    return await answer(request, state, builder, wanted.streams)


async def _engine(request: Request, wanted: OllamaFields, conversation: Conversation) -> GeneratingEngine:
    """Return the engine of the model. Raises ModelNotFound, and InvalidRequest for reasoning that it cannot do."""
    engine = await engine_for(request, _name(request, wanted.model), conversation)
    if wanted.think and not may_reason(engine):
        raise InvalidRequest(
            f"{engine.config.model_name!r} does not support thinking, as far as its chat template tells; leave think "
            "out, or start the server with --reasoning-parser",
            param="think",
        )
    return engine


def _name(request: Request, name: str) -> str:
    """Return a model's name as the server knows it: with or without Ollama's default tag."""
    try:
        models_of(request).find(name, caller_of(request))
    except ModelNotFound:
        return name.removesuffix(":latest")
    return name


# -- the served models -------------------------------------------------------------------------------------------------


async def version(_: Request) -> Response:
    """Return the version of Ollama whose API this is, and servekit's own."""
    return respond(OllamaVersion(OLLAMA_VERSION, __version__))


async def tags(request: Request) -> Response:
    """List the models that the caller may use."""
    models = [_model(each) for each in models_of(request).served(caller_of(request))]
    for model in models:
        model.modified_at = timestamp(request.app.state.created_s)
    return respond(OllamaModels(models))


async def ps(request: Request) -> Response:
    """List the models that are loaded."""
    models = []
    for served in models_of(request).served(caller_of(request)):
        if served.engine is not None:
            model = _model(served)
            model.expires_at = NEVER
            model.size_vram = 0 if served.worker is None or served.worker.device == "cpu" else model.size
            model.context_length = served.max_prompt_tokens or 0
            models.append(model)
    return respond(OllamaModels(models))


async def show(request: Request) -> Response:
    """Describe a model: its size, its context, and whether it knows tools and reasoning."""
    wanted = await read(request, OllamaShowRequest)
    name = _name(request, wanted.model or wanted.name or "/")
    kind = models_of(request).find(name, caller_of(request)).kind
    if kind in list(PredictorKind):
        return await _show_predictor(request, name, PredictorKind(kind))
    engine = await engine_for(request, name)
    model, chat_format = _worker(engine).model, engine.input_processor.chat_format
    family = _family(model.architecture)
    capabilities = {
        "completion": True,
        "tools": chat_format.tools is not None,
        "thinking": chat_format.has_reasoning,
        "insert": engine.input_processor.fill_format is not None,
    }
    defaults = {
        "temperature": model.default_temperature,
        "top_k": model.default_top_k,
        "top_p": model.default_top_p,
    }
    return respond(
        OllamaShowResponse(
            details=_details(engine.config, _worker(engine)),
            model_info={
                "general.architecture": family,
                "general.basename": engine.config.model_name,
                "general.parameter_count": model.num_parameters,
                f"{family}.context_length": engine.scheduler_config.max_total_tokens,
                f"{family}.vocab_size": model.vocab_size,
            },
            capabilities=[name for name, has in capabilities.items() if has],
            parameters="\n".join(f"{name} {value}" for name, value in defaults.items()),
            modified_at=timestamp(request.app.state.created_s),
        )
    )


async def _show_predictor(request: Request, name: str, kind: PredictorKind) -> Response:
    engine = await predictor_for(request, name, kind)
    model, worker = engine.model, engine.worker
    assert worker is not None
    family = _family(model.architecture)
    return respond(
        OllamaShowResponse(
            details=_details(engine.config, worker),
            model_info={
                "general.architecture": family,
                "general.basename": engine.config.model_name,
                "general.parameter_count": model.num_parameters,
                f"{family}.context_length": model.max_model_len,
                f"{family}.embedding_length": model.dimensions,
                f"{family}.vocab_size": model.vocab_size,
            },
            capabilities=["embedding"] if kind is PredictorKind.EMBED else [],
            parameters="",
            modified_at=timestamp(request.app.state.created_s),
        )
    )


def _worker(engine: GeneratingEngine) -> WorkerReady:
    engine.scheduler_config  # noqa: B018 - raises WorkerNotReady while the model loads
    if engine.takes_messages:
        raise InvalidRequest(
            f"{engine.config.model_name!r} runs on another server; ask that server what it is", code="not_supported"
        )
    assert engine.worker is not None
    return engine.worker


def _model(served: ServedModel) -> OllamaModel:
    served.max_prompt_tokens  # noqa: B018 - raises WorkerNotReady while the only model loads
    worker, name = served.worker, served.name
    digest = hashlib.sha256((worker.model.fingerprint if worker and worker.model.fingerprint else name).encode())
    return OllamaModel(
        name=name,
        model=name,
        size=0 if worker is None else worker.num_weight_bytes,
        digest=digest.hexdigest(),
        details=OllamaModelDetails(format="", family="", families=[], parameter_size="", quantization_level="")
        if worker is None
        else _details(served.config, worker),
    )


def _details(config: ServeConfig, worker: WorkerReport) -> OllamaModelDetails:
    family = _family(worker.model.architecture)
    quantization = worker.model.quantization if isinstance(worker, WorkerReady) else None
    return OllamaModelDetails(
        format="gguf" if config.model.endswith(".gguf") else "safetensors",
        family=family,
        families=[family],
        parameter_size=_size(worker.model.num_parameters),
        quantization_level=(quantization or worker.dtype).upper(),
    )


def _family(architecture: str) -> str:
    return architecture.partition("For")[0].removesuffix("Model").removesuffix("LMHead").lower()


def _size(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.1f}B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.1f}M"


# -- what this server does not do --------------------------------------------------------------------------------------

_BY_THE_OPERATOR = "the operator names them with --model or --models"
REFUSED = (
    ("POST", "pull", f"models are not pulled over the API; {_BY_THE_OPERATOR}"),
    ("POST", "push", f"models are not pushed; {_BY_THE_OPERATOR}"),
    ("POST", "create", f"models are not created over the API; {_BY_THE_OPERATOR}"),
    ("POST", "copy", f"models are not copied; {_BY_THE_OPERATOR}, and --served-model-name gives another name"),
    ("DELETE", "delete", f"models are not deleted over the API; {_BY_THE_OPERATOR}"),
)


def _refusing(name: str, reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_: Request) -> Response:
        raise InvalidRequest(reason, code="not_supported")

    refuse.__name__, refuse.__doc__ = f"refuse_{name}", f"Refused: {reason}."
    return refuse


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        f"{OLLAMA_PATHS}chat",
        chat,
        takes=(OllamaChatRequest,),
        gives=(OllamaChatResponse,),
        streams=(OllamaChatResponse,),
        stream_media_type="application/x-ndjson",
        error=OllamaError,
        example={"model": "demo", "messages": [{"role": "user", "content": "What color is the sky?"}]},
    ),
    Endpoint(
        "POST",
        f"{OLLAMA_PATHS}generate",
        generate,
        takes=(OllamaGenerateRequest,),
        gives=(OllamaGenerateResponse,),
        streams=(OllamaGenerateResponse,),
        stream_media_type="application/x-ndjson",
        error=OllamaError,
        example={"model": "demo", "prompt": "What color is the sky?", "options": {"num_predict": 20}},
    ),
    Endpoint(
        "POST",
        f"{OLLAMA_PATHS}show",
        show,
        takes=(OllamaShowRequest,),
        gives=(OllamaShowResponse,),
        error=OllamaError,
        example={"model": "demo"},
    ),
    Endpoint("GET", f"{OLLAMA_PATHS}tags", tags, gives=(OllamaModels,), error=OllamaError),
    Endpoint("GET", f"{OLLAMA_PATHS}ps", ps, gives=(OllamaModels,), error=OllamaError),
    Endpoint("GET", f"{OLLAMA_PATHS}version", version, gives=(OllamaVersion,), error=OllamaError),
    *(
        Endpoint(
            method, f"{OLLAMA_PATHS}{name}", _refusing(name, reason), error=OllamaError, own_errors=(InvalidRequest,)
        )
        for method, name, reason in REFUSED
    ),
]
