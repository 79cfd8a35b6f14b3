"""Claims about reading AWQ, beside checkpoints that are packed code by code.

The layout is that of AutoAWQ's WQLinear_GEMM.from_linear (awq/modules/linear/gemm.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from servekit.errors import ConfigError
from tests.workers.quantization.formats.packing import NAME, dense, packed_across, read_checked
from workers.quantization.formats.awq import Awq

ORDER_MAP = (0, 2, 4, 6, 1, 3, 5, 7)


def make(
    group_size: int = 16,
    num_groups: int = 2,
    num_outputs: int = 16,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tensors of a random matrix, and the matrix."""
    generator = torch.Generator().manual_seed(seed)
    num_inputs = group_size * num_groups
    codes = torch.randint(16, (num_inputs, num_outputs), generator=generator)
    zero_points = torch.randint(16, (num_groups, num_outputs), generator=generator)
    scales = (torch.rand(num_groups, num_outputs, generator=generator) / 8).to(dtype)
    tensors = {
        ".qweight": packed_across(codes, 4, ORDER_MAP),
        ".qzeros": packed_across(zero_points, 4, ORDER_MAP),
        ".scales": scales,
    }
    return tensors, dense(codes, zero_points, scales, torch.arange(num_inputs) // group_size)


def format_of(**config: Any) -> Awq:
    known = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
    return Awq.from_config(known | config)


@settings(deadline=None, max_examples=30)
@given(
    group_size=st.sampled_from([16, 32]),
    num_groups=st.integers(1, 4),
    words_of_outputs=st.integers(1, 4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_each_number_is_the_one_that_was_packed(
    group_size: int, num_groups: int, words_of_outputs: int, dtype: torch.dtype, seed: int
) -> None:
    tensors, expected = make(group_size, num_groups, words_of_outputs * 8, dtype, seed)
    assert torch.equal(read_checked(format_of(group_size=group_size), tensors), expected)
    if num_groups == 1:
        assert torch.equal(read_checked(format_of(group_size=-1), tensors), expected)


def test_names_of_fields_in_the_file_of_autoawq_are_known() -> None:
    tensors, expected = make()
    read = Awq.from_config({"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"})
    assert torch.equal(read_checked(read, tensors), expected)


def test_codes_are_kept_as_two_in_a_byte_that_one_output_follows_the_other() -> None:
    read = format_of().read(make()[0], NAME)
    assert read.codes.dtype is torch.uint8 and read.codes.is_contiguous()
    assert read.scales.is_contiguous() and read.group_size == 16


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"bits": 3}, "bits = 3, and servekit reads 4"),
        ({"version": "gemv"}, "version = 'gemv', and servekit reads gemm"),
        ({"version": "marlin"}, "version = 'marlin'"),
        ({"zero_point": False}, "zero_point = False"),
        ({"group_size": 7}, "group_size = 7"),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        format_of(**config)
    assert reason in refusal.value.message and "AWQ" in refusal.value.message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({".scales": torch.full((2, 16), torch.inf)}, "not finite"),
        ({".scales": torch.ones(2, 8)}, "[2, 16]"),
        ({".qzeros": torch.zeros(1, 2, dtype=torch.int32)}, "must be int32 [2, 2]"),
        ({".qweight": torch.zeros(33, 2, dtype=torch.int32)}, "33 inputs, which groups of 16 do not divide"),
        ({".qweight": torch.zeros(32, 2, dtype=torch.int64)}, ".qweight is int64"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused_in_a_sentence(change: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_checked(format_of(), make()[0] | change)
    assert reason in refusal.value.message and NAME in refusal.value.message
