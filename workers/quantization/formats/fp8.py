"""Read FP8 weights: float8_e4m3fn values with floating-point scales.

    .weight             [num_outputs, num_inputs]
    .weight_scale_inv   a scale for each block of 128 x 128, as DeepSeek writes them, or one for the matrix
    .weight_scale       a scale for each row, as FBGEMM writes them, or one for the matrix, as AutoFP8 does

W = number * scale. In spite of its name, `weight_scale_inv` multiplies: it is the inverse of what the weights were
multiplied by before they were rounded.

A checkpoint with static activation scales has one scale for the inputs of each layer, `.input_scale` or
`.activation_scale`, and FBGEMM an upper bound. They are not used: activations get a scale for each token, from the
token's own numbers. That costs one pass over numbers which are in the cache, is at least as exact, and cannot clip an
input that is larger than those of the calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.formats.checks import FLOATS, choice, finite, quoted, refused, tensor
from workers.quantization.formats.groups import group_size_of_blocks, repeat_blocks
from workers.quantization.formats.interface import WeightFormat
from workers.quantization.quantized_tensor import QuantizedTensor

# float8_e8m0fnu are powers of two (`scale_fmt: ue8m0`).
_SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)
_BLOCK_ROWS = (1, 16, 32, 64, 128, 256)
_BLOCK_COLUMNS = (16, 32, 64, 128, 256)
# Of numbers with the same scale: with fewer, the scales would take more memory than they save.
_MIN_GROUP_SIZE = 16


class Fp8(WeightFormat):
    """FP8 of the methods `fp8` and `fbgemm_fp8`: scales by block, by row or for the matrix."""

    markers: ClassVar[frozenset[str]] = frozenset({".weight_scale_inv", ".weight_scale"})
    suffixes: ClassVar[frozenset[str]] = frozenset(
        {".weight", ".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale", ".input_scale_ub"}
    )

    def __init__(self, block_shape: tuple[int, int] | None) -> None:
        """`block_shape` is [rows, columns]; None: scales by row, or one for the matrix."""
        self.name = "FP8" if block_shape is None else f"FP8, blocks of {block_shape[0]} x {block_shape[1]}"
        self._block_shape = block_shape

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        choice(config, "activation_scheme", ("dynamic", "static"), "dynamic", "FP8")
        choice(config, "fmt", ("e4m3",), "e4m3", "FP8")
        choice(config, "expert_dtype", ("fp8",), "fp8", "FP8")
        return cls(_block_shape(config.get("weight_block_size")))

    def check(self, tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
        weight = tensor(tensors, ".weight", name, (torch.float8_e4m3fn,), (None, None))
        num_outputs, num_inputs = weight.shape
        if self.markers <= tensors.keys():
            raise refused(name, "has both .weight_scale and .weight_scale_inv")
        suffix = _suffix_of_scales(tensors)
        tensor(tensors, suffix, name, _SCALE_DTYPES, self._shape_of_scales(tensors.get(suffix), weight, name))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, Tensor], name: str) -> QuantizedTensor:
        weight, suffix = tensors[".weight"], _suffix_of_scales(tensors)
        scales = finite(tensors[suffix].float(), suffix, name)
        if self._block_shape is None:
            scales = scales.reshape(-1, 1).expand(len(weight), 1).contiguous()
        else:
            scales = repeat_blocks(scales, self._block_shape, *weight.shape)
        return QuantizedTensor(weight, scales, activations="float8")

    def _shape_of_scales(self, scales: Tensor | None, weight: Tensor, name: str) -> tuple[int, ...]:
        """Return the shape that the scales must have."""
        num_outputs, num_inputs = weight.shape
        if self._block_shape is not None:
            rows, columns = self._block_shape
            group_size = group_size_of_blocks(columns, num_inputs)
            if group_size < min(_MIN_GROUP_SIZE, num_inputs):
                raise refused(
                    name,
                    f"has {num_inputs} inputs and blocks of {columns}, so only {group_size} have the same scale, and "
                    f"the limit is {_MIN_GROUP_SIZE}",
                )
            return -(-num_outputs // rows), -(-num_inputs // columns)
        if scales is not None and scales.numel() == 1:
            return (1,) * min(scales.ndim, 2)
        return (num_outputs,) if scales is not None and scales.ndim == 1 else (num_outputs, 1)


def _suffix_of_scales(tensors: Mapping[str, Tensor]) -> str:
    return ".weight_scale_inv" if ".weight_scale_inv" in tensors else ".weight_scale"


def _block_shape(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if isinstance(size, list | tuple) and len(size) == 2 and all(type(number) is int for number in size):
        rows, columns = size
        if rows in _BLOCK_ROWS and columns in _BLOCK_COLUMNS:
            return rows, columns
    raise ConfigError(
        f"the weights are quantized in the format FP8 with weight_block_size = {quoted(size)}, and servekit reads "
        f"blocks of {', '.join(map(str, _BLOCK_ROWS))} rows and {', '.join(map(str, _BLOCK_COLUMNS))} columns; serve "
        "another checkpoint of the same model"
    )
