"""Estimate how much memory the weights of a checkpoint take when they are loaded, from the headers of its files."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
from msgspec import Struct

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STORED_NUMBER_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # of the types whose numbers are not quantized
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
GROUP_SIZE = 64  # weights that share a scale, by default
# --quantization does not round matrices whose names contain one of these, nor those of embeddings.
UNQUANTIZED_NAME_PARTS = ("expert", "router", "mlp.gate.")
HEAD = "lm_head"


class _Tensor(Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Config(Struct):
    """The part of config.json that says whether the output head is the embedding."""

    tie_word_embeddings: bool = False


def weight_bytes(path: Path, number_bytes: int | None, quantization: str | None, group_size: int | None) -> int:
    """Return about how many bytes the weights in a directory take when they are loaded; 0 if it has none.

    Numbers become `number_bytes` long; with None they stay as they are stored. `quantization` rounds matrices of
    linear layers, as docs/quantization.md says. Tensors of a checkpoint that is quantized stay as they are.
    """
    total = sum(file.stat().st_size for file in path.glob("*.gguf"))
    tensors: dict[str, _Tensor] = {}
    for file in path.glob("*.safetensors"):
        if file.name.startswith("consolidated"):  # the same weights once more
            continue
        header = _read_header(file)
        if header is None:
            total += file.stat().st_size
        else:
            tensors |= header
    has_head = not _is_tied(path) and any(HEAD in name for name in tensors)
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        stored = STORED_NUMBER_BYTES.get(tensor.dtype)
        if stored is None:
            total += end - begin
            continue
        num_bits: float = 8 * (number_bytes or stored)
        if quantization is not None and len(tensor.shape) == 2:
            num_bits = _rounded_bits(name, quantization, group_size or GROUP_SIZE, has_head) or num_bits
        total += math.ceil(math.prod(tensor.shape) * num_bits / 8)
    return total


def _rounded_bits(name: str, quantization: str, group_size: int, has_head: bool) -> float | None:
    """Return the bits of each number of a matrix, with its part of scales and offsets; None if it is not rounded."""
    if "embed" in name or "wte" in name:
        return None if has_head else 8.0  # without a head of its own, it is the head
    if any(part in name for part in UNQUANTIZED_NAME_PARTS):
        return None
    if HEAD in name or quantization in ("int8", "fp8"):
        return 8.0
    return 4.0 + (16.0 if quantization == "nf4" else 32.0) / group_size


def _is_tied(path: Path) -> bool:
    try:
        return msgspec.json.decode((path / "config.json").read_bytes(), type=_Config).tie_word_embeddings
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False


def _read_header(file: Path) -> dict[str, _Tensor] | None:
    """Return the tensors of a safetensors file; None if it is not one."""
    try:
        with file.open("rb") as opened:
            num_bytes = int.from_bytes(opened.read(8), "little")
            if num_bytes > MAX_HEADER_BYTES:
                return None
            header = msgspec.json.decode(opened.read(num_bytes), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        return {name: msgspec.json.decode(tensor, type=_Tensor) for name, tensor in header.items()}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
