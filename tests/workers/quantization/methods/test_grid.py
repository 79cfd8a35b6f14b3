"""Claims about grids and rounding to the nearest code. Numbers are compared with a loop over all codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.quantization.methods.grid import Grid
from workers.quantization.methods.rtn import round_to_nearest

GRIDS = {
    "w4": Grid(4, group_size=16),
    "w4_asymmetric": Grid(4, group_size=16, is_symmetric=False),
    "w4_bfloat16": Grid(4, group_size=16, is_symmetric=False, scale_dtype=torch.bfloat16),
    "w8": Grid(8),
    "w8_asymmetric": Grid(8, group_size=16, is_symmetric=False),
    "fp8": Grid(8, is_float=True),
}


@pytest.mark.parametrize("name", GRIDS)
def test_each_number_gets_the_nearest_code(name: str) -> None:
    torch.manual_seed(0)
    grid, matrix = GRIDS[name], torch.randn(6, 32)
    rounded = round_to_nearest(matrix, grid)
    scales = rounded.scales.float()
    zero_points = torch.zeros_like(scales) if rounded.zero_points is None else rounded.zero_points.float()
    if grid.is_float:
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = codes[codes.isfinite()]
    else:
        codes = torch.arange(grid.low, grid.high + 1)
    levels = (codes - zero_points[..., None]) * scales[..., None]  # [row, group, code]
    groups = grid.groups(matrix)
    nearest = (groups[..., None] - levels[:, :, None]).abs().amin(dim=-1)
    torch.testing.assert_close((grid.groups(rounded.dequantize()) - groups).abs(), nearest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GRIDS)
def test_a_clipped_range_is_taken_only_if_its_error_is_less(name: str) -> None:
    torch.manual_seed(0)
    grid, groups = GRIDS[name], torch.distributions.StudentT(4.0).sample((8, 4, 64))

    def error(scales: Tensor, zero_points: Tensor) -> Tensor:
        return (grid.round(groups, scales[..., None], zero_points[..., None]) - groups).square().sum(-1)

    found, whole = error(*grid.fit(groups)), error(*grid.cover(groups))
    assert bool((found <= whole).all())
    assert bool((found < whole).any()) == (grid.num_bits == 4)


def test_important_numbers_get_the_smaller_error() -> None:
    torch.manual_seed(0)
    grid, groups = Grid(4, group_size=16), torch.randn(200, 1, 16)
    groups[..., 0] *= 3  # the range is that of the first number
    importance = torch.ones(16)
    importance[0] = 100.0
    errors = {}
    for name, weights in {"alike": None, "first": importance}.items():
        scales, zero_points = grid.fit(groups, weights)
        errors[name] = (grid.round(groups, scales[..., None], zero_points[..., None]) - groups).square().mean((0, 1))
    assert float(errors["first"][0]) < 0.5 * float(errors["alike"][0])
    assert float(errors["first"][1:].mean()) > float(errors["alike"][1:].mean())


@pytest.mark.parametrize("name", GRIDS)
def test_zeros_and_constants_stay_what_they_are(name: str) -> None:
    matrix = torch.zeros(3, 32)
    matrix[1], matrix[2] = 3.0, -2.0
    rounded = round_to_nearest(matrix, GRIDS[name]).dequantize()
    assert torch.equal(rounded[0], matrix[0])
    torch.testing.assert_close(rounded[1:], matrix[1:], rtol=0.08, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_codes_are_computed_with_the_scales_as_they_are_stored(dtype: torch.dtype) -> None:
    """Otherwise the scale's own rounding would add to the error of every number."""
    torch.manual_seed(0)
    grid, matrix = Grid(8, scale_dtype=dtype), torch.randn(20, 400)
    rounded = round_to_nearest(matrix, grid)
    assert rounded.scales.dtype is dtype
    distance = (rounded.dequantize() - matrix).abs() / rounded.scales.float()
    largest = matrix.abs().amax(1, keepdim=True)
    assert float(distance[matrix.abs() < 0.99 * largest].max()) <= 0.501


def test_numbers_too_small_for_the_type_of_scales_become_zero() -> None:
    rounded = round_to_nearest(torch.full((2, 16), 1e-9), Grid(4, group_size=16, scale_dtype=torch.float16))
    assert bool((rounded.dequantize() == 0).all())
