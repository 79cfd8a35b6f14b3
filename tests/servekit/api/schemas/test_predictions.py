from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from servekit.api.schemas.common_fields import MAX_PROMPTS
from servekit.api.schemas.json_body import decode
from servekit.api.schemas.packed_body import MAX_INLINE_BYTES, DecodeBody, PackedBody, Refusal, pack
from servekit.api.schemas.predictions import (
    EmbeddingsRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PredictRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    image_request,
    inputs_of,
)
from servekit.errors import InvalidRequest
from servekit.requests.inference import InferenceRequest
from servekit.requests.prediction import ImageInput, PredictionRequest


def converted(kind: Any, body: bytes) -> PredictionRequest:
    wanted: PredictionRequest = decode(body, kind).to_prediction_request()
    return wanted


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        (b'"a"', ["a"]),
        (b'["a", "b"]', ["a", "b"]),
        (b"[1, 2]", [[1, 2]]),
        (b"[[1, 2], [3]]", [[1, 2], [3]]),
    ],
)
def test_embeddings_take_texts_and_token_ids(value: bytes, inputs: list[Any]) -> None:
    assert converted(EmbeddingsRequest, b'{"input": %b}' % value).inputs == inputs


def test_token_ids_of_a_large_body_are_arrays() -> None:
    """They stay arrays: to make lists of millions would hold the event loop."""
    one, two = array("i", [1, 2]), array("i", [3])
    assert inputs_of(one, "input") == [one]
    assert inputs_of([one, two], "input") == [one, two]


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (EmbeddingsRequest, b'{"input": []}', "input is empty"),
        (EmbeddingsRequest, b'{"input": ["a", 1]}', "mixes texts and token ids"),
        (EmbeddingsRequest, b'{"input": [[1], []]}', "an empty list of token ids"),
        (EmbeddingsRequest, b'{"input": "a", "truncate_prompt_tokens": 0}', "truncate_prompt_tokens is 0"),
        (EmbeddingsRequest, b'{"input": [%b"a"]}' % (b'"a",' * MAX_PROMPTS), f"has {MAX_PROMPTS + 1} inputs"),
        (RerankRequest, b'{"query": "a"}', "documents is empty"),
        (RerankRequest, b'{"query": "a", "texts": []}', "texts is empty"),
        (ScoreRequest, b'{"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}', "text_1 has 2 texts, and text_2 has 3"),
        (PredictRequest, b"{}", "send one of input, image and inputs"),
        (PredictRequest, b'{"input": "a", "image": "a"}', "send one of input, image and inputs"),
    ],
)
def test_what_cannot_be_computed_is_refused(kind: Any, body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        converted(kind, body)


def test_inputs_are_cut_only_where_the_request_or_the_api_says_so() -> None:
    assert not converted(EmbeddingsRequest, b'{"input": "a"}').truncates
    whole = converted(EmbeddingsRequest, b'{"input": "a", "truncate_prompt_tokens": -1}')
    assert whole.truncates and whole.max_tokens is None
    some = converted(EmbeddingsRequest, b'{"input": "a", "truncate_prompt_tokens": 5, "dimensions": 2}')
    assert some.truncates and some.max_tokens == 5 and some.dimensions == 2
    assert converted(TeiEmbedRequest, b'{"inputs": "a", "truncate": true}').truncates
    assert not converted(TeiEmbedRequest, b'{"inputs": ["a"]}').truncates
    assert converted(OllamaEmbedRequest, b'{"model": "m", "input": "a"}').truncates
    assert not converted(OllamaEmbedRequest, b'{"model": "m", "input": "a", "truncate": false}').truncates
    assert converted(OllamaEmbeddingsRequest, b'{"model": "m", "prompt": "a"}').truncates
    assert converted(RerankRequest, b'{"query": "a", "documents": ["b"]}').truncates


def test_documents_are_texts_or_objects() -> None:
    wanted = converted(RerankRequest, b'{"query": "q", "documents": ["a", {"text": "b"}], "priority": 3}')
    assert wanted.inputs == [("q", "a"), ("q", "b")] and wanted.priority == 3
    assert converted(RerankRequest, b'{"query": "q", "texts": ["c"]}').inputs == [("q", "c")]


def test_one_text_is_scored_with_each_of_others() -> None:
    assert converted(ScoreRequest, b'{"text_1": "q", "text_2": ["a", "b"]}').inputs == [("q", "a"), ("q", "b")]
    assert converted(ScoreRequest, b'{"text_1": ["p", "q"], "text_2": ["a", "b"]}').inputs == [("p", "a"), ("q", "b")]
    cut = converted(ScoreRequest, b'{"text_1": "q", "text_2": "a", "truncate_prompt_tokens": 7}')
    assert cut.max_tokens == 7 and cut.truncates
    assert converted(ScoreRequest, b'{"text_1": "q", "text_2": "a", "truncate_prompt_tokens": -1}').max_tokens is None


def test_images_are_passed_on_undecoded() -> None:
    assert converted(PredictRequest, b'{"image": "aGk="}').inputs == [ImageInput(memoryview(b"aGk="), is_base64=True)]
    of_two = converted(PredictRequest, b'{"image": ["\\u00e4", "b"]}')
    assert of_two.inputs[0] == ImageInput(memoryview(b"?"), is_base64=True)
    assert converted(PredictRequest, b'{"inputs": "a"}').inputs == ["a"]
    uploaded = image_request(memoryview(b"\x89PNG"), PredictRequest(deadline_ms=5))
    assert uploaded.inputs == [ImageInput(memoryview(b"\x89PNG"), is_base64=False)] and uploaded.deadline_ms == 5


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (EmbeddingsRequest, {"input": ["a" * MAX_INLINE_BYTES]}),
        (RerankRequest, {"query": "q", "documents": [{"text": "a" * MAX_INLINE_BYTES}]}),
        (PredictRequest, {"image": "a" * MAX_INLINE_BYTES}),
    ],
)
def test_large_bodies_are_packed(kind: Any, body: dict[str, Any]) -> None:
    job = DecodeBody([kind.__name__], 100, memoryview(msgspec.json.encode(body)))
    packed = pack(job)
    assert isinstance(packed, PackedBody) and len(packed.short) < 1000


TENSOR = {"name": "a", "shape": [2], "datatype": "INT64", "data": [1, 2]}


def inference(body: dict[str, Any]) -> InferenceRequest:
    return decode(msgspec.json.encode(body), PredictRequest).to_inference_request()


def test_an_inference_has_tensors_whose_numbers_stay_as_they_were_written() -> None:
    request = inference({"tensors": [TENSOR], "outputs": ["b"], "deadline_ms": 5})
    (tensor,) = request.tensors
    assert (tensor.name, tensor.shape, bytes(tensor.data)) == ("a", [2], b"[1,2]")
    assert (request.texts, request.output_names, request.deadline_ms) == ([], ["b"], 5)


def test_an_inference_has_texts_where_a_model_takes_them() -> None:
    assert inference({"input": "one"}).texts == ["one"]
    assert inference({"input": ["one", "two"]}).texts == ["one", "two"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"image": "aGk="}, "image is for models that classify"),
        ({"tensors": [TENSOR], "top_k": 1}, "top_k is for models that classify"),
        ({"tensors": [TENSOR], "input": "one"}, "send one of tensors and input"),
        ({}, "send one of tensors and input"),
        ({"input": []}, f"input has 0 texts; it takes 1 to {MAX_PROMPTS}"),
        ({"input": ["a"] * (MAX_PROMPTS + 1)}, f"it takes 1 to {MAX_PROMPTS}"),
    ],
)
def test_what_is_no_inference_is_refused(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        inference(body)


def test_tensors_are_refused_for_a_model_that_classifies() -> None:
    with pytest.raises(InvalidRequest, match="tensors are for models of kind infer"):
        converted(PredictRequest, msgspec.json.encode({"tensors": [TENSOR]}))


def test_a_body_with_tensors_and_another_input_is_refused_by_its_check_already() -> None:
    body = decode(msgspec.json.encode({"tensors": [TENSOR], "image": "aGk="}), PredictRequest)
    with pytest.raises(InvalidRequest, match="send one of tensors and image"):
        body.check()


def test_large_tensors_are_packed_without_their_numbers_being_decoded() -> None:
    numbers = [1] * MAX_INLINE_BYTES
    body = msgspec.json.encode({"tensors": [{**TENSOR, "shape": [len(numbers)], "data": numbers}]})
    packed = pack(DecodeBody([PredictRequest.__name__], 100, memoryview(body)))
    assert isinstance(packed, PackedBody) and len(packed.short) < 1000
    many = msgspec.json.encode({"tensors": [{**TENSOR, "name": "n" * 1000, "data": numbers}] * 200})
    refusal = pack(DecodeBody([PredictRequest.__name__], 100, memoryview(many)))
    assert isinstance(refusal, Refusal) and "the names and shapes of tensors take" in str(refusal)
