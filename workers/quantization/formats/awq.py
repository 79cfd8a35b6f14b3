"""Read AWQ weights of the version "gemm", as AutoAWQ writes them.

A matrix is stored transposed, in int32 words of eight codes along the outputs:

    .qweight  [num_inputs, num_outputs / 8]   codes
    .qzeros   [num_groups, num_outputs / 8]   zero points
    .scales   [num_groups, num_outputs]

The eight codes of a word, from the lowest bits on, belong to the outputs 0 2 4 6 1 3 5 7 of the word's eight.
W[n, k] = (code[n, k] - zero_point[n, g]) * scale[n, g], where g = k // group_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from workers.quantization.formats.checks import FLOATS, choice, finite, refused, tensor
from workers.quantization.formats.groups import offsets_of
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import QuantizedTensor

GROUP_SIZES = (-1, 16, 32, 64, 128, 256)  # -1: one group for all inputs
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIDDLE = 8


class Awq(WeightFormat):
    """AWQ with 4 bits. The versions gemv, gemv_fast, marlin and llm-awq pack differently, and are refused."""

    markers: ClassVar[frozenset[str]] = frozenset({".qweight"})
    suffixes: ClassVar[frozenset[str]] = frozenset({".qweight", ".qzeros", ".scales"})
    name = "AWQ, 4 bits"

    def __init__(self, group_size: int) -> None:
        """`group_size` is as config.json has it: -1 is one group for all inputs."""
        self._group_size = group_size

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        # AutoAWQ's own quant_config.json has other names for two of the fields.
        choice(config, "bits" if "bits" in config else "w_bit", (4,), 4, "AWQ")
        group_size = choice(config, "group_size" if "group_size" in config else "q_group_size", GROUP_SIZES, 128, "AWQ")
        key = "format" if config.get("version") is None else "version"
        choice(config, key, ("gemm", "GEMM"), "gemm", "AWQ")
        choice(config, "zero_point", (True,), True, "AWQ")
        return cls(group_size)

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        words = tensor(tensors, ".qweight", name, (torch.int32,), (None, None))
        num_inputs, num_outputs = words.shape[0], words.shape[1] * 8
        group_size = num_inputs if self._group_size == -1 else self._group_size
        if num_inputs % group_size or num_inputs % 2:
            raise refused(name, f"has {num_inputs} inputs, which groups of {group_size} do not divide")
        num_groups = num_inputs // group_size
        tensor(tensors, ".scales", name, FLOATS, (num_groups, num_outputs))
        tensor(tensors, ".qzeros", name, (torch.int32,), (num_groups, num_outputs // 8))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        scales = finite(tensors[".scales"], ".scales", name)
        offsets = offsets_of(_zero_points(tensors[".qzeros"]), scales, _MIDDLE)
        return QuantizedTensor(_codes(tensors[".qweight"]), scales.T.contiguous(), offsets.T.contiguous())


def _codes(words: Tensor) -> Tensor:
    """Return the codes of `.qweight` as QuantizedTensor has them: uint8 [num_outputs, num_inputs / 2].

    Two rows of words become one row of bytes, and are transposed byte by byte: one code a byte would take twice the
    memory, and longer.
    """
    rows = words.contiguous().view(torch.uint8).reshape(*words.shape, 4)  # [num_inputs, num_outputs / 8, byte]
    even, odd = rows[0::2], rows[1::2]
    of_low_halves, of_high_halves = even & 0xF | odd << 4, even >> 4 | odd & 0xF0
    codes = torch.empty(rows.shape[1], 8, len(even), dtype=torch.uint8)
    for byte in range(4):
        codes[:, _ORDER[2 * byte]] = of_low_halves[..., byte].T
        codes[:, _ORDER[2 * byte + 1]] = of_high_halves[..., byte].T
    return codes.flatten(0, 1)


def _zero_points(words: Tensor) -> Tensor:
    """Return the zero points of `.qzeros`, uint8 [num_groups, num_outputs]."""
    of_bytes = words.contiguous().view(torch.uint8).reshape(*words.shape, 4)
    zero_points = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for position, output in enumerate(_ORDER):
        zero_points[..., output] = of_bytes[..., position // 2] >> 4 * (position % 2) & 0xF
    return zero_points.flatten(1)
