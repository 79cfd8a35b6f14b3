"""Claims about rounding: how close the numbers stay, and that what a matrix holds cannot break it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.quantization.at_load import QuantizedAtLoad
from workers.quantization.quantized_tensor import NF4_LEVELS, QuantizedTensor
from workers.quantization.rounding import round_float8, round_int4, round_int8, round_nf4


def error(matrix: Tensor, rounded: QuantizedTensor) -> float:
    """Return the root of the squared error's share in the matrix's squares."""
    return float((rounded.dequantize() - matrix.float()).norm() / matrix.float().norm())


def plainly_rounded(matrix: Tensor, group_size: int) -> Tensor:
    """Round to sixteen levels between each group's ends, the textbook's way."""
    groups = matrix.float().unflatten(1, (-1, group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    return (((groups - low) / scale).round() * scale + low).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_within_half_a_step_everywhere(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(40, 96).to(dtype) * torch.logspace(-3, 3, 40)[:, None].to(dtype)
    rounded = round_int8(matrix)
    distance = (rounded.dequantize() - matrix.float()).abs()
    assert bool((distance <= rounded.scales * 0.5001).all())
    assert (rounded.encoding, rounded.activations, rounded.group_size) == ("int8", "int8", 96)


def test_float8_is_within_a_sixteenth_of_each_number() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(40, 96)
    rounded = round_float8(matrix)
    large = matrix.abs() > matrix.abs().amax(1, keepdim=True) / 1000  # smaller ones are subnormal
    distance = (rounded.dequantize() - matrix).abs() / matrix.abs()
    assert float(distance[large].max()) <= 1 / 16
    assert (rounded.encoding, rounded.activations) == ("float8", "float8")


@pytest.mark.parametrize("group_size", [16, 32, 64, 128])
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_the_search_over_clipping_is_better_than_the_whole_range(group_size: int, tails: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 256) if tails == "normal" else torch.distributions.StudentT(4.0).sample((64, 256))
    rounded = round_int4(matrix, group_size)
    plain = float((plainly_rounded(matrix, group_size) - matrix).norm() / matrix.norm())
    assert error(matrix, rounded) < 0.97 * plain
    assert rounded.group_size == group_size and rounded.scales.dtype is torch.bfloat16
    # Four bits cannot be better than the best sixteen levels for a normal distribution (Max, 1960): 0.0095 of its
    # variance, at equal distances 0.0115. Groups of a few numbers have narrower ranges.
    if tails == "normal" and group_size == 128:
        assert 0.09 < error(matrix, rounded) < 0.115


def test_nf4_numbers_are_its_levels_times_a_scale() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(16, 128)
    rounded = round_nf4(matrix, 64)
    scales = rounded.scales.float()[..., None]
    found, wanted = (numbers.unflatten(1, (2, 64)) / scales for numbers in (rounded.dequantize(), matrix))
    levels = torch.tensor(NF4_LEVELS)
    assert float((found[..., None] - levels).abs().amin(-1).max()) < 1e-6
    torch.testing.assert_close((wanted - found).abs(), (wanted[..., None] - levels).abs().amin(-1), rtol=0, atol=1e-6)


ROUND: dict[str, Callable[[Tensor], QuantizedTensor]] = {
    "int8": round_int8,
    "fp8": round_float8,
    "int4": lambda matrix: round_int4(matrix, 16),
    "nf4": lambda matrix: round_nf4(matrix, 16),
}


@pytest.mark.parametrize("name", ROUND)
def test_zeros_and_constants_stay_what_they_are(name: str) -> None:
    matrix = torch.zeros(4, 32)
    matrix[1] = 3.0
    matrix[2, 5] = -2.0
    rounded = ROUND[name](matrix).dequantize()
    assert torch.equal(rounded[[0, 3]], matrix[[0, 3]])
    torch.testing.assert_close(rounded[1:3], matrix[1:3], rtol=0.01, atol=0.15)


@pytest.mark.parametrize("name", ROUND)
@pytest.mark.parametrize("value", [1e-38, 1e-15, 1e15])
def test_numbers_of_any_size_are_rounded_alike(name: str, value: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(4, 32)
    tiny = ROUND[name](matrix * value).dequantize()
    if value > 1e-30:
        torch.testing.assert_close(tiny / value, ROUND[name](matrix).dequantize(), rtol=0.02, atol=0.02)
    assert bool(tiny.isfinite().all())


@pytest.mark.parametrize("kind", ["int8", "int4", "w4a8", "fp8", "nf4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(kind: str, value: float) -> None:
    matrix = torch.randn(8, 64)
    matrix[3, 40] = value
    with pytest.raises(ConfigError, match="not finite"):
        QuantizedAtLoad(kind).read({".weight": matrix}, "model.layers.0.mlp.up_proj")


def test_a_matrix_is_rounded_a_few_rows_at_a_time() -> None:
    """The largest temporary tensor does not grow with the matrix."""
    from workers.quantization import rounding

    sizes: list[int] = []
    original = rounding._chunks

    def noted(matrix: Tensor):  # type: ignore[no-untyped-def]
        for rows, numbers in original(matrix):
            sizes.append(numbers.numel())
            yield rows, numbers

    matrix = torch.randn(3000, 512)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "_chunks", noted)
        whole = round_int4(matrix, 64)
    assert max(sizes) <= rounding.CHUNK_NUMBERS and len(sizes) > 2
    assert torch.equal(whole.codes[:10], round_int4(matrix[:10], 64).codes)


def test_the_head_gets_eight_bits_and_routers_stay_as_they_are() -> None:
    weight_format = QuantizedAtLoad("int4")
    tensors = {".weight": torch.randn(32, 64)}
    assert weight_format.read(tensors, "model.layers.3.mlp.up_proj").encoding == "int4"
    assert weight_format.read(tensors, "lm_head").encoding == "int8"
    assert weight_format.takes("model.layers.3.mlp.up_proj") and not weight_format.takes("model.layers.3.mlp.gate")
    odd = {".weight": torch.randn(32, 50)}  # which have no groups of sixteen or more
    assert weight_format.read(odd, "model.layers.3.mlp.up_proj").encoding == "int8"
    narrow = weight_format.read({".weight": torch.randn(32, 48)}, "model.layers.3.mlp.up_proj")
    assert (narrow.encoding, narrow.group_size) == ("int4", 16)


def test_a_group_size_that_has_no_use_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization_group_size = 64: int8 has a scale for each row"):
        QuantizedAtLoad("int8", 64)
    assert QuantizedAtLoad("int4", 128).name == "int4, groups of 128"
