"""Claims about reading GPTQ, beside checkpoints that are packed code by code.

The layout is that of AutoGPTQ's QuantLinear.pack (auto_gptq/nn_modules/qlinear/qlinear_cuda.py) and of GPTQModel's
convert_gptq_v2_to_v1_format_module (gptqmodel/utils/model.py); https://danieldk.eu/GPTQ-Checkpoint-Format describes it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from servekit.errors import ConfigError
from tests.workers.quantization.formats.packing import NAME, dense, packed_across, packed_down, read_checked
from workers.quantization.formats.gptq import Gptq
from workers.quantization.quantized_tensor import stack_outputs

ONES = {4: 0x11111111, 8: 0x01010101}


def make(
    bits: int = 4,
    group_size: int = 16,
    num_groups: int = 2,
    num_outputs: int = 8,
    *,
    symmetric: bool = False,
    is_v2: bool = False,
    has_desc_act: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a random matrix, and the matrix."""
    generator = torch.Generator().manual_seed(seed)
    num_inputs = group_size * num_groups
    codes = torch.randint(1 << bits, (num_inputs, num_outputs), generator=generator)
    zero_points = torch.randint(1 << bits, (num_groups, num_outputs), generator=generator)
    if symmetric:
        zero_points = torch.full_like(zero_points, 1 << (bits - 1))
    scales = (torch.rand(num_groups, num_outputs, generator=generator) / 8).to(dtype)
    groups = torch.arange(num_inputs) // group_size
    if has_desc_act:
        groups = groups[torch.randperm(num_inputs, generator=generator)]
    tensors = {
        ".qweight": packed_down(codes, bits),
        ".qzeros": packed_across(zero_points, bits, subtract_from_each=0 if is_v2 else ONES[bits]),
        ".scales": scales,
        ".g_idx": groups.to(torch.int32),
    }
    return tensors, dense(codes, zero_points, scales, groups)


def format_of(**config: Any) -> Gptq:
    return Gptq.from_config({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False} | config)


@settings(deadline=None, max_examples=40)
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([16, 32]),
    num_groups=st.integers(1, 4),
    words_of_outputs=st.integers(1, 3),
    symmetric=st.booleans(),
    is_v2=st.booleans(),
    has_desc_act=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_each_number_is_the_one_that_was_packed(
    bits: int, group_size: int, num_groups: int, words_of_outputs: int, is_v2: bool, has_desc_act: bool, **variant: Any
) -> None:
    tensors, expected = make(
        bits, group_size, num_groups, words_of_outputs * 8, is_v2=is_v2, has_desc_act=has_desc_act, **variant
    )
    version = "gptq_v2" if is_v2 else "gptq"
    read = format_of(bits=bits, group_size=group_size, desc_act=has_desc_act, checkpoint_format=version)
    assert torch.equal(read_checked(read, tensors), expected)


def test_zero_points_of_version_1_are_one_more_than_what_is_stored() -> None:
    tensors, expected = make(symmetric=True)
    assert int(tensors[".qzeros"][0, 0]) == 0x77777777  # what every symmetric checkpoint of AutoGPTQ has
    assert torch.equal(read_checked(format_of(), tensors), expected)
    tensors, expected = make(symmetric=True, is_v2=True)
    assert torch.equal(read_checked(format_of(format="gptq_v2"), tensors), expected)


def test_symmetric_weights_have_no_offsets_and_four_bits_stay_as_they_are_packed() -> None:
    read = format_of().read(make(symmetric=True)[0], NAME)
    assert read.offsets is None and read.input_order is None
    assert read.codes.dtype is torch.uint8 and read.group_size == 16
    assert format_of().read(make()[0], NAME).offsets is not None


def test_one_group_for_all_inputs() -> None:
    tensors, expected = make(num_groups=1, group_size=48)
    read = format_of(group_size=-1)
    assert torch.equal(read_checked(read, tensors), expected)
    assert read.read(tensors, NAME).group_size == 48


def test_groups_in_order_need_no_gather() -> None:
    tensors, expected = make()
    without = {suffix: tensor for suffix, tensor in tensors.items() if suffix != ".g_idx"}
    zeros = tensors | {".g_idx": torch.zeros(32, dtype=torch.int32)}
    for read_from in (tensors, without, zeros):
        assert format_of().read(read_from, NAME).input_order is None
        assert torch.equal(read_checked(format_of(), read_from), expected)


def test_layers_with_the_same_order_of_inputs_become_one_matrix() -> None:
    read = format_of(desc_act=True)
    tensors, expected = make(has_desc_act=True)
    q = read.read(tensors, NAME)
    stacked = stack_outputs([q, read.read(tensors, NAME)])
    assert stacked is not None and torch.equal(stacked.dequantize(), torch.cat([expected, expected]))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"bits": 3}, "bits = 3, and servekit reads 4 or 8"),
        ({"bits": None}, "bits = None"),
        ({"bits": True}, "bits = True"),
        ({"group_size": 0}, "group_size = 0"),
        ({"group_size": 1 << 40}, "group_size = 1099511627776"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin', and servekit reads gptq or gptq_v2"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "(dynamic)"),
        ({"pack_dtype": "int16"}, "pack_dtype"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        format_of(**config)
    assert reason in refusal.value.message and "GPTQ" in refusal.value.message


def test_layers_that_are_left_unquantized_by_name_are_accepted() -> None:
    format_of(dynamic={"-:.*router.*": {}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({".g_idx": torch.full((32,), 2, dtype=torch.int32)}, "g_idx from 2 to 2 for 2 groups"),
        ({".g_idx": torch.tensor([-1] * 16 + [1] * 16, dtype=torch.int32)}, "g_idx from -1 to 1"),
        ({".g_idx": torch.tensor([0] * 17 + [1] * 15, dtype=torch.int32)}, "not of 16 inputs each"),
        ({".g_idx": torch.zeros(31, dtype=torch.int32)}, "must be int32 or int64 [32]"),
        ({".scales": torch.full((2, 8), torch.nan)}, "not finite"),
        ({".scales": torch.ones(3, 8)}, "must be float16 or bfloat16 or float32 [2, 8]"),
        ({".qzeros": torch.zeros(2, 2, dtype=torch.int32)}, ".qzeros is int32 [2, 2]"),
        ({".qweight": torch.zeros(4, 9, dtype=torch.int32)}, "9 outputs"),
        ({".qweight": torch.zeros(3, 8, dtype=torch.int32)}, "24 inputs, which groups of 16 do not divide"),
        ({".qweight": torch.zeros(4, 8)}, ".qweight is float32"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused_in_a_sentence(change: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_checked(format_of(desc_act=True), make(has_desc_act=True)[0] | change)
    assert reason in refusal.value.message and NAME in refusal.value.message
