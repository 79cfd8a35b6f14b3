"""RTN: round each number to the nearest one that has a code. It looks at the weights only, and needs no calibration.

Scales are searched: for four bits, ranges that clip a group's largest numbers are tried, too.
"""

from __future__ import annotations

from torch import Tensor

from workers.quantization.methods.grid import Grid, RoundedMatrix


def round_to_nearest(weight: Tensor, grid: Grid) -> RoundedMatrix:
    """Round a matrix, float32 [num_outputs, num_inputs], with the least squared error of each group."""
    groups = grid.groups(weight)
    scales, zero_points = grid.fit(groups)
    codes = grid.encode(groups, scales[..., None], zero_points[..., None]).flatten(1)
    return grid.matrix(codes, scales, zero_points)
