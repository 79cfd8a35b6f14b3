"""Linear layers with quantized weights on a CPU, by quantized_gemm.c.

A weight is arranged once, at load, in the order in which the C code reads it. Memory holds its codes and scales, and no
second copy: steps of few tokens and prompts are multiplied from the same bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.csrc.bindings import STRIP, CPreparedWeight, CQuantizedWeight
from workers.csrc.build import LANES
from workers.device.heap import trim_heap
from workers.layers.cpu_weight import CpuWeight
from workers.layers.linear import Weight
from workers.layers.quantized_linear import DequantizingWeight
from workers.quantization.quantized_tensor import QuantizedTensor, Scales, unpack_nibbles
from workers.quantization.two_level_scales import TwoLevelScales

# In the order of the enumerations in kernels.h.
KERNELS = (
    *("INT4_BY_INT8", "INT8_BY_INT8", "INT4_BY_FLOAT", "INT8_BY_FLOAT", "FLOAT8_BY_FLOAT"),
    *("INT5_BY_FLOAT", "INT6_BY_FLOAT"),
)
NUMBER_TYPES = (
    *("NO_NUMBERS", "AS_FLOAT32", "AS_FLOAT16", "AS_BFLOAT16", "AS_EXPONENTS", "AS_MULTIPLES"),
    *("AS_PRODUCTS", "AS_ONE_FLOAT32"),
)

MAX_ROWS_IN_ONE_CALL = 32  # of all layers; less than half of the self-check's tokens, which so checks both ways
STEP = 4  # inputs that are unpacked together
INT8_ZERO_POINT = 128  # codes that are multiplied by int8 are unsigned
CACHE_LINE_BYTES = 64
PIECE_CODES = 2**19  # that are arranged together


class QuantizedGemm:
    """The multiplication by quantized weights of one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def make_weight(self, matrix: QuantizedTensor, bias: Tensor | None) -> Weight:
        """Arrange a weight for the C code; return one that dequantizes if its groups are not whole vectors."""
        if matrix.group_size % LANES:
            return DequantizingWeight(matrix, bias)
        weight = QuantizedGemmWeight(self.library, matrix, bias)
        trim_heap()  # of what arranging it needed: the C library keeps that, and the next weight is of another size
        return weight


class QuantizedGemmWeight(CpuWeight):
    """A quantized weight, multiplied by C for steps of any size."""

    def __init__(self, library: ctypes.CDLL, matrix: QuantizedTensor, bias: Tensor | None) -> None:
        codes = _code_layout(matrix)
        scales, offsets = _store_scales(matrix.scales), _store_offsets(matrix)
        data = _arrange(matrix, codes, [*scales.strips, *offsets.strips])
        super_block_groups = 1
        if isinstance(matrix.scales, TwoLevelScales):
            super_block_groups = matrix.scales.super_block_groups
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
            kernel=KERNELS.index(codes.kernel),
            group_size=matrix.group_size,
            scale_type=NUMBER_TYPES.index(scales.type),
            offset_type=NUMBER_TYPES.index(offsets.type),
            super_block_groups=super_block_groups,
            zero_point=codes.zero_point,
            levels=levels.data_ptr(),
            input_order=None if input_order is None else input_order.data_ptr(),
        )
        workspace_bytes: int = library.quantized_gemm_workspace_bytes(ctypes.byref(struct))
        keeps_alive = [data, bias, levels, input_order]
        super().__init__(library, library.quantized_gemm, struct, MAX_ROWS_IN_ONE_CALL, workspace_bytes, keeps_alive)
        self.num_bytes = data.nbytes


@dataclass(frozen=True, slots=True)
class _CodeLayout:
    """How a kernel reads codes: in so many bits, after `convert` has changed rows of them, uint8 [n, bytes].

    The result of `convert` is uint8 [n, num_inputs]: each four inputs in the kernel's order.
    """

    kernel: str
    bits: int
    convert: Callable[[Tensor], Tensor]
    zero_point: int = 0


@dataclass(frozen=True, slots=True)
class _StoredNumbers:
    """Scales or offsets as they are stored, in the format `type`: each of `strips` is uint8 [num_strips, bytes]."""

    type: str
    strips: list[Tensor]


def _code_layout(matrix: QuantizedTensor) -> _CodeLayout:
    """Choose the kernel, and how codes are arranged for it; see quantized_gemm.c."""
    zero_point = _zero_point(matrix) if matrix.activations == "int8" else None
    if matrix.encoding == "int4":
        if zero_point is not None:
            return _CodeLayout("INT4_BY_INT8", 4, unpack_nibbles, zero_point)
        return _CodeLayout("INT4_BY_FLOAT", 4, lambda codes: _in_pairs(unpack_nibbles(codes)))
    if zero_point is not None:
        return _CodeLayout("INT8_BY_INT8", 8, lambda codes: codes ^ INT8_ZERO_POINT, zero_point)
    if matrix.encoding == "int8":
        lowest, highest = int(matrix.codes.min()), int(matrix.codes.max())
        if highest - lowest < 64:
            bits = 5 if highest - lowest < 32 else 6
            from_zero = lowest % 256  # of 256, as bytes are
            return _CodeLayout(f"INT{bits}_BY_FLOAT", bits, lambda codes: _in_pairs(codes - from_zero), -lowest)
    return _CodeLayout(f"{matrix.encoding}_BY_FLOAT".upper(), 8, _in_pairs)


def _arrange(matrix: QuantizedTensor, layout: _CodeLayout, numbers: list[Tensor]) -> Tensor:
    """Return the strips, uint8 [num_strips, bytes]: codes, then scales and offsets, then zeros up to whole cache lines.

    Some strips follow the others, so memory holds no further copy of the codes but that of a piece.
    """
    num_strips = -(-matrix.num_outputs // STRIP)
    code_bytes = STRIP * matrix.num_inputs * layout.bits // 8
    num_bytes = code_bytes + sum(part.shape[1] for part in numbers)
    data = torch.empty(num_strips, num_bytes + -num_bytes % CACHE_LINE_BYTES, dtype=torch.uint8)
    codes, at_once = matrix.codes.view(torch.uint8), max(1, PIECE_CODES // (STRIP * matrix.num_inputs))
    for first in range(0, num_strips, at_once):
        rows = codes[first * STRIP : (first + at_once) * STRIP]
        data[first : first + at_once, :code_bytes] = _code_strips(layout.convert(rows), layout.bits)
    end = code_bytes
    for part in numbers:
        data[:, end : end + part.shape[1]] = part
        end += part.shape[1]
    data[:, end:] = 0
    return data


def _zero_point(matrix: QuantizedTensor) -> int | None:
    """Return z so that each code, as the C code reads it, stands for code - z; None if there is no such number."""
    if matrix.encoding == "int8":
        return INT8_ZERO_POINT
    lowest = matrix.levels[0]
    is_consecutive = matrix.levels == tuple(lowest + code for code in range(16))
    return int(-lowest) if matrix.encoding == "int4" and is_consecutive and lowest in range(-128, 113) else None


def _in_pairs(codes: Tensor) -> Tensor:
    """Return codes with each four inputs in the order 0, 2, 1, 3."""
    return codes.reshape(len(codes), -1, STEP)[..., [0, 2, 1, 3]]


def _code_strips(codes: Tensor, bits: int) -> Tensor:
    """Return the strips of codes, uint8 [num_outputs, ...] with those of each step side by side, in so many bits."""
    steps = _strips(codes.reshape(len(codes), -1).view(torch.int32))  # the codes of one step are one number
    if bits == 8:
        return _bytes_by_input(steps)
    lower = steps & 0x0F0F0F0F
    lower = lower[:, :LANES] | lower[:, LANES:] << 4
    return _bytes_by_input(lower if bits == 4 else _add_upper_bits(lower, steps >> 4, bits - 4))


def _add_upper_bits(lower: Tensor, upper: Tensor, bits: int) -> Tensor:
    """Return, for each four steps, the lines of their lower bits, and then those of their upper bits.

    `lower` is [num_strips, LANES, num_steps], and `upper` [num_strips, STRIP, num_steps].
    """
    lower, upper = (part.view(*part.shape[:2], -1, LANES // STEP) for part in (lower, upper))
    lines = lower.new_zeros(*lower.shape[:3], bits)
    mask = 0x01010101 if bits == 1 else 0x03030303
    for step in range(LANES // STEP):
        for half in range(2):
            place = (2 * step + half) * bits
            fields = upper[:, half * LANES : (half + 1) * LANES, :, step] & mask
            lines[..., place // 8] |= fields << place % 8
    return torch.cat([lower, lines], dim=3).flatten(2)


def _store_scales(scales: Scales) -> _StoredNumbers:
    """Return the scales in the smallest type that holds all of them exactly."""
    if isinstance(scales, TwoLevelScales):
        return _StoredNumbers("AS_PRODUCTS", _number_strips(scales.factors, scales.super_scales))
    numbers = scales.float()
    first_of_strips = numbers[::STRIP].contiguous()
    if torch.equal(first_of_strips.repeat_interleave(STRIP, 0)[: len(numbers)], numbers):
        return _StoredNumbers("AS_ONE_FLOAT32", [first_of_strips.view(torch.uint8)])
    bits = numbers.view(torch.int32)
    if bool(((bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000)).all()):
        return _StoredNumbers("AS_EXPONENTS", _number_strips((bits >> 23).to(torch.uint8)))
    for dtype, name in ((torch.float16, "AS_FLOAT16"), (torch.bfloat16, "AS_BFLOAT16")):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return _StoredNumbers(name, _number_strips(numbers.to(dtype)))
    return _StoredNumbers("AS_FLOAT32", _number_strips(numbers))


def _store_offsets(matrix: QuantizedTensor) -> _StoredNumbers:
    """Return the offsets: where there are zero points, as multiples of the scales."""
    if matrix.offsets is None:
        return _StoredNumbers("NO_NUMBERS", [])
    if isinstance(matrix.offsets, TwoLevelScales):
        return _store_scales(matrix.offsets)
    scales, offsets = matrix.scales.float(), matrix.offsets.float()
    multiples = (offsets / scales).round().clamp(-128, 127).nan_to_num()
    if torch.equal(multiples * scales, offsets):
        return _StoredNumbers("AS_MULTIPLES", _number_strips(multiples.to(torch.int8)))
    return _store_scales(offsets)


def _number_strips(*parts: Tensor) -> list[Tensor]:
    """Return the strips of numbers [num_outputs, n]."""
    return [_bytes_by_input(_strips(part)) for part in parts]


def _bytes_by_input(strips: Tensor) -> Tensor:
    """Return strips [num_strips, outputs, inputs] as bytes, ordered by input and then by output."""
    return strips.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def _strips(matrix: Tensor) -> Tensor:
    """Return [num_strips, STRIP, n] of a matrix [num_outputs, n], with zeros for outputs that do not exist."""
    return F.pad(matrix, (0, 0, 0, -len(matrix) % STRIP)).view(-1, STRIP, matrix.shape[1])
