"""Claims about reading FP8, beside transformers' own dequantization and the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from servekit.errors import ConfigError
from tests.workers.quantization.formats.packing import NAME, read_checked
from workers.quantization.formats.fp8 import Fp8


def make(
    num_outputs: int = 48, num_inputs: int = 64, block: tuple[int, int] = (32, 32), seed: int = 0
) -> dict[str, Tensor]:
    """Return the tensors of a random matrix with a scale for each block; the last ones are cut off."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_outputs // block[0]), -(-num_inputs // block[1])
    return {
        ".weight": torch.randn(num_outputs, num_inputs, generator=generator).to(torch.float8_e4m3fn),
        ".weight_scale_inv": torch.rand(num_blocks, generator=generator),
    }


def format_of(**config: Any) -> Fp8:
    return Fp8.from_config({"quant_method": "fp8", "activation_scheme": "dynamic"} | config)


@settings(deadline=None, max_examples=30)
@given(
    num_outputs=st.integers(1, 300),
    sixteens_of_inputs=st.integers(1, 20),
    block=st.sampled_from([(128, 128), (32, 64), (1, 32), (16, 16)]),
    seed=st.integers(0, 1000),
)
def test_each_block_has_its_scale_also_where_the_matrix_ends_within_it(
    num_outputs: int, sixteens_of_inputs: int, block: tuple[int, int], seed: int
) -> None:
    tensors = make(num_outputs, 16 * sixteens_of_inputs, block, seed)
    expected = _dequantize_fp8_weight(tensors[".weight"], tensors[".weight_scale_inv"], list(block), torch.float32)
    read = format_of(weight_block_size=list(block))
    assert torch.equal(read_checked(read, tensors), expected)
    assert read.read(tensors, NAME).codes.data_ptr() == tensors[".weight"].data_ptr()


def test_scales_that_are_powers_of_two_are_read_in_eight_bits() -> None:
    tensors = make()
    powers = torch.randint(-3, 4, (2, 2)).float().exp2()
    read = format_of(weight_block_size=[32, 32], scale_fmt="ue8m0")
    expected = read_checked(read, tensors | {".weight_scale_inv": powers})
    found = read_checked(read, tensors | {".weight_scale_inv": powers.to(torch.float8_e8m0fnu)})
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(48, 1), (48,)])
def test_a_scale_for_each_row(shape: tuple[int, ...]) -> None:
    weight, scales = make()[".weight"], torch.rand(shape)
    read = Fp8.from_config({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": []})
    tensors = {".weight": weight, ".weight_scale": scales, ".input_scale_ub": torch.tensor([1200.0])}
    assert torch.equal(read_checked(read, tensors), weight.float() * scales.reshape(48, 1))


@pytest.mark.parametrize("suffix", [".weight_scale", ".weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_for_the_matrix_with_a_static_scale_of_activations(suffix: str, shape: tuple[int, ...]) -> None:
    weight = make()[".weight"]
    tensors = {".weight": weight, suffix: torch.full(shape, 0.25), ".input_scale": torch.tensor(3.0)}
    read = format_of(activation_scheme="static", ignored_layers=["lm_head"])
    assert torch.equal(read_checked(read, tensors), weight.float() / 4)
    assert read.read(tensors, NAME).scales.shape == (48, 1)
    assert read.read(tensors, NAME).activations == "float8"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"weight_block_size": [128]}, "weight_block_size = [128]"),
        ({"weight_block_size": [0, 0]}, "weight_block_size = [0, 0]"),
        ({"weight_block_size": "128"}, "weight_block_size = '128'"),
        ({"weight_block_size": [128, 1]}, "weight_block_size = [128, 1]"),
        ({"activation_scheme": "none"}, "activation_scheme = 'none', and servekit reads dynamic or static"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        format_of(**config)
    assert reason in refusal.value.message and "FP8" in refusal.value.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({".weight_scale_inv": torch.full((2, 2), -torch.inf)}, "not finite"),
        ({".weight_scale_inv": torch.full((2, 2), torch.nan).to(torch.float8_e8m0fnu)}, "not finite"),
        ({".weight_scale_inv": torch.ones(2, 3)}, "[2, 2]"),
        ({".weight_scale_inv": torch.tensor(1.0)}, "[2, 2]"),
        ({".weight_scale": torch.ones(48, 1)}, "both .weight_scale and .weight_scale_inv"),
        ({".weight": torch.zeros(48, 64, dtype=torch.float8_e5m2)}, "float8_e5m2"),
        (
            {".weight": torch.zeros(48, 63, dtype=torch.float8_e4m3fn)},
            "63 inputs and blocks of 32, so only 1 have the same scale, and the limit is 16",
        ),
    ],
)
def test_tensors_that_contradict_each_other_are_refused_in_a_sentence(change: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_checked(format_of(weight_block_size=[32, 32]), make() | change)
    assert reason in refusal.value.message and NAME in refusal.value.message
