"""A matrix of four or eight bits per weight: the one type for all formats of quantized weights.

Formats differ in how they pack codes, in the type of their scales and in the names of their tensors. Their meaning is
the same: each number is a code of few bits times a scale, and a group of neighbours in a row shares the scale. So each
format is read into a QuantizedTensor, and layers and kernels do not depend on formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Encoding = Literal["int4", "int8", "float8"]
Activations = Literal["float", "int8", "float8"]

# What the sixteen codes of four bits stand for, unless a format has levels of its own, as NF4 has.
INT4_LEVELS = tuple(float(level) for level in range(-8, 8))
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_ENCODINGS: dict[torch.dtype, Encoding] = {
    torch.uint8: "int4",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8",
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A matrix W [num_outputs, num_inputs].

    W[n, k] = level(codes[n, k]) * scales[n, g] + offsets[n, g], where g = k // group_size. The level of an int8 or
    float8 code is its own value. The level of a four-bit code c is levels[c].

    With `input_order`, column k of the codes belongs to the input input_order[k]: x is gathered before it is
    multiplied. GPTQ orders columns so with `desc_act`.
    """

    codes: (
        Tensor  # int8 or float8_e4m3fn [num_outputs, num_inputs]; uint8 [num_outputs, num_inputs / 2], low half first
    )
    scales: Tensor  # floating-point [num_outputs, num_groups]
    offsets: Tensor | None = None  # as scales; None: zero everywhere
    levels: tuple[float, ...] = INT4_LEVELS  # of four-bit codes only
    input_order: Tensor | None = None  # int64 [num_inputs]; None: the codes' own order
    activations: Activations = "float"  # the number format that the checkpoint was made for

    def __post_init__(self) -> None:
        assert self.codes.dtype in _ENCODINGS and self.codes.ndim == self.scales.ndim == 2
        assert len(self.scales) == len(self.codes) and self.num_inputs % self.scales.shape[1] == 0
        assert self.offsets is None or self.offsets.shape == self.scales.shape
        assert len(self.levels) == 16

    @property
    def encoding(self) -> Encoding:
        return _ENCODINGS[self.codes.dtype]

    @property
    def num_outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.encoding == "int4" else 1)

    @property
    def group_size(self) -> int:
        """How many neighbours in a row share a scale; `num_inputs` if there is one scale for each row."""
        return self.num_inputs // self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scales, self.offsets, self.input_order)
        return sum(part.nbytes for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return W as numbers, computed in float32 and rounded to `dtype` once."""
        levels = self._levels().view(*self.scales.shape, self.group_size)
        matrix = levels.mul_(self.scales.float()[..., None])
        if self.offsets is not None:
            matrix += self.offsets.float()[..., None]
        matrix = matrix.flatten(1)
        if self.input_order is not None:
            ordered = torch.empty_like(matrix)
            ordered[:, self.input_order] = matrix
            matrix = ordered
        return matrix.to(dtype)

    def to(self, device: torch.device) -> QuantizedTensor:
        """Return the matrix on a device."""
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            offsets=None if self.offsets is None else self.offsets.to(device),
            input_order=None if self.input_order is None else self.input_order.to(device),
        )

    def take_outputs(self, rows: Tensor) -> QuantizedTensor:
        """Return a copy with these rows only, int64 [num_rows]."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], offsets=offsets)

    def take_inputs(self, first: int, end: int) -> QuantizedTensor:
        """Return a copy with the columns [first, end) only.

        Raises ValueError if the cut divides a group, or if columns are not in the order of the inputs.
        """
        size = self.group_size
        if self.input_order is not None:
            raise ValueError("the inputs of a weight that was quantized with desc_act cannot be divided")
        if size == self.num_inputs:  # one scale for each row holds for any part of it
            groups = slice(0, 1)
        elif first % size or end % size:
            raise ValueError(f"inputs {first} to {end} do not consist of whole groups of {size}")
        else:
            groups = slice(first // size, end // size)
        per_byte = 2 if self.encoding == "int4" else 1
        if first % per_byte or end % per_byte:
            raise ValueError(f"inputs {first} to {end} do not consist of whole bytes of two codes")
        codes = self.codes[:, first // per_byte : end // per_byte].clone(memory_format=torch.contiguous_format)
        scales = self.scales[:, groups].clone(memory_format=torch.contiguous_format)
        offsets = None
        if self.offsets is not None:
            offsets = self.offsets[:, groups].clone(memory_format=torch.contiguous_format)
        return replace(self, codes=codes, scales=scales, offsets=offsets)

    def _levels(self) -> Tensor:
        """Return the codes' levels, float32 [num_outputs, num_inputs]."""
        if self.encoding != "int4":
            return self.codes.float()
        levels = torch.tensor(self.levels, device=self.codes.device)
        # Two at a time: an index of eight bytes for each code would take as much memory as four matrices.
        pairs = torch.stack([levels.repeat(16), levels.repeat_interleave(16)], dim=-1)  # of each value of a byte
        found: Tensor = pairs[self.codes.int()].flatten(1)
        return found


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return codes of four bits, uint8 [..., n] with n even, two in a byte: uint8 [..., n / 2], low half first."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the codes of `pack_nibbles`, uint8 [..., n]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def stack_outputs(matrices: Sequence[QuantizedTensor]) -> QuantizedTensor | None:
    """Return matrices of the same inputs as one, their outputs side by side.

    Returns None if they differ in encoding, levels, groups, order of inputs or activations: then each has to be
    multiplied by itself.
    """
    first = matrices[0]
    if not all(_is_alike(first, other) for other in matrices[1:]):
        return None
    offsets = None
    if any(matrix.offsets is not None for matrix in matrices):
        offsets = torch.cat([_offsets(matrix) for matrix in matrices])
    codes, scales = (torch.cat([getattr(matrix, part) for matrix in matrices]) for part in ("codes", "scales"))
    return replace(first, codes=codes, scales=scales, offsets=offsets)


def _is_alike(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    one_order, other_order = a.input_order, b.input_order
    if one_order is None or other_order is None:
        has_same_order = one_order is other_order
    else:
        has_same_order = torch.equal(one_order, other_order)
    return (
        has_same_order
        and (a.codes.dtype, a.codes.shape[1], a.levels, a.activations)
        == (b.codes.dtype, b.codes.shape[1], b.levels, b.activations)
        and (a.scales.dtype, a.scales.shape[1]) == (b.scales.dtype, b.scales.shape[1])
    )


def _offsets(matrix: QuantizedTensor) -> Tensor:
    return torch.zeros_like(matrix.scales) if matrix.offsets is None else matrix.offsets
