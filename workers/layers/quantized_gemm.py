"""Linear layers with quantized weights on a CPU, by quantized_gemm.c.

A weight is arranged once, at load, in the order in which the C code reads it. Memory holds its codes and scales, and no
second copy: steps of few tokens and prompts are multiplied from the same bytes.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.csrc.bindings import STRIP, CPreparedWeight, CQuantizedWeight
from workers.csrc.build import LANES
from workers.layers.cpu_weight import CpuWeight
from workers.layers.linear import Weight
from workers.layers.quantized_linear import DequantizingWeight
from workers.quantization.quantized_tensor import QuantizedTensor

# In the order of the enumerations in kernels.h.
KERNELS = ("INT4_BY_INT8", "INT8_BY_INT8", "INT4_BY_FLOAT", "INT8_BY_FLOAT", "FLOAT8_BY_FLOAT")
NUMBER_TYPES = ("NO_NUMBERS", "AS_FLOAT32", "AS_FLOAT16", "AS_BFLOAT16", "AS_EXPONENTS", "AS_MULTIPLES")

MAX_ROWS_IN_ONE_CALL = 32  # of all layers; less than half of the self-check's tokens, which so checks both ways
STEP = 4  # inputs that are unpacked together
INT8_ZERO_POINT = 128  # codes that are multiplied by int8 are unsigned
CACHE_LINE_BYTES = 64


class QuantizedGemm:
    """The multiplication by quantized weights of one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def make_weight(self, matrix: QuantizedTensor, bias: Tensor | None) -> Weight:
        """Arrange a weight for the C code; return one that dequantizes if its groups are not whole vectors."""
        if matrix.group_size % LANES:
            return DequantizingWeight(matrix, bias)
        return QuantizedGemmWeight(self.library, matrix, bias)


class QuantizedGemmWeight(CpuWeight):
    """A quantized weight, multiplied by C for steps of any size."""

    def __init__(self, library: ctypes.CDLL, matrix: QuantizedTensor, bias: Tensor | None) -> None:
        zero_point = _zero_point(matrix) if matrix.activations == "int8" else None
        by_int8 = zero_point is not None
        scales, offsets = _scales(matrix.scales), _offsets(matrix)
        data = _arrange(matrix, by_int8, [scales.numbers, offsets.numbers])
        levels = torch.tensor(matrix.levels)
        input_order = None if matrix.input_order is None else matrix.input_order.to(torch.int32).contiguous()
        struct = CQuantizedWeight(
            base=CPreparedWeight(
                data=data.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                num_inputs=matrix.num_inputs,
                num_outputs=matrix.num_outputs,
                strip_bytes=data[0].numel(),
            ),
            kernel=KERNELS.index(f"{matrix.encoding}_by_{'int8' if by_int8 else 'float'}".upper()),
            group_size=matrix.group_size,
            scale_type=NUMBER_TYPES.index(scales.type),
            offset_type=NUMBER_TYPES.index(offsets.type),
            zero_point=zero_point or 0,
            levels=levels.data_ptr(),
            input_order=None if input_order is None else input_order.data_ptr(),
        )
        workspace_bytes: int = library.quantized_gemm_workspace_bytes(ctypes.byref(struct))
        keeps_alive = [data, bias, levels, input_order]
        super().__init__(library, library.quantized_gemm, struct, MAX_ROWS_IN_ONE_CALL, workspace_bytes, keeps_alive)
        self.num_bytes = data.nbytes

    def multiply(self, x: Tensor) -> Tensor:
        return self.multiply_by_c(x, None)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.multiply_by_c(x, residual)


def _zero_point(matrix: QuantizedTensor) -> int | None:
    """Return z so that each code, as the C code reads it, stands for code - z; None if there is no such number."""
    if matrix.encoding == "int8":
        return INT8_ZERO_POINT
    lowest = matrix.levels[0]
    is_consecutive = matrix.levels == tuple(lowest + code for code in range(16))
    return int(-lowest) if matrix.encoding == "int4" and is_consecutive and lowest in range(-128, 113) else None


@dataclass(frozen=True, slots=True)
class _StoredScales:
    """Scales or offsets as they are stored: [num_outputs, num_groups] in the format `type`; None for NO_NUMBERS."""

    type: str
    numbers: Tensor | None


def _scales(scales: Tensor) -> _StoredScales:
    """Return the scales in the smallest type that holds all of them exactly."""
    numbers = scales.float()
    bits = numbers.view(torch.int32)
    if bool(((bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000)).all()):
        return _StoredScales("AS_EXPONENTS", (bits >> 23).to(torch.uint8))
    for dtype, name in ((torch.float16, "AS_FLOAT16"), (torch.bfloat16, "AS_BFLOAT16")):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return _StoredScales(name, numbers.to(dtype))
    return _StoredScales("AS_FLOAT32", numbers)


def _offsets(matrix: QuantizedTensor) -> _StoredScales:
    """Return the offsets: where there are zero points, as multiples of the scales."""
    if matrix.offsets is None:
        return _StoredScales("NO_NUMBERS", None)
    scales, offsets = matrix.scales.float(), matrix.offsets.float()
    multiples = (offsets / scales).round().clamp(-128, 127).nan_to_num()
    if torch.equal(multiples * scales, offsets):
        return _StoredScales("AS_MULTIPLES", multiples.to(torch.int8))
    return _scales(offsets)


def _arrange(matrix: QuantizedTensor, by_int8: bool, more: list[Tensor | None]) -> Tensor:
    """Return the strips of a weight, uint8 [num_strips, bytes of a strip]; see quantized_gemm.c."""
    codes = matrix.codes.view(torch.uint8)
    if matrix.encoding == "int4":
        low, high = codes & 0xF, codes >> 4
        if by_int8:
            codes = torch.stack([low, high], dim=-1)
        else:  # each four inputs in the order 0, 2, 1, 3
            codes = torch.cat([low.reshape(len(low), -1, 2), high.reshape(len(high), -1, 2)], dim=-1)
    elif by_int8:
        codes = codes ^ INT8_ZERO_POINT
    else:
        codes = codes.reshape(len(codes), -1, STEP)[..., [0, 2, 1, 3]]
    strips = _strips(codes.reshape(matrix.num_outputs, -1).view(torch.int32))  # the codes of one step are one number
    if matrix.encoding == "int4":
        strips = strips[:, :LANES] | strips[:, LANES:] << 4
    by_input = [strips, *(_strips(numbers) for numbers in more if numbers is not None)]
    parts = [part.transpose(1, 2).contiguous().view(torch.uint8).flatten(1) for part in by_input]
    num_bytes = sum(part.shape[1] for part in parts)
    parts.append(torch.zeros(len(strips), -num_bytes % CACHE_LINE_BYTES, dtype=torch.uint8))
    return torch.cat(parts, dim=1)


def _strips(matrix: Tensor) -> Tensor:
    """Return [num_strips, STRIP, n] of a matrix [num_outputs, n], with zeros for outputs that do not exist."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % STRIP)).view(-1, STRIP, matrix.shape[1])
