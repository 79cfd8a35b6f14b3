"""GPTQ: round one column after the other, and let the columns that are left make up for its error.

Frantar, Ashkboos, Hoefler and Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022, arXiv 2210.17323, algorithm 1. The squared error of the outputs is a quadratic form of the change
of each row. Its matrix is H = X X' of the inputs X (InputStatistics.gram). When column i is rounded, the change of the
others that makes up best for its error e is -e / [H^-1]_ii times row i of H^-1, where H has the columns left only.
All these rows are those of the Cholesky factor of the whole H^-1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.methods.grid import Grid, RoundedMatrix

BLOCK_SIZE = 128  # columns whose effect on those after them is added at once, by one multiplication
DAMPENING = 0.01  # of H's mean diagonal, added to its diagonal: the paper's
MAX_DAMPENING = 10.0


def round_gptq(
    weight: Tensor, gram: Tensor, grid: Grid, *, dampening: float = DAMPENING, in_order_of_activation: bool = True
) -> RoundedMatrix:
    """Round a matrix, float32 [num_outputs, num_inputs], for inputs whose Gram matrix is `gram`.

    With `in_order_of_activation`, the columns of the largest inputs are rounded first, when most others are left to
    make up for them. Groups stay those of neighbours, so a reader need not reorder anything: scales are found before
    the first column is rounded. (This is the option `static_groups` together with `act_order` of the authors' code.)
    Otherwise the scales of a group are found when its first column is reached, for the numbers as they have become.

    Raises ConfigError if the Gram matrix is not finite.
    """
    num_outputs, num_inputs = weight.shape
    size = grid.group_size or num_inputs
    importance = gram.diagonal()
    order = torch.arange(num_inputs)
    if in_order_of_activation:
        order = torch.argsort(importance, descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], dampening)
    # Here a block contains whole groups, or a group contains whole blocks: then a group's numbers are up to date when
    # its first column is reached.
    has_later_groups = not in_order_of_activation and size < num_inputs
    block_size = max(size, BLOCK_SIZE // size * size) if has_later_groups else BLOCK_SIZE
    scales, zero_points = grid.fit(grid.groups(weight), grid.groups(importance[None]))
    rest, codes = weight[:, order].contiguous(), torch.empty(num_outputs, num_inputs)
    for start in range(0, num_inputs, block_size):
        end = min(start + block_size, num_inputs)
        block, errors = rest[:, start:end], torch.empty(num_outputs, end - start)
        for index in range(end - start):
            position = start + index
            group = int(order[position]) // size
            if has_later_groups and position % size == 0:
                there = slice(position, position + size)
                scales[:, group], zero_points[:, group] = grid.fit(rest[:, there], importance[there])
            column, scale, zero_point = block[:, index], scales[:, group], zero_points[:, group]
            code = grid.encode(column, scale, zero_point)
            codes[:, order[position]] = code
            error = (column - (code - zero_point) * scale) / factor[position, position]
            block[:, index:].addr_(error, factor[position, position:end], alpha=-1)
            errors[:, index] = error
        rest[:, end:].addmm_(errors, factor[start:end, end:], alpha=-1)
    return grid.matrix(codes, scales, zero_points)


def _inverse_factor(gram: Tensor, dampening: float) -> Tensor:
    """Return the upper triangular U with U' U = H^-1, where H is the Gram matrix with a dampened diagonal.

    Few calibration tokens, or inputs that depend on each other, leave H nearly singular. Then it is dampened more.
    """
    mean = gram.diagonal().mean()
    while bool(mean.isfinite()) and dampening <= MAX_DAMPENING:
        damped = gram.clone()
        damped.diagonal().add_(dampening * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                factor: Tensor = upper
                return factor
        dampening = max(10 * dampening, DAMPENING)
    raise ConfigError(
        "GPTQ cannot use what calibration measured: the inputs of a layer are not finite, or much too large for "
        "float32; check that the model answers sensibly, or choose --method rtn"
    )
