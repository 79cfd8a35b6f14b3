"""Make the tokenizer.json that the `tokenizers` library reads, from a GGUF file's metadata.

Token ids are the places in the file's list, so every token is in the vocabulary of the JSON, special ones too: the
library gives an id of its own to an added token that it does not find there.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from servekit.errors import ConfigError
from servekit.gguf.header import Header

# What tokenizer.ggml.token_type says.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"  # as SentencePiece writes it
# To find the merges of a vocabulary takes a time that grows with the squares of the tokens' lengths. Gemma's 262,144
# tokens have 30 million.
MAX_SQUARED_LENGTHS = 2**28

# How text is cut before it is merged, by tokenizer.ggml.pre. The names are llama.cpp's, which makes them up: they are
# in no other file of the model. The patterns are those of the models' own tokenizer.json.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
}
_GPT2_CUTS = ("gpt-2", "phi-2", "jina-en", "roberta-bpe")  # the pattern that the library's ByteLevel has itself
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")  # and then GPT-2's pattern
# Vocabularies in which a whole word that is a token stays one, and whose prompts begin with a token of their own.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
_NORMALIZED = ("qwen2", "deepseek-r1-qwen", "megrez")


def tokenizer_json(header: Header) -> bytes:
    """Return the content of tokenizer.json.

    Raises ConfigError for a kind of tokenizer that is not read, and for tokens and merges that contradict each other.
    """
    metadata = header.metadata
    tokens = _tokens(header)
    # A file may contain its model's tokenizer.json as it is; then there is nothing to make.
    if isinstance(whole := metadata.get("tokenizer.huggingface.json"), str):
        return whole.encode()
    types = _array(header, "token_type", int, len(tokens), [NORMAL] * len(tokens))
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(header, tokens)
    elif kind == "llama":
        parts = _sentencepiece(header, tokens, types)
    else:
        raise ConfigError(
            f"{header.path} has a tokenizer of the kind {str(kind)[:40]!r}, which servekit does not read from GGUF "
            "files; it reads gpt2 and llama. Serve the safetensors checkpoint of the same model"
        )
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": type_ != USER_DEFINED,
        }
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
    whole_file = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}
    return msgspec.json.encode({**whole_file, "post_processor": _post_processor(header, tokens)})


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Return what tokenizer_config.json has to say: the chat template, and the special tokens that it may use."""
    tokens = _tokens(header)
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = _special_id(header, key, len(tokens))
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    template = header.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _tokens(header: Header) -> list[str]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    num_rows = header.tensors["token_embd.weight"].shape[0]
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ConfigError(f"{header.path} has no list of tokens (tokenizer.ggml.tokens); servekit needs its tokenizer")
    if len(tokens) > num_rows:
        raise ConfigError(f"{header.path} has {len(tokens)} tokens, and embeddings of {num_rows}; it is damaged")
    return tokens


def _array(header: Header, key: str, kind: type, length: int, default: list[Any]) -> list[Any]:
    """Return an array with an element for each token; `default` if the file has none."""
    values = header.metadata.get(f"tokenizer.ggml.{key}")
    if values is None:
        return default
    if not isinstance(values, list) or len(values) != length or type(values[0]) is not kind:
        raise ConfigError(f"{header.path}: tokenizer.ggml.{key} is not an array of {length} numbers; it is damaged")
    return values


def _special_id(header: Header, key: str, num_tokens: int) -> int | None:
    index = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return index if type(index) is int and 0 <= index < num_tokens else None


def _cut(header: Header) -> str:
    """Return the name of how text is cut. Raises ConfigError for one that is not known."""
    name = header.metadata.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in (*_PATTERNS, *_GPT2_CUTS, *_DIGITS_ALONE):
        raise ConfigError(
            f"{header.path} has tokenizer.ggml.pre = {str(name)[:40]!r}, and servekit does not know how that cuts "
            "text into words. Convert the model again with a newer llama.cpp, or serve its safetensors checkpoint"
        )
    return name


def _byte_level(header: Header, tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE, as GPT-2 has it."""
    cut, vocabulary = _cut(header), _vocabulary(tokens)
    merges = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise ConfigError(f"{header.path} has no list of merges (tokenizer.ggml.merges); its tokenizer cannot be used")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ConfigError(
                f"{header.path}: tokenizer.ggml.merges has {merge[:60]!r}, whose parts and whole are not all tokens; "
                "it is damaged"
            )
        pairs.append([left, right])
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    if cut in _PATTERNS:
        pattern = {"type": "Split", "pattern": {"Regex": _PATTERNS[cut]}, "behavior": "Isolated", "invert": False}
        cuts = [pattern, byte_level]
    else:
        digits = [{"type": "Digits", "individual_digits": True}] if cut in _DIGITS_ALONE else []
        cuts = [*digits, byte_level | {"use_regex": True}]
    return {
        "normalizer": {"type": "NFC"} if cut in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocabulary, pairs, ignore_merges=cut in _WHOLE_WORDS),
    }


def _sentencepiece(header: Header, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """BPE over characters, as SentencePiece has it: the best pair of neighbours first, unknown characters as bytes."""
    scores = _array(header, "scores", float, len(tokens), [])
    # Scores do not tell in which order Gemma's tokens were merged; their order in the file does.
    if not scores or str(header.metadata["general.architecture"]).startswith("gemma"):
        scores = [-float(index) for index in range(len(tokens))]
    vocabulary = _vocabulary(tokens)
    written = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    read = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        written.insert(0, {"type": "Prepend", "prepend": _SPACE})
        read.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _special_id(header, "unknown", len(tokens))
    model = _bpe(vocabulary, _merges(header, tokens, types, scores, vocabulary))
    return {
        "normalizer": {"type": "Sequence", "normalizers": written},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": read},
        "model": model
        | {"byte_fallback": True, "fuse_unk": True, "unk_token": None if unknown is None else tokens[unknown]},
    }


def _merges(
    header: Header, tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> list[list[str]]:
    """Return the merges that SentencePiece does without having a list of them: all pairs that are a token together.

    They come in the order in which transformers' converter of SentencePiece models writes them: by the token's score,
    then by the parts' lengths.
    """
    mergeable = [(token, scores[index]) for index, token in enumerate(tokens) if types[index] in (NORMAL, USER_DEFINED)]
    if sum(len(token) ** 2 for token, _ in mergeable) > MAX_SQUARED_LENGTHS:
        raise ConfigError(f"{header.path} has tokens that are too long to find merges of them; it is damaged")
    pairs = []
    for token, score in mergeable:
        parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in parts if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        pairs += [(score, left, right) for left, right in known]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])), reverse=True)
    return [[left, right] for _, left, right in pairs]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Return the ids by token; of equal tokens, the first one counts."""
    return {token: len(tokens) - 1 - index for index, token in enumerate(reversed(tokens))}


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _post_processor(header: Header, tokens: list[str]) -> dict[str, Any] | None:
    """Return what puts special tokens around a prompt; None if there are none."""
    metadata = header.metadata
    adds_bos = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    begin = end = None
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        begin = _special_id(header, "bos", len(tokens))
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        end = _special_id(header, "eos", len(tokens))
    if begin is None and end is None:
        return None
    used = {tokens[index]: index for index in (begin, end) if index is not None}

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        special = [
            None if index is None else {"SpecialToken": {"id": tokens[index], "type_id": type_id}}
            for index in (begin, end)
        ]
        parts = [special[0], {"Sequence": {"id": sequence, "type_id": type_id}}, special[1]]
        return [part for part in parts if part is not None]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": list(chain(around("A", 0), around("B", 1))),
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]} for token, index in used.items()},
    }
