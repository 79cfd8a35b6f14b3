"""Embeddings, reranking and classification over HTTP, in each format."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message

from servekit.api.app import create_app
from servekit.api.auth.keys import parse_keys_file
from servekit.api.schemas.packed_body import MAX_INLINE_BYTES
from servekit.protocol.prediction import PredictorKind
from tests.support.asgi import Answer, Log, ask, bearer, make_app, make_scope
from tests.support.local_predictor import local_engine
from tests.support.predictor_checkpoints import TEXTS, make_classifier, make_embedder, make_image, make_image_classifier

KEYS = b'[[key]]\nkey = "one"\ntenant = "t"\ntokens_per_minute = 30\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictors")
    make_embedder(folder / "embed")
    make_classifier(folder / "rerank", labels=["LABEL_0"])
    make_classifier(folder / "classify")
    make_image_classifier(folder / "image")
    return folder


async def app_of(folder: Path, name: str, **settings: Any) -> AsyncIterator[Starlette]:
    kind = PredictorKind.CLASSIFY if name == "image" else PredictorKind(name)
    async with local_engine(folder / name, kind, served_model_name=name, **settings) as (engine, _):
        yield create_app(engine)


@pytest.fixture
async def embedder(folder: Path) -> AsyncIterator[Starlette]:
    async for app in app_of(folder, "embed"):
        yield app


@pytest.fixture
async def reranker(folder: Path) -> AsyncIterator[Starlette]:
    async for app in app_of(folder, "rerank"):
        yield app


@pytest.fixture
async def classifier(folder: Path) -> AsyncIterator[Starlette]:
    async for app in app_of(folder, "classify"):
        yield app


@pytest.fixture
async def image_classifier(folder: Path) -> AsyncIterator[Starlette]:
    async for app in app_of(folder, "image"):
        yield app


async def post(app: Starlette, path: str, body: Any, *headers: tuple[str, str]) -> Answer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await ask(app, "POST", path, *headers, body=content)


async def read(app: Starlette, path: str, body: Any) -> Any:
    answer = await post(app, path, body)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


async def test_embeddings_are_numbers_or_base64_of_the_same(embedder: Starlette) -> None:
    plain = await read(embedder, "/v1/embeddings", {"input": TEXTS, "model": "embed"})
    assert [each["index"] for each in plain["data"]] == list(range(len(TEXTS))) and plain["object"] == "list"
    assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] > 2 * len(TEXTS)
    packed = await read(embedder, "/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"})
    for each, other in zip(plain["data"], packed["data"], strict=True):
        values = array("f", base64.b64decode(other["embedding"]))
        assert len(values) == 32 and all(
            math.isclose(first, second, abs_tol=1e-6) for first, second in zip(values, each["embedding"], strict=True)
        )
    ids = await read(embedder, "/v1/embeddings", {"input": [[2, 4, 3], [2, 5, 3]], "dimensions": 3})
    assert [len(each["embedding"]) for each in ids["data"]] == [3, 3]


async def test_other_formats_of_embeddings_give_the_same_numbers(embedder: Starlette) -> None:
    openai = await read(embedder, "/v1/embeddings", {"input": TEXTS})
    expected = [each["embedding"] for each in openai["data"]]
    ollama = await read(embedder, "/api/embed", {"model": "embed:latest", "input": TEXTS})
    older = await read(embedder, "/api/embeddings", {"model": "embed", "prompt": TEXTS[0]})
    found = [*await read(embedder, "/embed", {"inputs": TEXTS}), *ollama["embeddings"], older["embedding"]]
    for vector, numbers in zip(found, [*expected, *expected, expected[0]], strict=True):
        assert vector == pytest.approx(numbers, abs=1e-6)
    assert ollama["prompt_eval_count"] == openai["usage"]["prompt_tokens"]


async def test_too_long_inputs_are_refused_or_cut(embedder: Starlette) -> None:
    answer = await post(embedder, "/v1/embeddings", {"input": ["a", "a " * 200]})
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == "input[1]"
    cut = await read(embedder, "/v1/embeddings", {"input": "a " * 200, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 64


async def test_documents_come_in_the_order_of_their_scores(reranker: Starlette) -> None:
    query, documents = "what color is the sky ?", TEXTS
    cohere = await read(reranker, "/v1/rerank", {"query": query, "documents": documents, "return_documents": True})
    scores = {each["index"]: each["relevance_score"] for each in cohere["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True) and len(scores) == len(documents)
    assert all(each["document"]["text"] == documents[each["index"]] for each in cohere["results"])
    assert all(0 < value < 1 for value in scores.values()) and cohere["usage"]["total_tokens"] > 0
    best = await read(
        reranker, "/rerank", {"query": query, "documents": [{"text": each} for each in documents], "top_n": 2}
    )
    assert [each["index"] for each in best["results"]] == list(scores)[:2] and "document" not in best["results"][0]
    tei = await read(reranker, "/rerank", {"query": query, "texts": documents, "return_text": True, "raw_scores": True})
    assert [each["index"] for each in tei] == list(scores) and tei[0]["text"] == documents[tei[0]["index"]]
    assert [1 / (1 + math.exp(-each["score"])) for each in tei] == pytest.approx(list(scores.values()), abs=1e-6)
    vllm = await read(reranker, "/score", {"text_1": query, "text_2": documents})
    assert [each["score"] for each in vllm["data"]] == pytest.approx([scores[index] for index in range(7)], abs=1e-6)


async def test_texts_are_classified_in_both_formats(classifier: Starlette) -> None:
    own = await read(classifier, "/predict", {"model": "classify", "input": TEXTS})
    for each in own["predictions"]:
        assert sum(score["score"] for score in each["scores"]) == pytest.approx(1.0)
        assert each["label"] == each["scores"][0]["label"] and each["score"] == each["scores"][0]["score"]
    tei = await read(classifier, "/predict", {"inputs": TEXTS})
    assert [each[0]["label"] for each in tei] == [each["label"] for each in own["predictions"]]
    (only,) = await read(classifier, "/predict", {"inputs": TEXTS[0], "top_k": 1})
    assert only["label"] == own["predictions"][0]["label"]
    answer = await post(classifier, "/predict", {"image": "AAAA"})
    assert answer.status == 400 and "takes texts" in answer.error["message"]


def form(**fields: bytes) -> tuple[bytes, tuple[str, str]]:
    parts = [
        b'--XX\r\ncontent-disposition: form-data; name="%b"; filename="f"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in fields.items()
    ]
    return b"".join(parts) + b"--XX--\r\n", ("content-type", "multipart/form-data; boundary=XX")


async def test_images_are_base64_data_urls_or_uploads(image_classifier: Starlette) -> None:
    image = make_image()
    text = base64.b64encode(image).decode()
    own = await read(image_classifier, "/predict", {"image": [text, f"data:image/png;base64,{text}"]})
    first, second = own["predictions"]
    assert {each["label"] for each in first["scores"]} == {"cat", "dog", "fish"}
    assert first["score"] == pytest.approx(second["score"], abs=1e-6) and first["label"] == second["label"]
    body, header = form(image=image, model=b"image", top_k=b"1")
    answer = await post(image_classifier, "/predict", body, header)
    (uploaded,) = json.loads(answer.body)["predictions"]
    assert uploaded["label"] == first["label"] and len(uploaded["scores"]) == 1
    bad = await post(image_classifier, "/predict", {"image": "AAAA"})
    assert bad.status == 400 and "cannot be decoded" in bad.error["message"]
    missing, header = form(model=b"image")
    assert (await post(image_classifier, "/predict", missing, header)).error["param"] == "image"
    assert (await post(image_classifier, "/predict", body[:-9], header)).status == 400
    large, header = form(image=image, model=b"image", input=b"a" * MAX_INLINE_BYTES)
    assert (await post(image_classifier, "/predict", large, header)).status == 413
    padded, header = form(image=image + bytes(2**20), model=b"image", top_k=b"1")  # read in several pieces
    assert (await post(image_classifier, "/predict", padded, header)).body == answer.body


async def test_the_memory_of_answers_is_bounded_until_their_clients_have_read_them(folder: Path) -> None:
    async for app in app_of(folder, "embed", max_total_body_bytes=200_000, max_body_bytes=50_000):
        body = json.dumps({"input": ["a"] * 200, "model": "embed"}).encode()
        reads = asyncio.Event()
        has_begun = asyncio.Event()
        received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive(messages: list[Message] = received) -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message, begins: asyncio.Event = has_begun, may_go_on: asyncio.Event = reads) -> None:
            begins.set()
            await may_go_on.wait()

        slow = asyncio.create_task(app(make_scope("POST", "/v1/embeddings"), receive, send))
        async with asyncio.timeout(60):
            await has_begun.wait()
            refused = await post(app, "/v1/embeddings", body)
            assert refused.status == 503 and "max_total_body_bytes" in refused.error["message"]
            assert refused.headers["retry-after"]
            assert (await post(app, "/v1/embeddings", {"input": "a"})).status == 200, "small answers pass"
            reads.set()
            await slow
            assert (await post(app, "/v1/embeddings", body)).status == 200
        too_many = await post(app, "/v1/embeddings", {"input": ["a"] * 300})
        assert too_many.status == 400 and "send fewer inputs" in too_many.error["message"]


async def test_documents_are_returned_whole_however_long_they_are(reranker: Starlette) -> None:
    documents = ["the sky is blue\0 " * 5000, "fish swim", "\u00e9"]
    for name, wanted, text_of in (
        ("documents", "return_documents", lambda each: each["document"]["text"]),
        ("texts", "return_text", lambda each: each["text"]),
    ):
        found = await read(reranker, "/v1/rerank", {"query": "a", name: documents, wanted: True})
        ranked = found["results"] if name == "documents" else found
        assert {each["index"]: text_of(each) for each in ranked} == dict(enumerate(documents))


async def test_a_model_of_another_kind_is_refused_in_words(embedder: Starlette) -> None:
    answer = await post(embedder, "/v1/rerank", {"query": "a", "documents": ["b"]})
    assert answer.status == 400 and answer.error["code"] == "not_supported"
    assert "computes embeddings: POST /v1/embeddings; it scores no documents" in answer.error["message"]
    assert "start a model of kind rerank" in answer.error["message"]
    for path, body in (
        ("/generate", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = await post(embedder, path, body)
        assert answer.status == 400 and "generates no text" in answer.error["message"]
    answer = await post(make_app(), "/v1/embeddings", {"input": "a"})
    assert answer.status == 400 and "generates text; it computes no embeddings" in answer.error["message"]
    assert (await post(embedder, "/v1/embeddings", {"input": "a", "model": "other"})).status == 404


async def test_operators_see_the_model_and_its_state(embedder: Starlette) -> None:
    assert (await ask(embedder, "GET", "/ready")).status == 200
    info = json.loads((await ask(embedder, "GET", "/info")).body)
    assert info["worker"]["model"]["architecture"] == "BertModel" and info["max_total_tokens"] == 64
    models = json.loads((await ask(embedder, "GET", "/v1/models")).body)
    assert models["data"][0]["id"] == "embed" and models["data"][0]["kind"] == "embed"
    shown = json.loads((await post(embedder, "/api/show", {"model": "embed"})).body)
    assert shown["capabilities"] == ["embedding"] and shown["details"]["family"] == "bert"
    assert shown["model_info"]["bert.embedding_length"] == 32 and shown["model_info"]["bert.context_length"] == 64
    metrics = (await ask(embedder, "GET", "/metrics")).body.decode()
    assert "servekit_prediction_items_waiting" in metrics


async def test_tokens_count_against_the_limits_of_a_key(folder: Path, log: Log) -> None:
    async with local_engine(folder / "embed", PredictorKind.EMBED, api_keys_file="keys.toml") as (engine, _):
        app = create_app(engine, parse_keys_file(KEYS, "keys.toml"))
        assert (await post(app, "/v1/embeddings", {"input": "a"})).status == 401
        answer = await post(app, "/v1/embeddings", {"input": "a " * 40}, bearer("one"))
        assert answer.status == 200
        again = await post(app, "/v1/embeddings", {"input": "a"}, bearer("one"))
        assert again.status == 429 and int(again.headers["retry-after"]) > 0
    entry = next(line for line in log.lines if line.get("inputs"))
    assert entry["prompt_tokens"] == 42 and entry["tenant"] == "t"
