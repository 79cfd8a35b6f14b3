"""Read the index of a GGUF file's tensors, which the server left in the model's directory (servekit/gguf/).

Both files may be malicious, like any file of a model's directory, so the index is checked against the file's size.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from servekit.errors import ConfigError
from servekit.protocol.gguf_index import BLOCK_SIZES, INDEX, WEIGHTS, GgufIndex, GgufTensor

MAX_INDEX_BYTES = 2**26


def has_gguf(path: Path) -> bool:
    """Return whether a model's directory was made of a GGUF file."""
    return (path / INDEX).is_file()


def read_index(path: Path) -> dict[str, GgufTensor]:
    """Return the tensors by name. Raises ConfigError unless each is within the file, and can be what the index says."""
    file = path / INDEX
    try:
        if file.stat().st_size > MAX_INDEX_BYTES:
            raise ConfigError(f"{file} has more than {MAX_INDEX_BYTES:,} bytes; it is no index of tensors")
        tensors = msgspec.json.decode(file.read_bytes(), type=GgufIndex).tensors
        size = os.stat(path / WEIGHTS).st_size
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}; give the GGUF file again") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not an index of a GGUF file: {error}") from None
    if not tensors:
        raise ConfigError(f"{path / WEIGHTS} holds no tensors")
    for name, tensor in tensors.items():
        if not _is_sound(tensor, size):
            shape = " by ".join(map(str, tensor.shape[:4]))
            raise ConfigError(
                f"{name[:100]} cannot be {shape} of {tensor.type[:20]} at byte {tensor.offset} of a file of {size:,} "
                f"bytes; {WEIGHTS} and {INDEX} do not belong together"
            )
    return tensors


def _is_sound(tensor: GgufTensor, size: int) -> bool:
    if tensor.type not in BLOCK_SIZES or not 1 <= len(tensor.shape) <= 2:
        return False
    if not all(0 < dimension < 2**31 for dimension in tensor.shape) or (tensor.is_packed and len(tensor.shape) == 1):
        return False
    heads = tensor.num_interleaved_heads
    return (
        tensor.shape[-1] % BLOCK_SIZES[tensor.type][0] == 0
        and 0 <= tensor.offset <= size - tensor.num_bytes
        and heads >= 0
        and (not heads or tensor.shape[0] % (2 * heads) == 0)
    )
