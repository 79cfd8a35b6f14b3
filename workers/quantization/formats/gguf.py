"""The format of GGUF files: each matrix in blocks of a type of its own.

Files of this format are not safetensors: workers/loading/gguf_file.py finds the tensors and gives them these suffixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from servekit.protocol.gguf_index import BLOCK_SIZES
from workers.quantization.formats.checks import finite, refused
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.ggml_blocks import BLOCK_TYPES, dequantize, unpack
from workers.quantization.quantized_tensor import QuantizedTensor

BLOCKS = ".blocks"  # uint8 [num_outputs, bytes of a row]
BLOCK_TYPE = ".block_type"  # uint8, the characters of a name in BLOCK_SIZES
ROWS = ".rows"  # int64 [num_outputs], optional: which row of the file each row of the parameter is


class Gguf(WeightFormat):
    """GGUF: the types of ggml's blocks."""

    name = "GGUF"
    markers: ClassVar[frozenset[str]] = frozenset({BLOCKS})
    suffixes: ClassVar[frozenset[str]] = frozenset({BLOCKS, BLOCK_TYPE, ROWS})
    may_be_absent: ClassVar[bool] = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls()

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        numbers, num_bytes = BLOCK_SIZES[_type_of(tensors, name)]
        blocks, rows = tensors[BLOCKS], tensors.get(ROWS)
        if blocks.dtype is not torch.uint8 or blocks.ndim != 2 or blocks.shape[1] % num_bytes:
            raise refused(name, f"has blocks {list(blocks.shape)}, and a block has {num_bytes} bytes")
        if rows is not None and rows.shape != (len(blocks),):
            raise refused(name, f"has {len(blocks)} rows of blocks, and the order of {len(rows)}")
        return len(blocks), blocks.shape[1] // num_bytes * numbers

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        matrix = unpack(_type_of(tensors, name), tensors[BLOCKS])
        finite(matrix.scales.float(), " (scales)", name)
        if matrix.offsets is not None:
            finite(matrix.offsets.float(), " (minimums)", name)
        rows = tensors.get(ROWS)
        return matrix if rows is None else matrix.take_outputs(rows)

    def dequantize(self, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        matrix = finite(dequantize(_type_of(tensors, name), tensors[BLOCKS], dtype), "", name)
        rows = tensors.get(ROWS)
        return matrix if rows is None else matrix[rows]


def _type_of(tensors: Mapping[str, Tensor], name: str) -> str:
    type_name = bytes(tensors[BLOCK_TYPE].tolist()).decode("ascii", "replace") if BLOCK_TYPE in tensors else ""
    if type_name not in BLOCK_TYPES:
        raise refused(name, f"has blocks of type {type_name[:20]!r}")
    return type_name
