"""AWQ: multiply the weights of large inputs before they are rounded, so that their error counts less.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023, arXiv 2306.00978.
Each input is divided by a scale, and its column of weights is multiplied
by it, which leaves the product as it is. The scale is the mean magnitude of the input to a power, and the power with
the least error of the outputs is searched (section 3.2). What divides the inputs is no work at run time: it is folded
into the parameters of the layer before. Then each group's range is clipped where that makes its outputs better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.quantization.methods.grid import Grid, RoundedMatrix
from workers.quantization.methods.input_statistics import InputStatistics, squared_error

NUM_EXPONENTS = 20  # from 0 on, in steps of 1/20, as in the authors' code
MIN_MAGNITUDE = 1e-4


def search_scales(weights: Sequence[Tensor], statistics: InputStatistics, grids: Sequence[Grid]) -> Tensor:
    """Return scales [num_inputs] by which to multiply the columns of matrices that share their inputs.

    They are ones if nothing is better.
    """
    magnitude = statistics.mean_magnitude.clamp_min(MIN_MAGNITUDE)
    best, least = torch.ones_like(magnitude), float("inf")
    for step in range(NUM_EXPONENTS):
        scales = magnitude.pow(step / NUM_EXPONENTS)
        scales /= (scales.amax() * scales.amin()).sqrt()  # so that they lie about 1
        error = 0.0
        for weight, grid in zip(weights, grids, strict=True):
            groups = grid.groups(weight * scales)
            found, zero_points = grid.cover(groups)
            rounded = grid.round(groups, found[..., None], zero_points[..., None]).flatten(1)
            error += squared_error(rounded.div_(scales).sub_(weight), statistics.gram)
        if error < least:
            best, least = scales, error
    return best


def round_clipped(weight: Tensor, gram: Tensor, grid: Grid) -> RoundedMatrix:
    """Round a matrix, float32 [num_outputs, num_inputs], to the nearest codes.

    Each group's range has the least error of what the group adds to the outputs, for inputs whose Gram matrix is
    `gram`. The authors do not clip matrices of queries and keys, because they search for the least error of attention's
    output as a whole. Here each matrix has its own error, so all are clipped.
    """
    groups = grid.groups(weight)
    size = groups.shape[-1]
    blocks = gram.view(groups.shape[1], size, groups.shape[1], size)
    of_groups = blocks.diagonal(dim1=0, dim2=2).movedim(-1, 0)  # [num_groups, size, size]

    def error_of(difference: Tensor) -> Tensor:
        by_group = difference.transpose(0, 1)  # [num_groups, num_outputs, size]
        errors: Tensor = (by_group @ of_groups).mul_(by_group).sum(dim=-1).T
        return errors

    scales, zero_points = grid.fit_by(groups, error_of)
    codes = grid.encode(groups, scales[..., None], zero_points[..., None]).flatten(1)
    return grid.matrix(codes, scales, zero_points)
