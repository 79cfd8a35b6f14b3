"""Claims about AWQ's scales and its clipping, checked with the inputs themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.quantization.methods.awq import round_clipped, search_scales
from workers.quantization.methods.grid import Grid
from workers.quantization.methods.input_statistics import InputStatistics, squared_error
from workers.quantization.methods.rtn import round_to_nearest

GRID = Grid(4, group_size=32, is_symmetric=False)


def inputs_with_outliers(num_tokens: int, num_inputs: int) -> Tensor:
    """As language models have them: a few inputs are ten times as large as the others."""
    inputs = torch.randn(num_tokens, num_inputs)
    inputs[:, ::16] *= 10.0
    return inputs


def measured(*parts: Tensor) -> InputStatistics:
    statistics = InputStatistics(parts[0].shape[-1])
    for part in parts:
        statistics.add(part)
    return statistics


def test_statistics_are_those_of_all_inputs() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(3, 50, 32)
    statistics = measured(inputs[:1], inputs[1:])
    flat = inputs.flatten(0, 1)
    torch.testing.assert_close(statistics.gram, flat.T @ flat)
    torch.testing.assert_close(statistics.mean_magnitude, flat.abs().mean(0))
    assert statistics.num_tokens == 150
    difference = torch.randn(7, 32)
    torch.testing.assert_close(
        squared_error(difference, statistics.gram), float((flat @ difference.T).square().sum()), rtol=1e-4, atol=0
    )
    scales = torch.rand(32) + 0.5
    statistics.divide(scales)
    torch.testing.assert_close(statistics.gram, (flat / scales).T @ (flat / scales))
    torch.testing.assert_close(statistics.mean_magnitude, (flat / scales).abs().mean(0))


def test_scales_make_the_error_of_outputs_less_if_some_inputs_are_large() -> None:
    torch.manual_seed(0)
    inputs, weights = inputs_with_outliers(1000, 128), [torch.randn(48, 128), torch.randn(16, 128)]
    scales = search_scales(weights, measured(inputs), [GRID, GRID])
    others = inputs_with_outliers(1000, 128)
    assert float(scales[::16].mean()) > 1.5 * float(scales.median())
    for weight in weights:
        plain = round_to_nearest(weight, GRID).dequantize() - weight
        scaled = round_to_nearest(weight * scales, GRID).dequantize() / scales - weight
        assert float((scaled @ others.T).norm()) < 0.9 * float((plain @ others.T).norm())


def test_scales_are_ones_if_all_inputs_are_alike() -> None:
    torch.manual_seed(0)
    scales = search_scales([torch.randn(48, 128)], measured(torch.randn(4000, 128)), [GRID])
    assert float((scales - 1).abs().max()) < 0.1


def test_an_input_that_is_always_zero_has_a_scale() -> None:
    torch.manual_seed(0)
    inputs = inputs_with_outliers(100, 64)
    inputs[:, 3] = 0.0
    scales = search_scales([torch.randn(8, 64)], measured(inputs), [GRID])
    assert bool((scales.isfinite() & (scales > 0)).all())


def test_clipping_by_the_outputs_is_better_than_by_the_weights() -> None:
    torch.manual_seed(0)
    inputs, weight = inputs_with_outliers(2000, 128), torch.distributions.StudentT(5.0).sample((64, 128))
    gram = measured(inputs).gram
    clipped, nearest = round_clipped(weight, gram, GRID), round_to_nearest(weight, GRID)
    assert squared_error(clipped.dequantize() - weight, gram) < squared_error(nearest.dequantize() - weight, gram)


def test_each_group_is_clipped_for_its_own_inputs() -> None:
    """A group's error is that of the products with its own inputs, also where groups are not alike."""
    torch.manual_seed(0)
    inputs, weight = inputs_with_outliers(500, 64), torch.randn(4, 64)
    rounded = round_clipped(weight, measured(inputs).gram, GRID)
    numbers = rounded.dequantize()
    for group in range(2):
        there = slice(32 * group, 32 * group + 32)
        alone = round_clipped(weight[:, there], measured(inputs[:, there]).gram, GRID)
        torch.testing.assert_close(numbers[:, there], alone.dequantize())
