"""Identify a model's files: workers on several machines must have the same weights, or answers would change."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from servekit.errors import ConfigError
from servekit.protocol.gguf_index import INDEX, WEIGHTS
from workers.loading.checkpoint import find_weights
from workers.loading.gguf_index import has_gguf, read_index

# These are read completely, because each affects answers: the layers, the defaults of sampling, the grammars' masks.
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json")
SAMPLE_BYTES = 1024  # from the middle of each tensor
MAX_HEADER_BYTES = 10**8  # the limit of safetensors itself


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def fingerprint(path: Path, has_weights: bool) -> str:
    """Return the fingerprint of the files in a directory, as hex digits. Raises ConfigError if they cannot be read.

    Reading all weights would take as long as loading them. So it covers the size and the header of each file, and a
    kilobyte of each tensor. Two trainings of one model have the same shapes, but differ in every tensor that was
    trained. The path and the name of the machine are not covered.
    """
    digest = sha256()
    for name in SMALL_FILES:
        file = path / name
        _add(digest, name.encode(), file.read_bytes() if file.is_file() else b"")
    if has_weights and has_gguf(path):
        _add(digest, (path / INDEX).read_bytes(), _gguf_digest(path))
    elif has_weights:
        for file in find_weights(path):
            try:
                _add(digest, file.name.encode(), _weights_digest(file))
            except (OSError, ValueError, msgspec.DecodeError) as error:
                raise ConfigError(f"{file} is not a safetensors file that can be read: {error}") from None
    return digest.hexdigest()


def _gguf_digest(path: Path) -> bytes:
    """Cover the size of a GGUF file and a kilobyte of each of its tensors. Raises ConfigError."""
    digest = sha256()
    tensors = read_index(path)
    with (path / WEIGHTS).open("rb") as opened:
        digest.update(os.fstat(opened.fileno()).st_size.to_bytes(8, "little"))
        for name in sorted(tensors):
            digest.update(_sample(opened.fileno(), tensors[name].offset, tensors[name].num_bytes))
    return digest.digest()


def _sample(descriptor: int, start: int, num_bytes: int) -> bytes:
    """Return SAMPLE_BYTES from the middle of a tensor; all of a smaller one."""
    num_sampled = max(0, min(SAMPLE_BYTES, num_bytes))
    return os.pread(descriptor, num_sampled, start + max(0, num_bytes - num_sampled) // 2)


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
            digest.update(_sample(opened.fileno(), 8 + length + begin, end - begin))
    return digest.digest()


def _add(digest: Any, *parts: bytes) -> None:
    """Add parts with their lengths, so that no two lists of parts have the same digest."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
