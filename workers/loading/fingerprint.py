"""Identify a model's files: workers on several machines must have the same weights, or answers would change."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from servekit.errors import ConfigError
from workers.loading.checkpoint import find_weights

# These are read completely. Each decides about answers: the layers, the defaults of sampling, the grammars' masks.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json")
SAMPLE_BYTES = 1024  # from the middle of each tensor
MAX_HEADER_BYTES = 10**8  # as safetensors itself allows


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def fingerprint(path: Path, has_weights: bool) -> str:
    """Return the fingerprint of the files in a directory, as hex digits. Raises ConfigError if they cannot be read.

    To read all weights would take as long as to load them. So it covers the size and the header of each file, and a
    kilobyte of each tensor. Two trainings of one model have the same shapes, but differ in every tensor that was
    trained. The path and the name of the machine are not covered.
    """
    digest = sha256()
    for name in SMALL_FILES:
        file = path / name
        _add(digest, name.encode(), file.read_bytes() if file.is_file() else b"")
    if has_weights:
        for file in find_weights(path):
            try:
                _add(digest, file.name.encode(), _weights_digest(file))
            except (OSError, ValueError, msgspec.DecodeError) as error:
                raise ConfigError(f"{file} is not a safetensors file that can be read: {error}") from None
    return digest.hexdigest()


def _weights_digest(file: Path) -> bytes:
    digest = sha256()
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size, MAX_HEADER_BYTES):
            raise ValueError(f"its header has {length} bytes")
        header = opened.read(length)
        _add(digest, size.to_bytes(8, "little"), header)
        tensors = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        for name in sorted(tensors.keys() - {"__metadata__"}):
            begin, end = msgspec.json.decode(tensors[name], type=_Tensor).data_offsets
            num_bytes = max(0, min(SAMPLE_BYTES, end - begin))
            start = 8 + length + begin + max(0, end - begin - num_bytes) // 2
            digest.update(os.pread(opened.fileno(), num_bytes, start))
    return digest.digest()


def _add(digest: Any, *parts: bytes) -> None:
    """Add parts with their lengths, so that no two lists of parts have the same digest."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
