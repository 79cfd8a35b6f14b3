"""The numbers that quantized weights can have, and how scales are found for the numbers of a matrix.

A number is (code - zero_point) * scale. Neighbours in a row, a group, share the scale and the zero point. This is the
arithmetic of compressed-tensors. QuantizedTensor allows any offset in place of zero points, and levels at any distance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# How much of a group's range four bits cover. What is outside is rounded to the ends, and everything else finer.
CLIPPING_RATIOS = (1.0, 0.96, 0.92, 0.87, 0.8, 0.72)
FLOAT8_MAX = 448.0


@dataclass(frozen=True, slots=True, eq=False)
class RoundedMatrix:
    """A matrix [num_outputs, num_inputs] whose numbers are (code - zero_point) * scale."""

    codes: Tensor  # int8 or float8_e4m3fn [num_outputs, num_inputs]
    scales: Tensor  # floating-point [num_outputs, num_groups]
    zero_points: Tensor | None  # int8 [num_outputs, num_groups]; None: zero everywhere

    def dequantize(self) -> Tensor:
        """Return the numbers, float32."""
        numbers = self.codes.float().view(*self.scales.shape, -1)
        if self.zero_points is not None:
            numbers -= self.zero_points.float()[..., None]
        return numbers.mul_(self.scales.float()[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class Grid:
    """The codes of a scheme, and how many neighbours share a scale.

    Codes, scales and zero points are float32 here, whatever type they are stored in. Scales are rounded to the type in
    which they are stored before codes are computed, so that codes are the best for the scales that a reader sees.
    """

    num_bits: int  # 4 or 8
    group_size: int | None = None  # None: one scale for each row
    is_symmetric: bool = True
    is_float: bool = False  # float8 (e4m3)
    scale_dtype: torch.dtype = torch.float32

    @property
    def low(self) -> float:
        return -FLOAT8_MAX if self.is_float else -(2.0 ** (self.num_bits - 1))

    @property
    def high(self) -> float:
        return FLOAT8_MAX if self.is_float else 2.0 ** (self.num_bits - 1) - 1

    @property
    def clipping_ratios(self) -> tuple[float, ...]:
        """Which parts of a group's range to try. At eight bits, clipping costs more than it saves."""
        return CLIPPING_RATIOS if self.num_bits == 4 else (1.0,)

    def groups(self, matrix: Tensor) -> Tensor:
        """Return the groups of each row: [num_rows, num_groups, group_size]."""
        return matrix.reshape(len(matrix), -1, self.group_size or matrix.shape[1])

    def cover(self, groups: Tensor, ratio: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return scales and zero points [...] with which codes cover this part of the range of groups [..., size]."""
        if self.is_symmetric:
            scales = self._stored(groups.abs().amax(dim=-1) * (ratio / self.high))
            return scales, torch.zeros_like(scales)
        # The range contains zero, or the zero point would not be a code.
        least, most = groups.amin(dim=-1).clamp_max_(0) * ratio, groups.amax(dim=-1).clamp_min_(0) * ratio
        scales = self._stored((most - least) / (self.high - self.low))
        return scales, (self.low - least / scales).round_().clamp_(self.low, self.high)

    def fit(self, groups: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points [...] with the least squared error, of those that `clipping_ratios` give.

        `importance`, which broadcasts to groups [..., size], weighs the squares.
        """

        def error_of(difference: Tensor) -> Tensor:
            squares = difference.square_()
            return (squares if importance is None else squares.mul_(importance)).sum(dim=-1)

        return self.fit_by(groups, error_of)

    def fit_by(self, groups: Tensor, error_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the scales and zero points for which `error_of` is least, group by group.

        It is called with differences [..., size], which it may overwrite, and returns errors [...].
        """
        scales, zero_points = self.cover(groups)
        if len(self.clipping_ratios) == 1:
            return scales, zero_points
        least = torch.full_like(scales, torch.inf)
        for ratio in self.clipping_ratios:
            proposed, its_zero_points = self.cover(groups, ratio)
            error = error_of(self.round(groups, proposed[..., None], its_zero_points[..., None]).sub_(groups))
            is_better = error < least
            least = torch.where(is_better, error, least)
            scales = torch.where(is_better, proposed, scales)
            zero_points = torch.where(is_better, its_zero_points, zero_points)
        return scales, zero_points

    def encode(self, numbers: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
        """Return the nearest codes, as float32. Scales and zero points broadcast to the numbers."""
        if self.is_float:
            return (numbers / scales).clamp_(self.low, self.high).to(torch.float8_e4m3fn).float()
        return (numbers / scales).add_(zero_points).round_().clamp_(self.low, self.high)

    def round(self, numbers: Tensor, scales: Tensor, zero_points: Tensor) -> Tensor:
        """Return the nearest numbers that have codes, as float32."""
        return self.encode(numbers, scales, zero_points).sub_(zero_points).mul_(scales)

    def matrix(self, codes: Tensor, scales: Tensor, zero_points: Tensor) -> RoundedMatrix:
        """Return codes [num_outputs, num_inputs], and scales and zero points of their groups, as they are stored."""
        return RoundedMatrix(
            codes.to(torch.float8_e4m3fn if self.is_float else torch.int8),
            scales.to(self.scale_dtype),
            None if self.is_symmetric else zero_points.to(torch.int8),
        )

    def _stored(self, scales: Tensor) -> Tensor:
        """Return scales as they are stored. Groups of zeros, and of numbers too small for the type, have one, too."""
        stored = scales.to(self.scale_dtype).float()
        return torch.where(stored > 0, stored, 1.0)
