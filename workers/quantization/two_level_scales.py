"""Scales that are products of two numbers: a small integer for each group, and a float for several groups.

ggml's K types store them so. Folded into one float each, they would take several times the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TwoLevelScales:
    """Numbers [num_outputs, num_groups]: factors[n, g] * super_scales[n, g // super_block_groups]."""

    factors: Tensor  # int8 [num_outputs, num_groups]
    super_scales: Tensor  # float16 [num_outputs, num_groups / super_block_groups]

    @property
    def shape(self) -> torch.Size:
        return self.factors.shape

    @property
    def super_block_groups(self) -> int:
        """How many neighbours in a row share a super-scale."""
        return self.factors.shape[1] // self.super_scales.shape[1]

    def float(self) -> Tensor:
        """Return the products as float32. They are exact: eight bits times eleven."""
        factors = self.factors.view(*self.super_scales.shape, self.super_block_groups)
        products: Tensor = factors * self.super_scales.float()[..., None]
        return products.flatten(1)

    def zeros(self) -> TwoLevelScales:
        """Return as many numbers that are zero."""
        return TwoLevelScales(torch.zeros_like(self.factors), torch.zeros_like(self.super_scales))

    def take_groups(self, groups: slice) -> Tensor | TwoLevelScales:
        """Return a copy of some groups: as plain float32 if the first or last super-block is cut."""
        size = self.super_block_groups
        if groups.start % size or groups.stop % size:
            return self.float()[:, groups].clone(memory_format=torch.contiguous_format)
        super_blocks = slice(groups.start // size, groups.stop // size)
        return TwoLevelScales(
            self.factors[:, groups].clone(memory_format=torch.contiguous_format),
            self.super_scales[:, super_blocks].clone(memory_format=torch.contiguous_format),
        )
