"""Read MXFP4 weights, as gpt-oss has them for its experts.

MXFP4 is a format of the OCP Microscaling specification: 32 neighbours in a row share a power of two, and each number is
one of sixteen levels (e2m1):

    _blocks   uint8 [..., num_outputs, num_inputs / 32, 16]   two codes in a byte, the first in the low half
    _scales   uint8 [..., num_outputs, num_inputs / 32]       the exponent plus 127 (e8m0)

What follows the parameter's name in the files is the suffix. The dimension in front is that of experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from workers.quantization.formats.checks import finite, refused, tensor
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import QuantizedTensor

E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
GROUP_SIZE = 32


class Mxfp4(WeightFormat):
    """MXFP4: linear layers, and the experts of a mixture stacked in one parameter."""

    name = "MXFP4"
    markers: ClassVar[frozenset[str]] = frozenset({"_blocks"})
    suffixes: ClassVar[frozenset[str]] = frozenset({"_blocks", "_scales"})
    parameter_suffix: ClassVar[str] = ""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls()

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        """Return [num_outputs, num_inputs]; for experts, [num_experts, num_inputs, num_outputs], as in transformers."""
        bytes_of_group = GROUP_SIZE // 2
        blocks = tensors.get("_blocks")
        if blocks is None or blocks.ndim != 4:
            blocks = tensor(tensors, "_blocks", name, (torch.uint8,), (None, None, bytes_of_group))
        else:
            tensor(tensors, "_blocks", name, (torch.uint8,), (None, None, None, bytes_of_group))
        tensor(tensors, "_scales", name, (torch.uint8,), tuple(blocks.shape[:-1]))
        *experts, num_outputs, num_groups, _ = blocks.shape
        num_inputs = num_groups * GROUP_SIZE
        return (*experts, num_inputs, num_outputs) if experts else (num_outputs, num_inputs)

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        if tensors["_blocks"].ndim != 3:
            raise refused(name, "is a stack of experts, where one matrix is expected")
        return read_mxfp4(tensors["_blocks"], tensors["_scales"], name)

    def dequantize(self, tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
        blocks, scales = tensors["_blocks"], tensors["_scales"]
        if blocks.ndim == 3:
            return super().dequantize(tensors, name, dtype)
        result = torch.empty(self.check(tensors, name), dtype=dtype)
        for expert in range(len(blocks)):  # one after the other: in float32, all of them would not fit
            result[expert] = read_mxfp4(blocks[expert], scales[expert], name).dequantize(dtype).T
        return result


def read_mxfp4(blocks: Tensor, scales: Tensor, name: str) -> QuantizedTensor:
    """Return a matrix of uint8 blocks [num_outputs, num_groups, 16] and uint8 scales [num_outputs, num_groups].

    Raises ConfigError for scales with which the largest number is not finite in float32.
    """
    powers = scales.contiguous().view(torch.float8_e8m0fnu).float()
    finite(powers * max(E2M1_LEVELS), "_scales", name)
    # bfloat16 has the same exponents as e8m0, so nothing is rounded.
    return QuantizedTensor(blocks.flatten(1), powers.bfloat16(), levels=E2M1_LEVELS)
