"""A matrix of four or eight bits per weight: the one type for all formats of quantized weights.

Formats differ in how they pack codes, in the type of their scales and in the names of their tensors. Their meaning is
the same: each number is a code of few bits times a scale, and a group of neighbours in a row shares the scale. So each
format is read into a QuantizedTensor, and layers and kernels do not depend on formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from workers.quantization.two_level_scales import TwoLevelScales

Encoding = Literal["int4", "int8", "float8"]
Activations = Literal["float", "int8", "float8"]

Scales = Tensor | TwoLevelScales

# What the sixteen codes of four bits stand for, unless a format has levels of its own, as NF4 has.
INT4_LEVELS = tuple(float(level) for level in range(-8, 8))
UINT4_LEVELS = tuple(float(level) for level in range(16))
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
PIECE_NUMBERS = 2**19  # that a CPU dequantizes at a time
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
    scales: Scales  # floating-point [num_outputs, num_groups]
    offsets: Scales | None = None  # as scales, of two levels if these are; None: zero everywhere
    levels: tuple[float, ...] = INT4_LEVELS  # of four-bit codes only
    input_order: Tensor | None = None  # int64 [num_inputs]; None: the codes' own order
    activations: Activations = "float"  # the number format that the checkpoint was made for

    def __post_init__(self) -> None:
        assert self.codes.dtype in _ENCODINGS and self.codes.ndim == len(self.scales.shape) == 2
        assert self.scales.shape[0] == len(self.codes) and self.num_inputs % self.scales.shape[1] == 0
        if self.offsets is not None:
            assert self.offsets.shape == self.scales.shape
            assert isinstance(self.offsets, TwoLevelScales) == isinstance(self.scales, TwoLevelScales)
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
        order_bytes = 0 if self.input_order is None else self.input_order.nbytes
        return order_bytes + sum(tensor.nbytes for tensor in self.row_tensors())

    def row_tensors(self) -> list[Tensor]:
        """Return the tensors that have a row for each output: codes, scales, and offsets if there are any."""
        found = [self.codes]
        for scales in (self.scales, self.offsets):
            if isinstance(scales, TwoLevelScales):
                found += [scales.factors, scales.super_scales]
            elif scales is not None:
                found.append(scales)
        return found

    def with_row_tensors(self, tensors: Iterable[Tensor]) -> QuantizedTensor:
        """Return a matrix of other tensors, which are in the order of `row_tensors`."""
        remaining = iter(tensors)

        def like(scales: Scales) -> Scales:
            if isinstance(scales, TwoLevelScales):
                return TwoLevelScales(next(remaining), next(remaining))
            return next(remaining)

        codes, scales = next(remaining), like(self.scales)
        return replace(self, codes=codes, scales=scales, offsets=None if self.offsets is None else like(self.offsets))

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Return the matrix with each of `row_tensors` changed by a function."""
        return self.with_row_tensors(map(function, self.row_tensors()))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return W as numbers, computed in float32 and rounded to `dtype` once."""
        found = None
        for rows, part in self.pieces():
            numbers = part._dequantize().to(dtype)
            if len(numbers) == self.num_outputs:
                return numbers
            if found is None:
                found = torch.empty(self.num_outputs, self.num_inputs, dtype=dtype)
            found[rows] = numbers
        assert found is not None
        return found

    def pieces(self) -> Iterator[tuple[slice, QuantizedTensor]]:
        """Yield rows, and the part of the matrix that they are.

        On a CPU they are few: dequantized copies of whole matrices would be the peak of memory while a model is loaded.
        On a GPU, where each piece would be further kernels, they are all rows.
        """
        num_rows = max(1, PIECE_NUMBERS // self.num_inputs)
        if self.codes.device.type != "cpu" or num_rows >= self.num_outputs:
            yield slice(0, self.num_outputs), self
            return
        for first in range(0, self.num_outputs, num_rows):
            rows = slice(first, first + num_rows)
            yield rows, self.with_row_tensors([tensor[rows] for tensor in self.row_tensors()])

    def _dequantize(self) -> Tensor:
        levels = self._levels().view(*self.scales.shape, self.group_size)
        matrix = levels.mul_(self.scales.float()[..., None])
        if self.offsets is not None:
            matrix += self.offsets.float()[..., None]
        matrix = matrix.flatten(1)
        if self.input_order is not None:
            ordered = torch.empty_like(matrix)
            ordered[:, self.input_order] = matrix
            matrix = ordered
        return matrix

    def to(self, device: torch.device) -> QuantizedTensor:
        """Return the matrix on a device."""
        order = None if self.input_order is None else self.input_order.to(device)
        return replace(self.map_rows(lambda tensor: tensor.to(device)), input_order=order)

    def with_plain_scales(self) -> QuantizedTensor:
        """Return an equal matrix without scales of two levels, whose levels are -8 to 7 if they are consecutive."""
        scales, offsets, levels = self.scales, self.offsets, self.levels
        if isinstance(scales, TwoLevelScales):
            scales, offsets = scales.float(), None if offsets is None else offsets.float()
        first = levels[0]
        if self.encoding == "int4" and first != INT4_LEVELS[0] and levels == tuple(first + code for code in range(16)):
            shift = (first - INT4_LEVELS[0]) * scales.float()
            offsets, levels = shift if offsets is None else offsets.float() + shift, INT4_LEVELS
        return replace(self, scales=scales, offsets=offsets, levels=levels)

    def take_outputs(self, rows: Tensor) -> QuantizedTensor:
        """Return a copy with these rows only, int64 [num_rows]."""
        return self.map_rows(lambda tensor: tensor[rows])

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
        offsets = None if self.offsets is None else _take_groups(self.offsets, groups)
        return replace(self, codes=codes, scales=_take_groups(self.scales, groups), offsets=offsets)

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
    if any(matrix.offsets is not None for matrix in matrices):
        matrices = [replace(matrix, offsets=_offsets(matrix)) for matrix in matrices]
    tensors = zip(*(matrix.row_tensors() for matrix in matrices), strict=True)
    return matrices[0].with_row_tensors(map(torch.cat, tensors))


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
        and _columns(a.scales) == _columns(b.scales)
    )


def _columns(scales: Scales) -> list[tuple[torch.dtype, int]]:
    tensors = [scales.factors, scales.super_scales] if isinstance(scales, TwoLevelScales) else [scales]
    return [(tensor.dtype, tensor.shape[1]) for tensor in tensors]


def _offsets(matrix: QuantizedTensor) -> Scales:
    if matrix.offsets is not None:
        return matrix.offsets
    return matrix.scales.zeros() if isinstance(matrix.scales, TwoLevelScales) else torch.zeros_like(matrix.scales)


def _take_groups(scales: Scales, groups: slice) -> Scales:
    if isinstance(scales, TwoLevelScales):
        return scales.take_groups(groups)
    return scales[:, groups].clone(memory_format=torch.contiguous_format)
