"""Tests of tokenizers in other forms: what is made of them cuts text like the libraries that they were made for."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from servekit.engine.tokenizer import Tokenizer, byte_level_alphabet, load_tokenizer
from servekit.errors import ConfigError
from workers.conversion.tokenizer import convert_tokenizer

CORPUS = [
    "The sky is blue. What color is the sky?",
    "Count from 3 to 9: 3, 4, 5.",
    "Zażółć gęślą jaźń — naïve café, 東京 😀",
    "def f(x):\n    return x + 1\n",
] * 40
TEXTS = [
    "The sky is blue.",
    " two  spaces, and more   ",
    "",
    " ",
    "Hello\nworld\t!\n\n",
    "東京 😀 unseen ẞ ﬁ",
    "def g(y):\n        return y ** 2",
    "3.14159 it's WE'LL",
    "▁already there",
]


@cache
def trained(**options: Any) -> bytes:
    """Return a small sentencepiece model."""
    written = BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=written, vocab_size=420, character_coverage=0.98,
        hard_vocab_limit=False, byte_fallback=True, minloglevel=9, **options
    )  # fmt: skip
    return written.getvalue()


LIKE_LLAMA = {"model_type": "bpe", "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "as Llama and Mistral have it": LIKE_LLAMA,
    "as Gemma has it": {**LIKE_LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["<turn>", "\n\n"]},
    "with normal forms and collapsed spaces": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc"},
    "Unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc"},
    "Unigram without normal forms": {**LIKE_LLAMA, "model_type": "unigram", "split_digits": True},
}


def converted(directory: Path, model_type: str = "llama", **config: Any) -> Tokenizer:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    if config:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    output = directory / "out"
    output.mkdir()
    convert_tokenizer(directory, output)
    return load_tokenizer(output)


def ids_of(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer.encode_blocking([text], add_special_tokens)[0])


@pytest.mark.parametrize("name", SENTENCEPIECE)
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_sentencepiece_model_cuts_text_as_sentencepiece_does(tmp_path: Path, name: str, model_type: str) -> None:
    content = trained(**{key: tuple(v) if isinstance(v, list) else v for key, v in SENTENCEPIECE[name].items()})
    (tmp_path / "tokenizer.model").write_bytes(content)
    tokenizer = converted(tmp_path, model_type)
    truth = SentencePieceProcessor(model_proto=content)
    for text in [*TEXTS, *CORPUS[:4], "<turn>user\n\nHi<turn>"]:
        assert ids_of(tokenizer, text) == truth.encode(text), text
        decoded = truth.decode(truth.encode(text))
        assert tokenizer.decode(truth.encode(text)) in (decoded, f" {decoded}")  # in a stream, the first space is shown


def test_special_tokens_come_from_the_tokenizers_configuration(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content := trained(**LIKE_LLAMA))
    truth = SentencePieceProcessor(model_proto=content)
    size = truth.get_piece_size()
    added = {
        str(size): {"content": "<|im_start|>", "special": True},
        str(size + 1): {"content": "<tool>", "special": False},
    }
    tokenizer = converted(tmp_path, bos_token="<s>", add_eos_token=True, added_tokens_decoder=added)
    body = truth.encode("The sky")
    assert ids_of(tokenizer, "The sky", True) == [1, *body, 2]
    assert ids_of(tokenizer, "<|im_start|>The sky<tool>") == [size, *body, size + 1]
    assert tokenizer.is_special(size) and not tokenizer.is_special(size + 1)


def test_a_start_token_is_not_added_where_the_configuration_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(**LIKE_LLAMA))
    assert ids_of(converted(tmp_path, add_bos_token=False), "The sky", True)[0] != 1


def test_newer_tokenizers_put_no_space_behind_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content := trained(**LIKE_LLAMA))
    tokenizer = converted(tmp_path, legacy=False)
    truth = SentencePieceProcessor(model_proto=content)
    assert ids_of(tokenizer, "The sky") == truth.encode("The sky")
    assert tokenizer.decode(ids_of(tokenizer, "<s>The"), skip_special_tokens=True) == "The"


def test_tokens_in_files_of_older_releases_are_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content := trained(**LIKE_LLAMA))
    size = SentencePieceProcessor(model_proto=content).get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[PAD]": size}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "</s>"}}))
    tokenizer = converted(tmp_path)
    assert ids_of(tokenizer, "[PAD]", True) == [2, size]


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def byte_level() -> HuggingFaceTokenizer:
    """Return a small tokenizer of bytes, trained by the library that has most of them."""
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.mark.parametrize("file", ["tiktoken.model", "tokenizer.model"])
def test_a_tiktoken_file_cuts_text_as_tiktoken_does(tmp_path: Path, file: str) -> None:
    alphabet = byte_level_alphabet()
    vocabulary = sorted(byte_level().get_vocab().items(), key=lambda entry: entry[1])
    tokens = [
        bytes(alphabet[character] for character in token)
        for token, _ in vocabulary
        if token != byte_level().id_to_token(0)
    ]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (tmp_path / file).write_text("\n".join(lines))
    truth = tiktoken.Encoding("test", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    tokenizer = converted(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    for text in [*TEXTS, *CORPUS[:4]]:
        assert ids_of(tokenizer, text) == truth.encode(text), text
        assert tokenizer.decode(truth.encode(text)) == text


def test_a_vocabulary_and_its_merges_cut_text_as_the_tokenizer_that_they_are_of(tmp_path: Path) -> None:
    byte_level().model.save(str(tmp_path))
    tokenizer = converted(
        tmp_path, "opt", tokenizer_class="GPT2Tokenizer", bos_token="<s>", eos_token="<s>", unk_token="<s>",
        add_bos_token=True,
    )  # fmt: skip
    for text in [*TEXTS, *CORPUS[:4]]:
        assert ids_of(tokenizer, text) == byte_level().encode(text).ids, text
        assert tokenizer.decode(ids_of(tokenizer, text)) == text
    assert ids_of(tokenizer, "The sky", True) == [0, *byte_level().encode("The sky").ids]


def _own_code(directory: Path) -> None:
    (directory / "qwen.tiktoken").write_text("YQ== 0")
    content = {"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(content))


def _damaged(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(trained(**LIKE_LLAMA)[:1000])


def _empty(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(b"")


def _shifted(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(trained(**LIKE_LLAMA))
    (directory / "config.json").write_text('{"model_type": "xglm"}')


def _wrong_ids(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(trained(**LIKE_LLAMA))
    (directory / "added_tokens.json").write_text(json.dumps({"[PAD]": 10_000}))


def _no_tokens(directory: Path) -> None:
    (directory / "tokenizer.model").write_bytes(trained(**LIKE_LLAMA))
    (directory / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 3}}')


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (_own_code, "is made by Python code in the model's repository, which servekit never runs"),
        (_damaged, "is not a sentencepiece model"),
        (_empty, "none can be made of the tokenizer's other files"),
        (_shifted, "the token ids of the family xglm are not those of its sentencepiece model"),
        (_wrong_ids, r"the token '\[PAD\]' has the id 10000 in the model's files, and would get"),
        (_no_tokens, r"tokenizer_config\.json is damaged"),
    ],
)
def test_what_cannot_be_converted_is_refused_in_a_sentence(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        convert_tokenizer(tmp_path, tmp_path)
    assert "\n" not in caught.value.message and len(caught.value.message) < 800
