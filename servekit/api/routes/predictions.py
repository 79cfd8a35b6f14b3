"""Embeddings, reranking and classification, in the formats of several APIs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.endpoint import Endpoint
from servekit.api.model_choice import classifier_for, predictor_for
from servekit.api.multipart import MultipartReader, Part
from servekit.api.request_body import read, read_body
from servekit.api.responses.collect import new_id
from servekit.api.responses.generation import CHARACTERS_PER_TOKEN
from servekit.api.responses.http import OLLAMA_PATHS, respond, respond_at_length
from servekit.api.responses.long_json import ItemList
from servekit.api.responses.prediction import (
    base64_of,
    compute,
    floats,
    infer,
    respond_with,
    respond_with_tensors,
    scores_of,
)
from servekit.api.schemas.json_body import decode_query
from servekit.api.schemas.ollama import OllamaError
from servekit.api.schemas.packed_body import MAX_INLINE_BYTES
from servekit.api.schemas.predictions import (
    Document,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    InferResponse,
    LabelScore,
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    Prediction,
    PredictionUsage,
    PredictRequest,
    PredictResponse,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    Score,
    ScoreRequest,
    ScoreResponse,
    TeiEmbedRequest,
    TeiRank,
    image_request,
)
from servekit.engine.interface import infers, predicts
from servekit.errors import InvalidRequest, RequestTooLarge
from servekit.protocol.prediction import Activation, PredictorKind
from servekit.requests.prediction import PredictionRequest

FORM_PIECE_BYTES = 2**18  # of a form that are read at a time, so that the event loop is not held

# -- embeddings --------------------------------------------------------------------------------------------------------


async def embeddings(request: Request) -> Response:
    """Compute the embedding of a text, or of each of a list of texts, in OpenAI's format."""
    wanted = await read(request, EmbeddingsRequest)
    engine = await predictor_for(request, wanted.model, PredictorKind.EMBED)
    as_base64 = wanted.encoding_format == "base64"
    state, results = await compute(request, engine, wanted.to_prediction_request(), as_base64=as_base64)
    encode = base64_of if as_base64 else floats
    usage = PredictionUsage(state.num_tokens, state.num_tokens)
    return await respond_with(
        lambda items: EmbeddingsResponse(
            items(Embedding(index, encode(result)) for index, result in enumerate(results)),
            engine.config.model_name,
            usage,
        ),
        results,
    )


async def embed(request: Request) -> Response:
    """Compute the embeddings of texts, in the format of text-embeddings-inference: a list of lists of numbers."""
    wanted = await read(request, TeiEmbedRequest)
    engine = await predictor_for(request, wanted.model, PredictorKind.EMBED)
    _, results = await compute(request, engine, wanted.to_prediction_request())
    return await respond_with(lambda items: items(map(floats, results)), results)


async def ollama_embed(request: Request) -> Response:
    """Compute the embeddings of texts, in Ollama's format."""
    started_s, wanted = time.monotonic(), await read(request, OllamaEmbedRequest)
    engine = await predictor_for(request, wanted.model.removesuffix(":latest"), PredictorKind.EMBED)
    state, results = await compute(request, engine, wanted.to_prediction_request())
    duration_ns = int(1e9 * (time.monotonic() - started_s))
    return await respond_with(
        lambda items: OllamaEmbedResponse(
            engine.config.model_name, items(map(floats, results)), duration_ns, 0, state.num_tokens
        ),
        results,
    )


async def ollama_embeddings(request: Request) -> Response:
    """Compute the embedding of one text, in an older format of Ollama."""
    wanted = await read(request, OllamaEmbeddingsRequest)
    engine = await predictor_for(request, wanted.model.removesuffix(":latest"), PredictorKind.EMBED)
    _, (result,) = await compute(request, engine, wanted.to_prediction_request())
    return respond(OllamaEmbeddingsResponse(floats(result)))


# -- reranking ---------------------------------------------------------------------------------------------------------


async def rerank(request: Request) -> Response:
    """Order documents by their relevance to a query, in the format of Cohere and Jina.

    A body with `texts` is answered in the format of text-embeddings-inference.
    """
    wanted = await read(request, RerankRequest)
    engine = await predictor_for(request, wanted.model, PredictorKind.RERANK)
    state, results = await compute(request, engine, wanted.to_prediction_request())
    activation = Activation.NONE if wanted.raw_scores else engine.model.activation
    scores = [scores_of(floats(result), activation)[0] for result in results]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: wanted.top_n]
    documents = wanted.texts_of_documents
    returns_text = bool(wanted.return_text if wanted.documents is None else wanted.return_documents)
    num_characters = sum(len(documents[each]) for each in order) if returns_text else 0

    def of_texts(index: int) -> TeiRank:
        return TeiRank(index, scores[index], documents[index] if returns_text else None)

    def of_documents(index: int) -> RerankResult:
        return RerankResult(index, scores[index], Document(documents[index]) if returns_text else None)

    def response(items: ItemList) -> Any:
        if wanted.documents is None:
            return items(map(of_texts, order))
        usage = RerankUsage(state.num_tokens)
        return RerankResponse(new_id("rerank"), engine.config.model_name, items(map(of_documents, order)), usage)

    return await respond_at_length(response, num_characters // CHARACTERS_PER_TOKEN)


async def score(request: Request) -> Response:
    """Score pairs of texts, in vLLM's format."""
    wanted = await read(request, ScoreRequest)
    engine = await predictor_for(request, wanted.model, PredictorKind.RERANK)
    state, results = await compute(request, engine, wanted.to_prediction_request())
    scores = [scores_of(floats(result), engine.model.activation)[0] for result in results]
    return respond(
        ScoreResponse(
            new_id("score"),
            int(time.time()),
            engine.config.model_name,
            [Score(index, value) for index, value in enumerate(scores)],
            PredictionUsage(state.num_tokens, state.num_tokens),
        )
    )


# -- classification ----------------------------------------------------------------------------------------------------


async def predict(request: Request) -> Response:
    """Classify texts or images: return their labels with scores.

    Images are base64 of a file or a data URL, or a form (multipart/form-data) with the file as its field `image`. A
    body with `inputs` is answered in the format of text-embeddings-inference. A model of a Triton server takes
    `tensors`, or texts if its only input is text, and is answered with tensors.
    """
    prediction: PredictionRequest | None = None
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        wanted, data = await _read_form(request)
        prediction = image_request(data, wanted)
    else:
        wanted = await read(request, PredictRequest)
        if wanted.tensors is None:  # a mistake is refused before a model is loaded for it
            prediction = wanted.to_prediction_request()
        else:
            wanted.check()
    engine = await classifier_for(request, wanted.model)
    if infers(engine):
        outputs = await infer(request, engine, wanted.to_inference_request())
        return await respond_with_tensors(engine.config.model_name, outputs)
    assert predicts(engine)
    state, results = await compute(request, engine, prediction or wanted.to_prediction_request())
    labels, activation = engine.model.labels, Activation.NONE if wanted.raw_scores else engine.model.activation

    def labelled(result: bytes) -> list[LabelScore]:
        scores = zip(labels, scores_of(floats(result), activation), strict=True)
        ranked = sorted(scores, key=lambda each: -each[1])[: wanted.top_k]
        return [LabelScore(label, value) for label, value in ranked]

    if wanted.inputs is not None:
        is_one = isinstance(wanted.inputs, str)
        return await respond_with(
            lambda items: labelled(results[0]) if is_one else items(map(labelled, results)), results
        )
    usage = PredictionUsage(state.num_tokens, state.num_tokens)
    return await respond_with(
        lambda items: PredictResponse(engine.config.model_name, items(map(_prediction, map(labelled, results))), usage),
        results,
    )


def _prediction(scores: Sequence[LabelScore]) -> Prediction:
    return Prediction(scores[0].label, scores[0].score, list(scores))


async def _read_form(request: Request) -> tuple[PredictRequest, memoryview]:
    """Return the fields of a form, and the content of its file. Raises InvalidRequest, and what `read_body` raises."""
    body = await read_body(request)
    reader = MultipartReader(request.headers["content-type"])
    parts: dict[str, bytearray] = {}
    name, num_other_bytes = "", 0
    for start in range(0, len(body), FORM_PIECE_BYTES):
        for event in reader.feed(bytes(memoryview(body)[start : start + FORM_PIECE_BYTES])):
            if isinstance(event, Part):
                name = event.name
                if name in parts:
                    raise InvalidRequest(
                        f"the form has two fields {name[:40]!r}; send one image in a request", param=name[:40]
                    )
                parts[name] = bytearray()
            else:
                parts[name] += event
            num_other_bytes += 0 if isinstance(event, Part) or name == "image" else len(event)
            if len(parts) + num_other_bytes > MAX_INLINE_BYTES:  # they are decoded on the event loop
                raise RequestTooLarge(f"the form's fields besides image have more than {MAX_INLINE_BYTES} bytes")
        await asyncio.sleep(0)  # a form of 8 MB takes some tens of milliseconds
    if not reader.is_complete:
        raise InvalidRequest("the body ends before the form does; its last boundary is missing")
    data = parts.pop("image", None)
    if data is None:
        raise InvalidRequest("the form has no field image with a file", param="image")
    fields = {name: [value.decode("utf-8", "replace")] for name, value in parts.items()}
    return decode_query(fields, PredictRequest), memoryview(data)


ENDPOINTS: list[Endpoint] = [
    Endpoint(
        "POST",
        "/v1/embeddings",
        embeddings,
        takes=(EmbeddingsRequest,),
        gives=(EmbeddingsResponse,),
        example={"input": "What color is the sky?"},
        in_batches=True,
    ),
    Endpoint(
        "POST",
        "/embed",
        embed,
        takes=(TeiEmbedRequest,),
        gives=(list[list[float]],),
        example={"inputs": "What color is the sky?"},
    ),
    Endpoint(
        "POST",
        f"{OLLAMA_PATHS}embed",
        ollama_embed,
        takes=(OllamaEmbedRequest,),
        gives=(OllamaEmbedResponse,),
        error=OllamaError,
        example={"model": "demo", "input": "What color is the sky?"},
    ),
    Endpoint(
        "POST",
        f"{OLLAMA_PATHS}embeddings",
        ollama_embeddings,
        takes=(OllamaEmbeddingsRequest,),
        gives=(OllamaEmbeddingsResponse,),
        error=OllamaError,
        example={"model": "demo", "prompt": "What color is the sky?"},
    ),
    *(
        Endpoint(
            "POST",
            path,
            rerank,
            takes=(RerankRequest,),
            gives=(RerankResponse, list[TeiRank]),
            example={"query": "What color is the sky?", "documents": ["The sky is blue.", "Fish swim."]},
        )
        for path in ("/v1/rerank", "/rerank")
    ),
    Endpoint(
        "POST",
        "/score",
        score,
        takes=(ScoreRequest,),
        gives=(ScoreResponse,),
        example={"text_1": "What color is the sky?", "text_2": ["The sky is blue.", "Fish swim."]},
    ),
    Endpoint(
        "POST",
        "/predict",
        predict,
        takes=(PredictRequest,),
        gives=(PredictResponse, InferResponse, list[LabelScore], list[list[LabelScore]]),
        example={"input": "A wonderful film."},
    ),
]
