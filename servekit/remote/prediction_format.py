"""Write requests for embeddings and for scores, for the server of a remote model, and read its answers. This is pure.

A client's request becomes one request for every `max_batch_size` inputs. What the server is not known to support is
refused with a message, and never ignored; only whether long inputs are cut is decided by servers of OpenAI's dialect.
"""

from __future__ import annotations

import binascii
import math
import sys
from array import array
from base64 import b64decode
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw, Struct

from servekit.errors import InvalidRequest, RemoteFailed
from servekit.protocol.prediction import PredictorKind
from servekit.remote.settings import PredictorDialect
from servekit.requests.prediction import Input, PredictionRequest

Json = dict[str, Any]


class RemotePart(Struct, frozen=True):
    """One request to the server, for some of the inputs of a client's request."""

    path: str
    fields: Json  # of the body
    first: int  # the index of its first input
    num_inputs: int


class _Embedding(Struct):
    index: int
    embedding: Raw


class _Usage(Struct):
    total_tokens: int = 0


class _Embeddings(Struct):
    data: list[_Embedding]
    usage: _Usage | None = None


class _Result(Struct):
    index: int
    relevance_score: Raw


class _Results(Struct):
    results: list[_Result]
    usage: _Usage | None = None


class _Rank(Struct):
    index: int
    score: Raw


def check_supported(request: PredictionRequest, kind: PredictorKind, model: str, dialect: PredictorDialect) -> None:
    """Raise InvalidRequest for what the server of a remote model is not known to support. `model` is its name here."""
    is_tei = dialect == "tei"
    # Both are vLLM's truncate_prompt_tokens. POST /score has it under that name, and POST /rerank under another one.
    cut = "max_tokens_per_doc" if request.param in ("documents", "texts") else "truncate_prompt_tokens"
    refused = {
        "prompt_name": request.prompt_name is not None and not is_tei,
        cut: request.max_tokens is not None and dialect != "vllm",
        "raw_scores": request.raw_scores and dialect == "openai",
    }
    for name, is_wanted in refused.items():
        if is_wanted:
            raise InvalidRequest(
                f"the model {model!r} runs on another server, whose dialect {dialect!r} does not have the field "
                f"{name}; leave it out",
                param=name,
                code="not_supported",
            )
    if kind is PredictorKind.EMBED and is_tei and not isinstance(request.inputs[0], str):
        raise InvalidRequest(
            f"the model {model!r} runs on another server, whose dialect {dialect!r} takes no token ids; send texts",
            param=request.param,
            code="not_supported",
        )


def write_requests(
    request: PredictionRequest, kind: PredictorKind, name: str, dialect: PredictorDialect, max_batch_size: int
) -> list[RemotePart]:
    """Return the requests for all inputs, in their order. `name` is the model's name there."""
    if kind is PredictorKind.EMBED:
        return [
            _embedding_part(request, batch, first, name, dialect)
            for first, batch in _batches(request.inputs, 0, max_batch_size)
        ]
    parts, first = [], 0
    # A request has one query: pairs with different ones (POST /score) need a request for each.
    for query, group in groupby(request.inputs, key=lambda pair: pair[0]):  # type: ignore[index]
        pairs: list[Any] = list(group)
        parts += [
            _rerank_part(request, query, [text for _, text in batch], start, name, dialect)
            for start, batch in _batches(pairs, first, max_batch_size)
        ]
        first += len(pairs)
    return parts


def _batches(inputs: Sequence[Any], first: int, size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    for start in range(0, len(inputs), size):
        yield first + start, inputs[start : start + size]


def _embedding_part(
    request: PredictionRequest, batch: Sequence[Input], first: int, name: str, dialect: PredictorDialect
) -> RemotePart:
    inputs = list(batch)
    if dialect == "tei":
        fields: Json = {"inputs": inputs, "truncate": request.truncates, "prompt_name": request.prompt_name}
    else:  # base64 is a quarter of the bytes, and exact
        fields = {"model": name, "input": inputs, "encoding_format": "base64", **_truncation(request, dialect)}
    fields["dimensions"] = request.dimensions
    return RemotePart("/embed" if dialect == "tei" else "/embeddings", _given(fields), first, len(inputs))


def _rerank_part(
    request: PredictionRequest, query: Any, texts: list[str], first: int, name: str, dialect: PredictorDialect
) -> RemotePart:
    if dialect == "tei":
        fields: Json = {"query": query, "texts": texts, "truncate": request.truncates, "raw_scores": request.raw_scores}
    else:
        fields = {"model": name, "query": query, "documents": texts, **_truncation(request, dialect)}
        if request.raw_scores:
            fields |= {"use_activation": False, "raw_scores": True}  # vLLM's field, and servekit's
    return RemotePart("/rerank", _given(fields), first, len(texts))


def _truncation(request: PredictionRequest, dialect: PredictorDialect) -> Json:
    if dialect != "vllm" or not request.truncates:
        return {}
    return {"truncate_prompt_tokens": -1 if request.max_tokens is None else request.max_tokens}


def _given(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def read_answer(
    body: bytes | bytearray, part: RemotePart, kind: PredictorKind, dialect: PredictorDialect
) -> tuple[list[Raw], int]:
    """Return a value for each input, and the tokens that the server has counted; 0 if it tells none.

    The values are not read yet, which takes longest: `read_result` reads one. Raises RemoteFailed.
    """
    answer: Any
    num_tokens = 0
    if dialect == "tei":
        of_kind: Any = list[Raw] if kind is PredictorKind.EMBED else list[_Rank]
        answer = _read(body, of_kind)
        values = answer if kind is PredictorKind.EMBED else _ordered({each.index: each.score for each in answer})
    else:
        answer = _read(body, _Embeddings if kind is PredictorKind.EMBED else _Results)
        num_tokens = 0 if answer.usage is None else max(0, answer.usage.total_tokens)
        if kind is PredictorKind.EMBED:
            values = _ordered({each.index: each.embedding for each in answer.data})
        else:
            values = _ordered({each.index: each.relevance_score for each in answer.results})
    if len(values) != part.num_inputs:
        raise RemoteFailed(
            f"the model's server sent an invalid answer: {len(values)} results for {part.num_inputs} inputs"
        )
    return values, num_tokens


def read_result(value: Raw, kind: PredictorKind) -> bytes:
    """Return the 32-bit floats of one input. Raises RemoteFailed."""
    if kind is PredictorKind.EMBED:
        return _packed(_read(value, str | list[float]))
    return _packed([_read(value, float)])


def check_lengths(results: Sequence[bytes]) -> None:
    """Raise RemoteFailed if the results of a request have different lengths, or none."""
    lengths = {len(each) // 4 for each in results}
    if len(lengths) > 1 or 0 in lengths:
        numbers = ", ".join(map(str, sorted(lengths)[:5]))
        raise RemoteFailed(
            f"the model's server sent an invalid answer: its results have {numbers} numbers; they must have the same "
            "number, and at least one"
        )


def _ordered(by_index: dict[int, Any]) -> list[Any]:
    """Return the values by ascending index. Raises RemoteFailed if one is missing."""
    if sorted(by_index) != list(range(len(by_index))):
        raise RemoteFailed("the model's server sent an invalid answer: the indices of its results have gaps")
    return [by_index[index] for index in range(len(by_index))]


def _packed(values: str | list[float]) -> bytes:
    """Return numbers as 32-bit floats of this machine. Base64 has the lowest byte first. Raises RemoteFailed."""
    try:
        numbers = array("f", b64decode(values, validate=True) if isinstance(values, str) else values)
    except (binascii.Error, ValueError, OverflowError) as error:
        raise RemoteFailed(f"the model's server sent an invalid embedding: {str(error)[:200]}") from None
    if isinstance(values, str) and sys.byteorder == "big":
        numbers.byteswap()
    if not math.isfinite(sum(numbers)):  # of 64 bits: finite numbers of 32 bits do not add up to inf
        raise RemoteFailed("the model's server sent an invalid answer: some of its numbers are not finite")
    return numbers.tobytes()


def _read(body: bytes | bytearray | Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteFailed(f"the model's server sent an invalid answer: {str(error)[:200]}") from None
