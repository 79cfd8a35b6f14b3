"""What the server of a remote predictor is sent, and what is made of its answers."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from typing import Any

import pytest

from servekit.errors import InvalidRequest, RemoteFailed
from servekit.protocol.prediction import PredictorKind
from servekit.remote.prediction_format import (
    RemotePart,
    check_lengths,
    check_supported,
    read_answer,
    read_result,
    write_requests,
)
from servekit.remote.settings import PredictorDialect
from servekit.requests.prediction import PredictionRequest

EMBED, RERANK = PredictorKind.EMBED, PredictorKind.RERANK


def wanted(inputs: list[Any], **fields: Any) -> PredictionRequest:
    return PredictionRequest(inputs=inputs, param="input", **fields)


def written(
    request: PredictionRequest, kind: PredictorKind, dialect: PredictorDialect = "openai", size: int = 2
) -> list[tuple[str, dict[str, Any]]]:
    return [(part.path, part.fields) for part in write_requests(request, kind, "there", dialect, size)]


def test_texts_are_sent_in_batches_and_in_their_order() -> None:
    parts = write_requests(wanted(["a", "b", "c"], dimensions=8), EMBED, "there", "openai", 2)
    shared = {"model": "there", "encoding_format": "base64", "dimensions": 8}
    assert parts == [
        RemotePart("/embeddings", {"input": ["a", "b"], **shared}, 0, 2),
        RemotePart("/embeddings", {"input": ["c"], **shared}, 2, 1),
    ]


def test_each_query_has_its_own_requests() -> None:
    """POST /score pairs any texts; a reranker's request has one query."""
    pairs = [("q", "a"), ("q", "b"), ("q", "c"), ("r", "d"), ("q", "e")]
    parts = write_requests(wanted(pairs), RERANK, "there", "openai", 2)
    assert [(part.fields["query"], part.fields["documents"], part.first) for part in parts] == [
        ("q", ["a", "b"], 0),
        ("q", ["c"], 2),
        ("r", ["d"], 3),
        ("q", ["e"], 4),
    ]


def test_vllm_is_told_how_to_cut_inputs_and_others_decide_themselves() -> None:
    ((_, fields),) = written(wanted(["a"], truncates=True), EMBED, "vllm")
    assert fields["truncate_prompt_tokens"] == -1
    ((_, fields),) = written(wanted([("q", "a")], truncates=True, max_tokens=7, raw_scores=True), RERANK, "vllm")
    assert fields["truncate_prompt_tokens"] == 7 and fields["use_activation"] is False
    for dialect, truncates in (("vllm", False), ("openai", True)):
        ((_, fields),) = written(wanted(["a"], truncates=truncates), EMBED, dialect)  # type: ignore[arg-type]
        assert "truncate_prompt_tokens" not in fields


def test_text_embeddings_inference_has_routes_of_its_own() -> None:
    request = wanted(["a"], truncates=True, prompt_name="query")
    assert written(request, EMBED, "tei") == [("/embed", {"inputs": ["a"], "truncate": True, "prompt_name": "query"})]
    fields = {"query": "q", "texts": ["a"], "truncate": False, "raw_scores": True}
    assert written(wanted([("q", "a")], raw_scores=True), RERANK, "tei") == [("/rerank", fields)]


@pytest.mark.parametrize(
    ("request_", "kind", "dialect", "param"),
    [
        (wanted(["a"], prompt_name="query"), EMBED, "vllm", "prompt_name"),
        (wanted(["a"], truncates=True, max_tokens=5), EMBED, "openai", "truncate_prompt_tokens"),
        (wanted(["a"], truncates=True, max_tokens=5), EMBED, "tei", "truncate_prompt_tokens"),
        (wanted([("q", "a")], raw_scores=True), RERANK, "openai", "raw_scores"),
        (wanted([[1, 2]]), EMBED, "tei", "input"),
    ],
)
def test_what_the_server_may_not_support_is_refused(
    request_: PredictionRequest, kind: PredictorKind, dialect: PredictorDialect, param: str
) -> None:
    with pytest.raises(InvalidRequest, match="runs on another server") as caught:
        check_supported(request_, kind, "here", dialect)
    assert (caught.value.param, caught.value.answer_code) == (param, "not_supported")
    assert f"dialect '{dialect}'" in str(caught.value)


@pytest.mark.parametrize(
    ("param", "field"),
    [
        ("documents", "max_tokens_per_doc"),
        ("texts", "max_tokens_per_doc"),
        ("text_2", "truncate_prompt_tokens"),  # POST /score
        ("input", "truncate_prompt_tokens"),
    ],
)
def test_a_refused_limit_of_tokens_has_the_name_that_the_client_gave_it(param: str, field: str) -> None:
    request = PredictionRequest(inputs=[("q", "a")], param=param, truncates=True, max_tokens=5)
    with pytest.raises(InvalidRequest, match=f"'openai' does not have the field {field}; leave it out") as caught:
        check_supported(request, RERANK, "here", "openai")
    assert caught.value.param == field


def test_token_ids_pass_through_to_servers_that_take_them() -> None:
    request = wanted([[1, 2]])
    check_supported(request, EMBED, "here", "openai")
    ((_, fields),) = written(request, EMBED)
    assert fields["input"] == [[1, 2]]


def packed(*values: float) -> bytes:
    return array("f", values).tobytes()


def read(
    body: Any, num_inputs: int, kind: PredictorKind, dialect: PredictorDialect = "openai"
) -> tuple[list[bytes], int]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    values, num_tokens = read_answer(data, RemotePart("/x", {}, 0, num_inputs), kind, dialect)
    results = [read_result(value, kind) for value in values]
    check_lengths(results)
    return results, num_tokens


def test_embeddings_are_read_as_base64_and_as_numbers_whatever_their_order() -> None:
    base64 = b64encode(packed(0.25, -2.0)).decode()
    data = [{"index": 1, "embedding": [0.5, 3]}, {"index": 0, "embedding": base64}]
    answer = {"data": data, "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    assert read(answer, 2, EMBED) == ([packed(0.25, -2.0), packed(0.5, 3.0)], 9)
    assert read([[1.5], [2.5]], 2, EMBED, "tei") == ([packed(1.5), packed(2.5)], 0)


def test_scores_are_read_by_the_index_of_their_document() -> None:
    results = [{"index": 1, "relevance_score": 0.9, "document": {"text": "b"}}, {"index": 0, "relevance_score": 0.1}]
    assert read({"results": results, "usage": {"total_tokens": 5}}, 2, RERANK) == ([packed(0.1), packed(0.9)], 5)
    assert read([{"index": 0, "score": 0.5}], 1, RERANK, "tei") == ([packed(0.5)], 0)


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b"{",
        {},
        {"data": []},
        {"data": [{"index": 0, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 2, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]},
        {"data": [{"index": 0, "embedding": []}, {"index": 1, "embedding": []}]},
        {"data": [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": "AAAA"}]},  # not whole numbers
        {"data": [{"index": 0, "embedding": "?"}, {"index": 1, "embedding": "?"}]},
        {"data": [{"index": 0, "embedding": [None]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1e39]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1e39, -1e39]}, {"index": 1, "embedding": [1.0, 2.0]}]},
        {"data": [{"index": 0, "embedding": "AADAfw=="}, {"index": 1, "embedding": [1.0]}]},  # NaN
        {"data": [{"index": 0, "embedding": "AACAfw=="}, {"index": 1, "embedding": [1.0]}]},  # inf
        {"data": [{"index": 0, "embedding": 1.0}, {"index": 1, "embedding": 1.0}]},
    ],
)
def test_an_answer_that_does_not_fit_its_request_is_no_answer(body: Any) -> None:
    with pytest.raises(RemoteFailed, match="the model's server sent an invalid"):
        read(body, 2, EMBED)


def test_largest_numbers_are_finite() -> None:
    largest = 3.4028234e38
    assert read([[largest] * 1000], 1, EMBED, "tei") == ([packed(*[largest] * 1000)], 0)


@pytest.mark.parametrize("score", [b"1e39", b'"AAAA"', b"[0.5]"])
def test_score_that_is_no_finite_number_is_no_answer(score: bytes) -> None:
    with pytest.raises(RemoteFailed, match="the model's server sent an invalid"):
        read(b'[{"index": 0, "score": %s}]' % score, 1, RERANK, "tei")


def test_base64_has_the_lowest_byte_first_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    base64 = b64encode(packed(0.25)[::-1]).decode()
    assert read({"data": [{"index": 0, "embedding": base64}]}, 1, EMBED) == ([packed(0.25)], 0)
