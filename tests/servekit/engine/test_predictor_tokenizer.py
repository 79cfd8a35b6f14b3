"""Token ids equal those of transformers' tokenizers, whole and cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from servekit.engine import predictor_tokenizer
from servekit.engine.predictor_tokenizer import PredictorTokenizer, kept_lengths, load_predictor_tokenizer
from servekit.errors import ConfigError, ContextTooLong, InvalidRequest, ServekitError
from servekit.protocol.prediction import Modality, PredictorInfo, PredictorKind
from servekit.requests.prediction import PredictionRequest
from tests.support.predictor_checkpoints import CLS, PAIRS, SEP, TEXTS, VOCAB, make_tokenizer

LIMIT = 16


def make(**more: Any) -> PredictorTokenizer:
    settings = {"vocab_size": len(VOCAB), "max_model_len": LIMIT, **more}
    return PredictorTokenizer(
        make_tokenizer(), PredictorInfo(PredictorKind.EMBED, Modality.TEXT, "BertModel", 1, **settings)
    )


def request(inputs: Any, **more: Any) -> PredictionRequest:
    return PredictionRequest(inputs=inputs, param="input", **more)


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(), **names)


LONG = "the sky is blue and the fish swim . " * 400
SPACED = "the sky" + " " * 5000 + "is blue and fish swim . what color is the sky ? cats and dogs sleep . a , b ."


@pytest.mark.parametrize("text", [*TEXTS, LONG, SPACED, ""])
@pytest.mark.parametrize("limit", [3, 7, LIMIT])
def test_texts_are_cut_as_transformers_cuts_them(text: str, limit: int, reference: PreTrainedTokenizerFast) -> None:
    (item,) = make().encode_blocking(request([text], truncates=True, max_tokens=limit))
    assert list(item.token_ids) == reference(text, truncation=True, max_length=limit)["input_ids"]


# Not two long texts: of what is cut off these, transformers' tokenizers make combinations, which takes minutes.
LONG_PAIRS = [(LONG[:600], "fish swim"), ("fish swim", LONG[:600]), (SPACED, "a"), ("", "a")]


@pytest.mark.parametrize("pair", [*PAIRS, *LONG_PAIRS])
@pytest.mark.parametrize("limit", [5, 8, LIMIT])
def test_pairs_are_cut_as_transformers_cuts_them(
    pair: tuple[str, str], limit: int, reference: PreTrainedTokenizerFast
) -> None:
    (item,) = make().encode_blocking(request([pair], truncates=True, max_tokens=limit))
    expected = reference(*pair, truncation="longest_first", max_length=limit, return_token_type_ids=True)
    assert list(item.token_ids) == expected["input_ids"]
    num_first = item.num_first or len(item.token_ids)
    assert expected["token_type_ids"] == [0] * num_first + [1] * (len(item.token_ids) - num_first)


@pytest.mark.parametrize("query", ["the sky is blue", LONG, SPACED, "the " * (LIMIT + 62), "the " * (LIMIT + 66)])
@pytest.mark.parametrize("limit", [5, LIMIT])
def test_a_query_with_many_documents_gives_each_pair_the_tokens_that_it_has_alone(
    query: str, limit: int, monkeypatch: pytest.MonkeyPatch, reference: PreTrainedTokenizerFast
) -> None:
    monkeypatch.setattr(predictor_tokenizer, "SLICE_CHARACTERS", 100)
    documents = ["fish swim", "a", "cats and dogs sleep . " * 3, TEXTS[0], "the sky"]
    pairs = [(query, document) for document in documents]
    items = make().encode_blocking(request(pairs, truncates=True, max_tokens=limit))
    for item, pair in zip(items, pairs, strict=True):
        expected = reference(*pair, truncation="longest_first", max_length=limit)["input_ids"]
        assert list(item.token_ids) == expected, pair


def test_a_long_query_is_encoded_whole_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = make(), list[Any]()
    encode_all, encode = tokenizer._encode_all, tokenizer._encode
    monkeypatch.setattr(tokenizer, "_encode_all", lambda texts: encoded.extend(texts) or encode_all(texts))
    monkeypatch.setattr(tokenizer, "_encode", lambda parts: encoded.append(parts) or encode(parts))
    pairs = [("the sky is blue " * 1000, "fish")] * 200
    assert len(tokenizer.encode_blocking(request(pairs, truncates=True))) == 200
    assert sum(len(part.text) for parts in encoded for part in parts) < 200 * 1000


@pytest.mark.parametrize(("num_first", "num_second"), [(200, 100), (100, 200), (150, 150), (79, 81), (81, 79)])
@pytest.mark.parametrize("limit", [9, LIMIT])
def test_a_long_query_counts_whole_where_the_longer_text_loses_its_tokens(
    num_first: int, num_second: int, limit: int
) -> None:
    (item,) = make().encode_blocking(
        request([("the " * num_first, "a " * num_second)], truncates=True, max_tokens=limit)
    )
    kept = kept_lengths([num_first, num_second], limit - 3)
    assert (item.num_first, len(item.token_ids)) == (2 + kept[0], limit)


def test_texts_are_encoded_in_slices_and_no_longer_than_somebody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_tokenizer, "SLICE_CHARACTERS", 20)
    tokenizer, slices = make(), list[int]()
    encode_all = tokenizer._encode_all
    monkeypatch.setattr(tokenizer, "_encode_all", lambda texts: slices.append(len(texts)) or encode_all(texts))
    texts = ["the sky is blue"] * 7
    assert tokenizer.encode_blocking(request(texts)) == make().encode_blocking(request(texts[:1])) * 7
    assert slices == [2, 2, 2, 1]
    slices.clear()
    assert not tokenizer.encode_blocking(request(texts), lambda: bool(slices)) and slices == [2]


@pytest.mark.parametrize(
    "inputs",
    [["the sky is blue"] * 100, [("the sky is blue and fish swim", "a")] * 100],
    ids=["a prompt with each text", "a query with each document"],
)
def test_a_request_that_takes_too_long_to_encode_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch, inputs: Any
) -> None:
    """Before, many megabytes were encoded for a body of some kilobytes, which was refused for its tokens only then."""
    monkeypatch.setattr(predictor_tokenizer, "MAX_CHARACTERS", 2000)
    tokenizer = make(prompts={"query": "query : "}, default_prompt="query")
    monkeypatch.setattr(tokenizer, "_encode_all", lambda _: pytest.fail("it was encoded"))
    with pytest.raises(InvalidRequest) as refused:
        tokenizer.encode_blocking(request(inputs))
    assert "of 100 inputs have 20" in refused.value.message and "the limit is 2000" in refused.value.message
    assert "send fewer or shorter" in refused.value.message and refused.value.param == "input"


def test_two_long_texts_are_cut_to_the_same_length() -> None:
    (item,) = make().encode_blocking(request([(LONG, LONG)], truncates=True))
    assert len(item.token_ids) == LIMIT and item.num_first == 2 + 6


def test_what_is_too_long_is_refused_by_its_place() -> None:
    for inputs in (["a", LONG], ["a", "a " * 20]):
        with pytest.raises(ContextTooLong, match=r"maximum context length is 16 tokens. However, input\[1\] has"):
            make().encode_blocking(request(inputs))
    with pytest.raises(ContextTooLong, match="However, input has 20"):
        make().encode_blocking(request([[5] * 20]))
    with pytest.raises(InvalidRequest, match="2 special tokens are among them"):
        make().encode_blocking(request(["a"], truncates=True, max_tokens=2))


def test_token_ids_are_taken_as_they_are() -> None:
    (item,) = make().encode_blocking(request([[CLS, 7, SEP]], dimensions=4))
    assert item.token_ids == (CLS, 7, SEP) and item.dimensions == 4
    (item,) = make().encode_blocking(request([[5] * 20], truncates=True))
    assert item.token_ids == (5,) * LIMIT
    with pytest.raises(InvalidRequest, match=f"token id {len(VOCAB)}; the model's are below {len(VOCAB)}"):
        make().encode_blocking(request([[len(VOCAB)]]))


def test_prompts_come_before_inputs_and_their_tokens_are_counted() -> None:
    prompts = {"query": "query ", "passage": "passage "}
    tokenizer = make(prompts=prompts, default_prompt="query", pools_prompts=False)
    plain, (first,) = make(), tokenizer.encode_blocking(request(["the sky"]))
    assert first.token_ids == plain.encode_blocking(request(["query the sky"]))[0].token_ids
    assert first.num_unpooled == 2, "the start token, and the prompt's only one"
    (named,) = tokenizer.encode_blocking(request(["the sky"], prompt_name="passage"))
    assert named.token_ids == plain.encode_blocking(request(["passage the sky"]))[0].token_ids
    with pytest.raises(InvalidRequest, match="it has passage, query"):
        tokenizer.encode_blocking(request(["a"], prompt_name="other"))


async def test_texts_become_lower_case_if_the_checkpoint_says_so() -> None:
    tokenizer = make(lowercases=True)
    try:
        (item,) = await tokenizer.encode(request(["THE SKY"]), "tenant")
    finally:
        tokenizer.close()
    assert item.token_ids == make().encode_blocking(request(["the sky"]))[0].token_ids


async def test_only_one_short_text_is_encoded_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, in_threads = make(), []
    run = tokenizer._threads.run

    async def count(tenant: str, work: Any) -> Any:
        in_threads.append(tenant)
        return await run(tenant, work)

    monkeypatch.setattr(tokenizer._threads, "run", count)
    try:
        for inputs in (["the sky"], [("the sky", "is blue")]):
            assert await tokenizer.encode(request(inputs), "a") == tokenizer.encode_blocking(request(inputs))
        assert not in_threads
        for inputs in (["the sky", "is blue"], ["the sky " * 100], [[1, 2]]):
            wanted = request(inputs, truncates=True)
            assert await tokenizer.encode(wanted, "a") == tokenizer.encode_blocking(wanted)
        assert in_threads == ["a"] * 3
    finally:
        tokenizer.close()
    with pytest.raises(ServekitError, match="shutting down"):
        await tokenizer.encode(request(["the sky"]), "a")


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    info = PredictorInfo(PredictorKind.EMBED, Modality.TEXT, "BertModel", 1, 10, 10)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_predictor_tokenizer(tmp_path, info)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_predictor_tokenizer(tmp_path, info)
