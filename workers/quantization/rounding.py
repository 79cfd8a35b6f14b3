"""Round a matrix to few bits, with the least squared error that its scales allow.

Every function takes a matrix [num_outputs, num_inputs] of any floating-point dtype and returns it as a QuantizedTensor.
It works on a few rows at a time, in float32, so that it takes little memory besides the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from workers.quantization.quantized_tensor import NF4_LEVELS, Activations, QuantizedTensor, pack_nibbles

CHUNK_NUMBERS = 2**18  # rounded at a time: 1 MiB of float32, which stays in a core's cache
# How much of a group's range four bits cover. What is outside is rounded to the ends, and everything else finer.
# Four are within 0.5 % of the error of seven, in half the time.
CLIPPING_RATIOS = (1.0, 0.92, 0.84, 0.76)
FLOAT8_MAX = 448.0


def round_int8(matrix: Tensor, activations: Activations = "int8") -> QuantizedTensor:
    """Round to int8 with a scale for each row. Clipping is not searched: at eight bits it costs more than it saves."""
    codes = torch.empty(matrix.shape, dtype=torch.int8)
    scales = torch.empty(len(matrix), 1)
    for rows, numbers in _chunks(matrix):
        scales[rows] = _positive(numbers.abs().amax(dim=1, keepdim=True) / 127)
        codes[rows] = (numbers / scales[rows]).round_().clamp_(-127, 127).to(torch.int8)
    return QuantizedTensor(codes, scales, activations=activations)


def round_float8(matrix: Tensor, activations: Activations = "float8") -> QuantizedTensor:
    """Round to float8 (e4m3) with a scale for each row."""
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(matrix), 1)
    for rows, numbers in _chunks(matrix):
        scales[rows] = _positive(numbers.abs().amax(dim=1, keepdim=True) / FLOAT8_MAX)
        codes[rows] = (numbers / scales[rows]).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return QuantizedTensor(codes, scales, activations=activations)


def round_int4(matrix: Tensor, group_size: int, activations: Activations = "float") -> QuantizedTensor:
    """Round to sixteen levels at equal distances, with a scale and an offset for each group of a row.

    `group_size` must divide the number of inputs and be even. Scales and offsets are bfloat16: compared with the
    rounding to sixteen levels, theirs adds less than a thousandth to the error, and in float32 they would take a
    quarter of the memory of the codes.
    """

    def round_groups(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low, high = numbers.aminmax(dim=0)
        middle, extent = (low + high) / 2, high - low
        best = _Best(numbers)
        for ratio in CLIPPING_RATIOS:
            scale = _positive(extent * (ratio / 15))
            best.propose(scale, middle + scale / 2)  # the levels -8 to 7 lie about -1/2
        # For the levels that were chosen, the best scale and offset are a linear regression.
        levels = best.levels()
        mean_level, mean = levels.mean(dim=0), numbers.mean(dim=0)
        deviation = levels - mean_level
        slope = (deviation * numbers).sum(dim=0) / deviation.square().sum(dim=0)
        slope = torch.where(slope.isfinite() & (slope > 0), slope, best.scale)
        best.propose(slope, mean - slope * mean_level)
        return (best.levels() + 8).to(torch.uint8), best.scale, best.offset

    codes, scales, offsets = _by_groups(matrix, group_size, round_groups)
    return QuantizedTensor(codes, scales, offsets, activations=activations)


def round_nf4(matrix: Tensor, group_size: int) -> QuantizedTensor:
    """Round to the sixteen levels of NF4, with the largest number of each group of a row as its scale.

    The levels lie as close as the numbers of a normal distribution: Dettmers et al., "QLoRA: Efficient Finetuning of
    Quantized LLMs", 2023, section 3.
    """
    borders = [(lower + upper) / 2 for lower, upper in pairwise(NF4_LEVELS)]

    def round_groups(numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = _positive(numbers.abs().amax(dim=0)).bfloat16().float()
        levels, codes = numbers / scale, torch.zeros(numbers.shape, dtype=torch.uint8)
        for border in borders:  # fifteen comparisons of many numbers are faster than a binary search for each
            codes += levels > border
        return codes, scale, torch.zeros_like(scale)

    codes, scales, _ = _by_groups(matrix, group_size, round_groups)
    return QuantizedTensor(codes, scales, levels=NF4_LEVELS)


class _Best:
    """The scales and offsets, among those proposed, with the least squared error of each group."""

    def __init__(self, numbers: Tensor) -> None:
        """`numbers` is float32 [group_size, num_groups]."""
        self._numbers = numbers
        self._error = numbers.new_full(numbers.shape[1:], torch.inf)
        self.scale = self.offset = torch.full_like(self._error, torch.nan)  # stays, if the numbers are not finite
        self._exact, self._rounded = torch.empty_like(numbers), torch.empty_like(numbers)

    def propose(self, scale: Tensor, offset: Tensor) -> None:
        scale, offset = scale.bfloat16().float(), offset.bfloat16().float()
        torch.sub(self._numbers, offset, out=self._exact).div_(scale)
        torch.round(self._exact, out=self._rounded).clamp_(-8, 7)
        error = self._rounded.sub_(self._exact).square_().sum(dim=0) * scale.square()
        is_better = error < self._error
        self._error = torch.where(is_better, error, self._error)
        self.scale = torch.where(is_better, scale, self.scale)
        self.offset = torch.where(is_better, offset, self.offset)

    def levels(self) -> Tensor:
        return torch.sub(self._numbers, self.offset).div_(self.scale).round_().clamp_(-8, 7)


def _positive(scales: Tensor) -> Tensor:
    """Return scales to divide by: groups that are all zeros have one, too. NaN stays NaN."""
    return torch.where(scales <= 1e-30, 1.0, scales)


def _chunks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield parts of the matrix as float32, with their rows."""
    num_rows = max(1, CHUNK_NUMBERS // matrix.shape[1])
    for start in range(0, len(matrix), num_rows):
        rows = slice(start, min(start + num_rows, len(matrix)))
        yield rows, matrix[rows].float()


def _by_groups(
    matrix: Tensor, group_size: int, round_groups: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed codes, scales and offsets.

    `round_groups` computes them for numbers [group_size, num_groups]. Groups lie side by side there, so that what they
    have one of is read in whole vectors.
    """
    num_outputs, num_inputs = matrix.shape
    num_groups = num_inputs // group_size
    codes = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8)
    scales, offsets = (torch.empty(num_outputs, num_groups, dtype=torch.bfloat16) for _ in range(2))
    for rows, numbers in _chunks(matrix):
        of_groups, scale, offset = round_groups(numbers.view(-1, group_size).T.contiguous())
        codes[rows] = pack_nibbles(of_groups.T.contiguous().view(numbers.shape))
        scales[rows], offsets[rows] = scale.view(-1, num_groups), offset.view(-1, num_groups)
    return codes, scales, offsets
