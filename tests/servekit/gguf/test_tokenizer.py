"""Tests of tokenizers from GGUF metadata: they encode as the original does, and as llama.cpp's algorithm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from servekit.engine.model_files import DEMO_MODEL_PATH, find_chat_template
from servekit.engine.tokenizer import Tokenizer, load_tokenizer
from servekit.errors import ConfigError
from servekit.gguf import tokenizer as gguf_tokenizer
from servekit.gguf.header import read_header
from servekit.gguf.tokenizer import tokenizer_config, tokenizer_json
from tests.support.gguf_files import write_file

TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\n\n and\ttabs \r\n",
    "naïve café ÜBER 😀 日本語 ﬁ e\u0301",
    "I'LL we've\nDON'T x=1; y+=2 // comment 2024-01-02",
    "<|user|>hi<think>so</think> there<|end|>",
    "",
    " ",
    "\x00\x07odd",
]
CORPUS = [text * 3 for text in TEXTS if "<" not in text] + ["the quick brown fox jumps over the lazy dog " * 5] * 3
SPECIAL = ["<s>", "</s>", "<|user|>", "<|end|>"]


def byte_level(pre: str) -> HuggingFaceTokenizer:
    """Return a trained byte-level tokenizer that cuts text as models of this kind do."""
    tokenizer = HuggingFaceTokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
        cuts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        cuts = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def byte_level_metadata(tokenizer: HuggingFaceTokenizer, pre: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    size = tokenizer.get_vocab_size()
    added = {index: token.special for index, token in tokenizer.get_added_tokens_decoder().items()}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokenizer.id_to_token(index) for index in range(size)],
        "tokenizer.ggml.token_type": [{True: 3, False: 4, None: 1}[added.get(index)] for index in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def loaded(metadata: dict[str, Any], path: Path, num_rows: int | None = None) -> Tokenizer:
    rows = np.zeros((num_rows or len(metadata["tokenizer.ggml.tokens"]), 2), np.float32)
    header = read_header(write_file(path / "model.gguf", metadata, {"token_embd.weight": (rows, "F32")}))
    (path / "tokenizer.json").write_bytes(tokenizer_json(header))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(header)))
    return load_tokenizer(path)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", "smollm"])
def test_a_byte_level_tokenizer_encodes_as_the_original(pre: str, tmp_path: Path) -> None:
    original = byte_level(pre)
    ours = loaded(byte_level_metadata(original, pre), tmp_path)
    for text in TEXTS:
        expected = original.encode(text).ids
        (found,) = ours.encode_blocking([text], add_special_tokens=False)
        assert found.tolist() == expected, text
        assert ours.decode(found) == original.decode(expected, skip_special_tokens=False)
        begins_with_bos = pre in ("llama-bpe", "tekken")
        assert ours.encode_blocking([text])[0].tolist() == [0] * begins_with_bos + expected
    assert ours.is_special(2) and not ours.is_special(original.token_to_id("<think>"))
    ours.close()


def sentencepiece_metadata() -> dict[str, Any]:
    """Return a vocabulary as SentencePiece trains it: scores fall in the order in which tokens were made."""
    tokenizer = HuggingFaceTokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    made = [tokenizer.id_to_token(index) for index in range(3, tokenizer.get_vocab_size())]
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *data, *made, "<|user|>"]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    merged = {"".join(pair): -float(rank) for rank, pair in enumerate(merges)}
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [merged.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(made) + [3],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """Encode as llama.cpp does: merge the neighbours whose token has the best score, as long as there are any."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(pieces[i] + pieces[i + 1], i) for i in range(len(pieces) - 1)]
        known = [(-scores[ids[whole]], i) for whole, i in pairs if whole in ids and "<" not in whole]
        if not known:
            break
        _, place = min(known)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()]
    return found


def test_a_sentencepiece_tokenizer_encodes_as_llama_cpp(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    ours = loaded(metadata, tmp_path)
    for text in [text for text in TEXTS if "<" not in text]:
        assert ours.encode_blocking([text])[0].tolist() == [1, *sentencepiece_ids(metadata, text)], text
    user = len(metadata["tokenizer.ggml.tokens"]) - 1
    (found,) = ours.encode_blocking(["<|user|>the fox"], add_special_tokens=False)
    assert found.tolist() == [user, *sentencepiece_ids(metadata, "the fox")]
    assert ours.decode(found) == "<|user|> the fox"
    ours.close()


def test_merges_are_found_as_transformers_finds_them(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    loaded(metadata, tmp_path).close()
    found = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    types = metadata["tokenizer.ggml.token_type"]
    tokens = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = {token: metadata["tokenizer.ggml.scores"][index] for token, index in tokens.items() if types[index] == 1}
    assert found == [list(pair) for pair in generate_merges(tokens, scores)]
    assert len(found) > 50


def test_a_tokenizer_json_in_the_file_is_used_as_it_is(tmp_path: Path) -> None:
    whole = (DEMO_MODEL_PATH / "tokenizer.json").read_text()
    original = HuggingFaceTokenizer.from_str(whole)
    tokens = [original.id_to_token(index) for index in range(original.get_vocab_size())]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.huggingface.json": whole,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.ggml.bos_token_id": 1,
    }
    ours = loaded(metadata, tmp_path, len(tokens) + 5)
    assert [ours.encode_blocking([text])[0].tolist() for text in TEXTS] == [original.encode(text).ids for text in TEXTS]
    template = find_chat_template(tmp_path)
    assert (template.source, template.special_tokens) == ("{{ messages }}", {"bos_token": tokens[1]})
    ours.close()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tokenizer.ggml.tokens": None}, "no list of tokens"),
    ({"tokenizer.ggml.model": "bert"}, "kind 'bert', which servekit does not read"),
    ({"tokenizer.ggml.model": None}, "kind 'None'"),
    ({"tokenizer.ggml.pre": "invented"}, "pre = 'invented'"),
    ({"tokenizer.ggml.pre": None}, "pre = 'None'"),
    ({"tokenizer.ggml.pre": ["qwen2"]}, "servekit does not know how that cuts"),
    ({"tokenizer.ggml.merges": None}, "no list of merges"),
    ({"tokenizer.ggml.merges": ["a b", "zz q"]}, "merges has '"),
    ({"tokenizer.ggml.merges": ["nospace"]}, "merges has 'nospace'"),
    ({"tokenizer.ggml.token_type": [1, 1]}, "not an array of"),
    ({"tokenizer.ggml.token_type": "all"}, "not an array of"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_tokenizer_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2") | changes
    with pytest.raises(ConfigError, match=message):
        loaded(metadata, tmp_path, 600)


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="embeddings of 10"):
        loaded(byte_level_metadata(byte_level("gpt-2"), "gpt-2"), tmp_path, 10)


def test_tokens_that_would_take_long_to_merge_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer, "MAX_SQUARED_LENGTHS", 100)
    with pytest.raises(ConfigError, match="too long to find merges"):
        loaded(sentencepiece_metadata(), tmp_path)
