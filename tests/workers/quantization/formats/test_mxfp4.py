"""Claims about reading MXFP4, beside transformers' own dequantization of gpt-oss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from servekit.errors import ConfigError
from tests.workers.quantization.formats.packing import NAME, read_checked
from workers.quantization.formats.mxfp4 import Mxfp4

FORMAT = Mxfp4.from_config({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})


def make(num_experts: int = 2, num_outputs: int = 6, num_groups: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """Return the tensors of random experts."""
    generator = torch.Generator().manual_seed(seed)
    shape = num_experts, num_outputs, num_groups
    return {
        "_blocks": torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8),
        "_scales": torch.randint(0, 253, shape, generator=generator, dtype=torch.uint8),
    }


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 4), st.integers(0, 1000))
def test_experts_are_those_that_transformers_reads(
    num_experts: int, num_outputs: int, num_groups: int, seed: int
) -> None:
    tensors = make(num_experts, num_outputs, num_groups, seed)
    expected = convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"], dtype=torch.float32)
    assert FORMAT.check(tensors, NAME) == expected.shape == (num_experts, num_groups * 32, num_outputs)
    assert torch.equal(FORMAT.dequantize(tensors, NAME, torch.float32), expected)
    in_bfloat16 = FORMAT.dequantize(tensors, NAME, torch.bfloat16)
    assert in_bfloat16.dtype is torch.bfloat16 and torch.equal(in_bfloat16, expected.bfloat16())


def test_a_linear_layer_is_one_expert() -> None:
    tensors = make(num_experts=1)
    expected = convert_moe_packed_tensors(tensors["_blocks"], tensors["_scales"], dtype=torch.float32)[0].T
    alone = {suffix: tensor[0] for suffix, tensor in tensors.items()}
    assert torch.equal(read_checked(FORMAT, alone), expected)
    assert torch.equal(FORMAT.dequantize(alone, NAME, torch.float32), expected)
    assert FORMAT.read(alone, NAME).group_size == 32


@pytest.mark.parametrize("exponent", [253, 255])
def test_scales_that_no_number_can_have_are_refused(exponent: int) -> None:
    tensors = make()
    tensors["_scales"][1, 2, 1] = exponent
    with pytest.raises(ConfigError, match="not finite"):
        FORMAT.dequantize(tensors, NAME, torch.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"_scales": torch.zeros(2, 6, 2, dtype=torch.uint8)}, "must be uint8 [2, 6, 3]"),
        ({"_scales": torch.zeros(2, 6, 3)}, "_scales is float32"),
        ({"_blocks": torch.zeros(2, 6, 3, 8, dtype=torch.uint8)}, "[any, any, any, 16]"),
        ({"_blocks": torch.zeros(6, 16, dtype=torch.uint8)}, "[any, any, 16]"),
        ({"_blocks": torch.zeros(2, 6, 0, 16, dtype=torch.uint8)}, "[2, 6, 0, 16]"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused_in_a_sentence(change: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        FORMAT.check(make() | change, NAME)
    assert reason in refusal.value.message and NAME in refusal.value.message
