"""Make tokenizer.json of a sentencepiece model, by what the model itself says of its normalizer and its pieces.

transformers' converter takes these from the class of the tokenizer, and for some families (Mistral, Gemma without a
named class) that gives other tokens than sentencepiece. The tests compare with sentencepiece.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import import_protobuf

from servekit.errors import ConfigError

SPACE = "▁"
# Kinds of pieces, and of models (sentencepiece_model.proto).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
MAX_PIECES = 2**21
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
MAX_MERGEABLE_CHARACTERS = 1024  # of a piece; the longest in common vocabularies have 48
# Their ids are not those of the pieces: fairseq's special tokens come first.
SHIFTED = ("camembert", "m2m_100", "mbart", "nllb", "xglm", "xlm-roberta", "xlm-roberta-xl")


def is_sentencepiece(file: Path) -> bool:
    """Whether the file is a sentencepiece model, and not one of tiktoken, which begins with base64 text."""
    with file.open("rb") as opened:
        return opened.read(1) == b"\n"  # the field `pieces`, which all of them begin with


def tokenizer_json(file: Path, config: Mapping[str, Any], model_type: str) -> bytes:
    """Return the content of tokenizer.json. `config` is that of tokenizer_config.json, with older files' tokens.

    Raises ConfigError, in a sentence, for models that cannot be expressed, and for damaged files.
    """
    if model_type in SHIFTED:
        raise ConfigError(f"{file}: the token ids of the family {model_type} are not those of its sentencepiece model")
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's own
        raise ConfigError(f"{file} is not a sentencepiece model: {error}") from None
    kind = proto.trainer_spec.model_type
    if not 0 < len(proto.pieces) <= MAX_PIECES or kind not in (UNIGRAM, BPE):
        raise ConfigError(f"{file} is not a sentencepiece model of the kinds BPE and Unigram, so it is not converted")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise ConfigError(f"{file} puts spaces after words (treat_whitespace_as_suffix), which is not converted")
    pieces = [piece.piece for piece in proto.pieces]
    added = _added_tokens(proto, config)
    for token in added:  # a token that replaces an unused piece
        if token["id"] < len(pieces):
            pieces[token["id"]] = token["content"]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **_steps(proto, config),
        "post_processor": _post_processor(proto, config, added),
        "model": _unigram(proto, pieces) if kind == UNIGRAM else _bpe(file, proto, pieces),
    }
    encoded = msgspec.json.encode(content)
    _check_ids(file, encoded, added)
    return encoded


def _steps(proto: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps before and after the model: how spaces become pieces, and pieces text."""
    spec = proto.normalizer_spec
    has_prefix = config.get("add_prefix_space")
    has_prefix = spec.add_dummy_prefix if has_prefix is None else bool(has_prefix)
    normalizers: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    pre_tokenizer = None
    # Newer tokenizers (`legacy: false`) have no prefix after a special token in the text.
    if has_prefix and config.get("legacy") is False:
        pre_tokenizer = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    else:
        if has_prefix:
            normalizers.append({"type": "Prepend", "prepend": SPACE})
        normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _unigram(proto: Any, pieces: list[str]) -> dict[str, Any]:
    # An unused piece is never taken: any other way to write the text is better.
    scores = [-1e9 if piece.type == UNUSED else piece.score for piece in proto.pieces]
    return {
        "type": "Unigram",
        "unk_id": proto.trainer_spec.unk_id,
        "vocab": list(zip(pieces, scores, strict=True)),
        "byte_fallback": proto.trainer_spec.byte_fallback,
    }


def _bpe(file: Path, proto: Any, pieces: list[str]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": pieces[proto.trainer_spec.unk_id],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece: token_id for token_id, piece in enumerate(pieces)},
        "merges": list(_merges(file, proto)),
    }


def _merges(file: Path, proto: Any) -> Iterator[tuple[str, str]]:
    """Yield the pairs that are a piece together, those with the best scores first; the model has no list of them."""
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces) if piece.type in (NORMAL, USER_DEFINED)}
    if any(len(piece) > MAX_MERGEABLE_CHARACTERS for piece in ids):
        raise ConfigError(f"{file} has pieces of more than {MAX_MERGEABLE_CHARACTERS} characters; it is damaged")
    for whole in sorted(ids, key=lambda piece: -proto.pieces[ids[piece]].score):
        pairs = ((whole[:cut], whole[cut:]) for cut in range(1, len(whole)))
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        yield from sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))


def _added_tokens(proto: Any, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text as a whole, by their ids: the model's, and those of its tokenizer."""
    found = {
        index: _added(index, piece.piece, is_special=piece.type != USER_DEFINED)
        for index, piece in enumerate(proto.pieces)
        if piece.type in (UNKNOWN, CONTROL, USER_DEFINED)
    }
    for content, index in (config.get("added_tokens") or {}).items():
        found[int(index)] = _added(int(index), content, is_special=True)
    for index, token in (config.get("added_tokens_decoder") or {}).items():
        found[int(index)] = _added(int(index), token["content"], is_special=bool(token.get("special")), options=token)
    return [found[index] for index in sorted(found)]


def _added(index: int, content: str, *, is_special: bool, options: Mapping[str, Any] = NO_OPTIONS) -> dict[str, Any]:
    flags = {name: bool(options.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return {"id": index, "content": content, **flags, "special": is_special}


def _post_processor(proto: Any, config: Mapping[str, Any], added: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the step that puts the first and the last token around a prompt."""
    ids = {token["content"]: token["id"] for token in added}
    spec = proto.trainer_spec
    adds_start = config.get("add_bos_token")
    start = _special(proto, config, "bos_token", spec.bos_id) if adds_start in (None, True) else None
    end = _special(proto, config, "eos_token", spec.eos_id) if config.get("add_eos_token") else None
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if start in ids:
        template.insert(0, {"SpecialToken": {"id": start, "type_id": 0}})
    if end in ids:
        template.append({"SpecialToken": {"id": end, "type_id": 0}})
    if len(template) == 1:
        return None
    used = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (start, end) if token in ids}
    return {
        "type": "TemplateProcessing",
        "single": template,
        "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": used,
    }


def _special(proto: Any, config: Mapping[str, Any], name: str, index: int) -> str | None:
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    if isinstance(token, str):
        return token
    return proto.pieces[index].piece if 0 <= index < len(proto.pieces) else None


def _check_ids(file: Path, content: bytes, added: list[dict[str, Any]]) -> None:
    """Raise ConfigError unless each added token has its id: the library counts on from the last one."""
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the Rust library raises plain exceptions
        raise ConfigError(f"{file} cannot be converted: {error}") from None
    for token in added:
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            raise ConfigError(
                f"{file}: the token {token['content'][:60]!r} has the id {token['id']} in the model's files, and would "
                f"get {found}; the files do not belong together"
            )
