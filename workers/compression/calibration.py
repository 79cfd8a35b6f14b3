"""The token ids that a model reads while the inputs of its layers are measured."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor

from servekit.errors import ConfigError

MIN_TOKENS = 64  # fewer say nothing about a layer of any size
ENCODED_AT_ONCE = 64  # documents


class _Document(msgspec.Struct):
    """One line of a file in JSON lines. Other fields are ignored, as data sets have many."""

    text: str


def read_calibration(file: Path, model: Path, num_samples: int, max_length: int, seed: int) -> list[Tensor]:
    """Return samples of the texts in a file: `num_samples` at most, each int64 [1, `max_length`].

    Documents are the lines of the file, or the field "text" of each line if it is named `.jsonl`. They are shuffled and
    joined, each with the special tokens that the tokenizer adds to a text, and cut into samples. The last sample may be
    shorter. Raises ConfigError for a file that cannot be read or has too little text.
    """
    documents = _read_documents(file)
    random.Random(seed).shuffle(documents)
    tokenizer = _read_tokenizer(model)
    token_ids: list[int] = []
    for start in range(0, len(documents), ENCODED_AT_ONCE):
        if len(token_ids) >= num_samples * max_length:
            break
        for encoding in tokenizer.encode_batch(documents[start : start + ENCODED_AT_ONCE]):
            token_ids += encoding.ids
    if len(token_ids) < MIN_TOKENS:
        raise ConfigError(
            f"--calibration {file} has {len(token_ids)} tokens, and calibration needs {MIN_TOKENS} at least; "
            "thousands are better"
        )
    starts = range(0, min(len(token_ids), num_samples * max_length), max_length)
    return [torch.tensor([token_ids[start : start + max_length]]) for start in starts]


def _read_documents(file: Path) -> list[str]:
    try:
        lines = file.read_bytes().decode().splitlines()
    except OSError as error:
        raise ConfigError(f"--calibration {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--calibration {file} is not UTF-8: byte {error.start}: {error.reason}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if file.suffix != ".jsonl":
        return [line for _, line in numbered]
    documents = []
    for number, line in numbered:
        try:
            documents.append(msgspec.json.decode(line, type=_Document).text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(
                f'--calibration {file}, line {number}: {error}; each line must be an object with the field "text"'
            ) from None
    return documents


def _read_tokenizer(model: Path) -> Tokenizer:
    file = model / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"calibration needs the model's tokenizer: {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not a tokenizer.json: {error}") from None
    tokenizer.no_truncation()  # the file may have these settings from training
    tokenizer.no_padding()
    return tokenizer
