"""Claims about GPTQ. The outside truth is the paper's iteration, written down with the inverse Hessian itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.methods.gptq import DAMPENING, round_gptq
from workers.quantization.methods.grid import Grid
from workers.quantization.methods.input_statistics import squared_error
from workers.quantization.methods.rtn import round_to_nearest


def correlated_inputs(num_tokens: int, num_inputs: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    mixed = torch.randn(num_tokens, num_inputs) @ torch.randn(num_inputs, num_inputs)
    return mixed * torch.logspace(-1, 1, num_inputs)[torch.randperm(num_inputs)]


def naive_gptq(weight: Tensor, gram: Tensor, grid: Grid, dampening: float, in_order: bool) -> Tensor:
    """Optimal Brain Quantization with one order for all rows: equations 2 and 3 of arXiv 2210.17323, in float64.

    Column by column, with the inverse of H, from which each column is removed by a step of Gaussian elimination.
    """
    num_inputs = weight.shape[1]
    size = grid.group_size or num_inputs
    importance = gram.diagonal()
    order = importance.argsort(descending=True, stable=True).tolist() if in_order else list(range(num_inputs))
    hessian = gram.double() + dampening * float(importance.mean()) * torch.eye(num_inputs, dtype=torch.float64)
    inverse = torch.linalg.inv(hessian)
    rest, rounded = weight.double().clone(), torch.empty_like(weight)
    fitted: dict[int, tuple[Tensor, Tensor]] = {}
    for done, column in enumerate(order):
        group = column // size
        there = slice(group * size, (group + 1) * size)
        if group not in fitted:
            numbers = weight if in_order else rest.float()
            fitted[group] = grid.fit(numbers[:, there], importance[there])
        scales, zero_points = fitted[group]
        rounded[:, column] = grid.round(rest[:, column].float(), scales, zero_points)
        error = (rest[:, column] - rounded[:, column].double()) / inverse[column, column]
        left = order[done:]
        rest[:, left] -= error[:, None] * inverse[column, left]
        inverse = inverse - inverse[:, [column]] * inverse[[column]] / inverse[column, column]
    return rounded


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "grid",
    [
        Grid(4),
        Grid(4, group_size=16),
        Grid(4, group_size=16, is_symmetric=False),
        Grid(4, group_size=64, is_symmetric=False),
        Grid(8),
        Grid(8, is_float=True),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_papers_iteration(grid: Grid, in_order: bool) -> None:
    num_inputs = 320  # more than two blocks, the last of them cut off
    inputs, weight = correlated_inputs(2000, num_inputs), torch.randn(8, num_inputs)
    gram = inputs.T @ inputs
    found = round_gptq(weight, gram, grid, dampening=0.05, in_order_of_activation=in_order).dequantize()
    expected = naive_gptq(weight, gram, grid, 0.05, in_order)
    # A number that lies between two codes may be rounded otherwise in float32, and changes what comes after it.
    assert float(torch.isclose(found, expected, rtol=1e-4, atol=1e-4).float().mean()) > 0.98
    best = squared_error(expected - weight, gram)
    assert squared_error(found - weight, gram) == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_the_error_of_outputs_is_less_than_that_of_rounding_to_nearest(num_bits: int, in_order: bool) -> None:
    grid = Grid(num_bits, group_size=32, is_symmetric=False)
    samples, weight = correlated_inputs(3000, 128), torch.randn(48, 128)
    inputs, others = samples[:2000], samples[2000:]
    rounded = round_gptq(weight, inputs.T @ inputs, grid, in_order_of_activation=in_order)
    nearest = round_to_nearest(weight, grid)
    for held_out in (inputs, others):
        errors = [float(((m.dequantize() - weight) @ held_out.T).norm()) for m in (rounded, nearest)]
        assert errors[0] < 0.9 * errors[1]


def test_inputs_that_are_always_zero_or_depend_on_each_other_do_no_harm() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(10, 64)  # fewer than there are columns
    inputs[:, 5] = 0.0
    inputs[:, 9] = inputs[:, 8]
    weight = torch.randn(16, 64)
    for dampening in (0.0, DAMPENING):
        rounded = round_gptq(weight, inputs.T @ inputs, Grid(4, group_size=16), dampening=dampening).dequantize()
        assert bool(rounded.isfinite().all())
        # No input tells how a number should be rounded, so it stays near.
        assert float((rounded[:, 5] - weight[:, 5]).abs().max()) < 1.0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    gram = torch.eye(32)
    gram[3, 3] = value
    with pytest.raises(ConfigError, match="not finite"):
        round_gptq(torch.randn(4, 32), gram, Grid(4, group_size=16))
