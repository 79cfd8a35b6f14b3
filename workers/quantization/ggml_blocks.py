"""Unpack ggml's blocks, in which GGUF files hold their matrices, into QuantizedTensors.

A block is a run of 32 or 256 neighbours in a row: their codes, packed, and what turns these into numbers. ggml's code
in C defines the layouts (ggml-common.h in https://github.com/ggml-org/llama.cpp).

Codes, scales and minimums stay as they are: a scale for each group in float16, or the two factors of a scale
(TwoLevelScales). So numbers are ggml's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from servekit.protocol.gguf_index import BLOCK_SIZES
from workers.quantization.quantized_tensor import INT4_LEVELS, UINT4_LEVELS, QuantizedTensor, Scales, pack_nibbles
from workers.quantization.two_level_scales import TwoLevelScales

# Temporary tensors of a few bytes for each of these exist while a matrix is unpacked.
NUMBERS_AT_ONCE = 2**21
# ggml's table of levels that are closer to each other around zero (kvalues_iq4nl).
IQ4_LEVELS = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))

# Codes [n, numbers]: uint8 of four bits, or int8. Scales and offsets [n, groups].
_Unpacked = tuple[Tensor, Scales, Scales | None]


@dataclass(frozen=True, slots=True)
class _BlockType:
    unpack: Callable[[Tensor], _Unpacked]  # of uint8 [n, bytes of a block]
    levels: tuple[float, ...] = INT4_LEVELS


def unpack(type_name: str, blocks: Tensor) -> QuantizedTensor:
    """Return the matrix whose rows consist of these blocks, uint8 [num_outputs, bytes of a row].

    `type_name` is a type of BLOCK_SIZES other than a float type. Takes as much memory as the result, and little more.
    """
    whole: QuantizedTensor | None = None
    for rows, part in _parts(type_name, blocks):
        if whole is None:  # the first part shows the sizes and the types
            whole = part.map_rows(lambda tensor: tensor.new_empty(len(blocks), tensor.shape[1]))
        for tensor, some in zip(whole.row_tensors(), part.row_tensors(), strict=True):
            tensor[rows] = some
    assert whole is not None
    return whole


def dequantize(type_name: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix as numbers, [num_outputs, num_inputs]."""
    numbers, num_bytes = BLOCK_SIZES[type_name]
    matrix = torch.empty(len(blocks), blocks.shape[1] // num_bytes * numbers, dtype=dtype)
    for rows, part in _parts(type_name, blocks):
        matrix[rows] = part.dequantize(dtype)
    return matrix


def _parts(type_name: str, blocks: Tensor) -> Iterator[tuple[slice, QuantizedTensor]]:
    """Yield some rows after the other."""
    block_type = BLOCK_TYPES[type_name]
    numbers, num_bytes = BLOCK_SIZES[type_name]
    num_rows, row_bytes = blocks.shape
    rows_at_once = max(1, NUMBERS_AT_ONCE // (row_bytes // num_bytes * numbers))
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, min(first + rows_at_once, num_rows))
        codes, scales, offsets = block_type.unpack(blocks[rows].reshape(-1, num_bytes))
        if codes.dtype is torch.uint8:
            codes = pack_nibbles(codes)
        of_blocks = QuantizedTensor(codes, scales, offsets, block_type.levels)
        num_rows_here = rows.stop - first
        yield rows, of_blocks.with_row_tensors(part.reshape(num_rows_here, -1) for part in of_blocks.row_tensors())


def _bits(packed: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Return the fields of bytes [n, m]: of each `width` bytes the first field, then the second one, and so on."""
    parts = packed.reshape(len(packed), -1, width)
    return torch.stack([parts >> shift & mask for shift in shifts], dim=2).flatten(1)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    return _bits(packed, width, (0, 4), 0xF)


def _half(packed: Tensor) -> Tensor:
    """Return two bytes [n, 2] as float16 [n, 1]."""
    return packed.contiguous().view(torch.float16)


def _signed(codes: Tensor, zero: int) -> Tensor:
    return codes.to(torch.int8) - zero


def _products(factors: Tensor, super_scale: Tensor) -> TwoLevelScales:
    """Return the scales of blocks, of factors [n, groups] and one float16 [n, 1] each."""
    return TwoLevelScales(factors.to(torch.int8), super_scale)


def _q4_0(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[:, 2:], 16), _half(blocks[:, :2]), None


def _q4_1(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[:, 4:], 16), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Return codes from their fifth bits, of which a byte has those of eight neighbours, and the other four."""
    return _nibbles(low, 16) | _bits(high, 1, tuple(range(8)), 1) << 4


def _q5_0(blocks: Tensor) -> _Unpacked:
    return _signed(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16), _half(blocks[:, :2]), None


def _q5_1(blocks: Tensor) -> _Unpacked:
    return _signed(_five_bits(blocks[:, 4:8], blocks[:, 8:]), 0), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: Tensor) -> _Unpacked:
    return blocks[:, 2:].view(torch.int8), _half(blocks[:, :2]), None


def _q2_k(blocks: Tensor) -> _Unpacked:
    both = blocks[:, :16]
    scales, minimums = _products(both & 0xF, _half(blocks[:, 80:82])), _products(both >> 4, -_half(blocks[:, 82:]))
    return _bits(blocks[:, 16:80], 32, (0, 2, 4, 6), 3), scales, minimums


def _q3_k(blocks: Tensor) -> _Unpacked:
    low, high = _bits(blocks[:, 32:96], 32, (0, 2, 4, 6), 3), _bits(blocks[:, :32], 32, tuple(range(8)), 1)
    factors = _nibbles(blocks[:, 96:104], 8) | _bits(blocks[:, 104:108], 4, (0, 2, 4, 6), 3) << 4
    # Without its third bit, a number is lower by four. The level of a four-bit code is the code less eight.
    return low + 4 * high + 4, _products(_signed(factors, 32), _half(blocks[:, 108:])), None


def _scales_and_minimums(blocks: Tensor) -> tuple[TwoLevelScales, TwoLevelScales]:
    """Return those of the eight groups in blocks of Q4_K and Q5_K, which begin alike: factors of six bits.

    Minimums are subtracted, so they are negative offsets.
    """
    a, b, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([a & 0x3F, rest & 0xF | a >> 2 & 0x30], dim=1)
    minimums = torch.cat([b & 0x3F, rest >> 4 | b >> 2 & 0x30], dim=1)
    return _products(scales, _half(blocks[:, :2])), _products(minimums, -_half(blocks[:, 2:4]))


def _q4_k(blocks: Tensor) -> _Unpacked:
    scales, minimums = _scales_and_minimums(blocks)
    return _nibbles(blocks[:, 16:], 32), scales, minimums


def _q5_k(blocks: Tensor) -> _Unpacked:
    scales, minimums = _scales_and_minimums(blocks)
    codes = _nibbles(blocks[:, 48:], 32) | _bits(blocks[:, 16:48], 32, tuple(range(8)), 1) << 4
    return _signed(codes, 0), scales, minimums


def _q6_k(blocks: Tensor) -> _Unpacked:
    codes = _nibbles(blocks[:, :128], 64) | _bits(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    return _signed(codes, 32), _products(blocks[:, 192:208].view(torch.int8), _half(blocks[:, 208:])), None


def _iq4_xs(blocks: Tensor) -> _Unpacked:
    factors = _bits(blocks[:, 4:8], 1, (0, 4), 0xF) | _bits(blocks[:, 2:4], 1, (0, 2, 4, 6), 3) << 4
    return _nibbles(blocks[:, 8:], 16), _products(_signed(factors, 32), _half(blocks[:, :2])), None


BLOCK_TYPES = {
    "Q4_0": _BlockType(_q4_0),
    "Q4_1": _BlockType(_q4_1, UINT4_LEVELS),
    "Q5_0": _BlockType(_q5_0),
    "Q5_1": _BlockType(_q5_1),
    "Q8_0": _BlockType(_q8_0),
    "Q2_K": _BlockType(_q2_k, UINT4_LEVELS),
    "Q3_K": _BlockType(_q3_k),
    "Q4_K": _BlockType(_q4_k, UINT4_LEVELS),
    "Q5_K": _BlockType(_q5_k),
    "Q6_K": _BlockType(_q6_k),
    "IQ4_NL": _BlockType(_q4_0, IQ4_LEVELS),
    "IQ4_XS": _BlockType(_iq4_xs, IQ4_LEVELS),
}
