"""Convert scales, zero points and orders of columns to those of a QuantizedTensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.quantization.formats.checks import refused


def offsets_of(zero_points: Tensor, scales: Tensor, middle: int) -> Tensor:
    """Return what is added to each number, for codes c that mean (c - zero_point) * scale.

    A QuantizedTensor's level of c is c - middle, so (middle - zero_point) * scale is left to add. It is float32: in 16
    bits the product would be rounded.
    """
    return (middle - zero_points.to(torch.int32)).float() * scales.float()


def order_of_groups(groups: Tensor, num_groups: int, name: str) -> Tensor | None:
    """Return the order of columns in which groups stand side by side; None if they do already.

    `groups` [num_inputs] says for each column which group it is in (`g_idx`). Raises ConfigError unless each group has
    as many columns as the others: QuantizedTensor has groups of one size.
    """
    num_inputs = len(groups)
    size = num_inputs // num_groups
    groups = groups.to(torch.int64)
    if num_inputs % num_groups or int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise refused(name, f"has g_idx from {int(groups.min())} to {int(groups.max())} for {num_groups} groups")
    if bool((torch.bincount(groups, minlength=num_groups) != size).any()):
        raise refused(name, f"has g_idx with groups that are not of {size} inputs each")
    if bool((groups[1:] >= groups[:-1]).all()):
        return None
    return torch.argsort(groups, stable=True)


def group_size_of_blocks(columns: int, num_inputs: int) -> int:
    """Return how many neighbours in a row share a block of `columns`, if the last block may be cut off."""
    return num_inputs if num_inputs <= columns else math.gcd(columns, num_inputs)


def repeat_blocks(scales: Tensor, block_shape: tuple[int, int], num_outputs: int, num_inputs: int) -> Tensor:
    """Return scales of blocks [rows, columns] as scales of groups in each row, [num_outputs, num_groups].

    The last blocks may be cut off by the matrix's end. Then groups are as large as divides both the block's columns and
    the matrix's.
    """
    rows, columns = block_shape
    size = group_size_of_blocks(columns, num_inputs)
    starts = torch.arange(0, num_inputs, size) // columns
    return scales[torch.arange(num_outputs) // rows][:, starts]
