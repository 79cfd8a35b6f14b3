"""Claims about quantized matrices: parts of one, and several side by side, stand for the same numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servekit.errors import ConfigError
from tests.support.quantized import random_two_levels
from workers.parallel.local_parameters import local_matrix
from workers.parallel.tensor_parallel_plan import TensorParallelPlan
from workers.quantization.quantized_tensor import (
    INT4_LEVELS,
    NF4_LEVELS,
    UINT4_LEVELS,
    QuantizedTensor,
    stack_outputs,
)
from workers.quantization.rounding import round_float8, round_int4, round_int8, round_nf4
from workers.quantization.two_level_scales import TwoLevelScales

torch.manual_seed(0)
DENSE = torch.randn(24, 64)
MATRICES = {
    "int8": round_int8(DENSE),
    "float8": round_float8(DENSE),
    "int4": round_int4(DENSE, 16),
    "nf4": round_nf4(DENSE, 16),
    "two levels": QuantizedTensor(
        torch.randint(0, 256, (24, 32), dtype=torch.uint8),
        random_two_levels(24, 4, 2),
        offsets=random_two_levels(24, 4, 2),
        levels=UINT4_LEVELS,
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_a_part_stands_for_its_part_of_the_numbers(name: str) -> None:
    matrix, rows = MATRICES[name], torch.tensor([3, 0, 17])
    assert torch.equal(matrix.take_outputs(rows).dequantize(), matrix.dequantize()[rows])
    part = matrix.take_inputs(16, 48)
    assert torch.equal(part.dequantize(), matrix.dequantize()[:, 16:48])
    assert part.codes.untyped_storage().nbytes() == part.codes.nbytes, "a part does not keep the whole in memory"


@pytest.mark.parametrize("name", MATRICES)
def test_matrices_side_by_side_stand_for_the_same_numbers(name: str) -> None:
    matrix = MATRICES[name]
    both = stack_outputs([matrix, matrix.take_outputs(torch.arange(5))])
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([matrix.dequantize(), matrix.dequantize()[:5]]))


def test_matrices_that_differ_are_not_put_side_by_side() -> None:
    assert stack_outputs([MATRICES["int4"], MATRICES["nf4"]]) is None
    assert stack_outputs([MATRICES["int4"], MATRICES["int8"]]) is None
    assert stack_outputs([MATRICES["int4"], round_int4(DENSE, 32)]) is None


def test_scales_of_two_levels_stay_so_unless_a_cut_divides_a_super_block() -> None:
    matrix = MATRICES["two levels"]
    half, middle = matrix.take_inputs(32, 64), matrix.take_inputs(16, 48)
    assert isinstance(half.scales, TwoLevelScales) and isinstance(half.offsets, TwoLevelScales)
    assert torch.equal(half.dequantize(), matrix.dequantize()[:, 32:])
    assert isinstance(middle.scales, torch.Tensor) and isinstance(middle.offsets, torch.Tensor)


@pytest.mark.parametrize("name", ["int4", "nf4", "two levels"])
def test_with_plain_scales_the_numbers_are_the_same(name: str) -> None:
    matrix = MATRICES[name]
    plain = matrix.with_plain_scales()
    assert isinstance(plain.scales, torch.Tensor)
    assert plain.levels == (NF4_LEVELS if name == "nf4" else INT4_LEVELS)
    assert torch.allclose(plain.dequantize(), matrix.dequantize(), rtol=1e-5, atol=1e-5)


def test_a_cut_through_a_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="whole groups of 16"):
        MATRICES["int4"].take_inputs(0, 24)
    with pytest.raises(ValueError, match="whole bytes"):
        QuantizedTensor(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2, 1), levels=NF4_LEVELS).take_inputs(0, 3)


PLAN = TensorParallelPlan(
    "LlamaForCausalLM",
    {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.mlp.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    num_heads=6,
    num_kv_heads=2,
    size=3,
)


def parts_of(name: str, matrix: QuantizedTensor, size: int = 3) -> list[torch.Tensor]:
    """Return each rank's numbers of a layer's matrix."""

    def share(rank: int, total: int) -> slice:
        width = -(-total // size)
        return slice(min(rank * width, total), min((rank + 1) * width, total))

    found = []
    for rank in range(size):
        group: Any = SimpleNamespace(rank=rank, size=size, share=lambda total, rank=rank: share(rank, total))
        found.append(local_matrix(matrix, f"model.layers.1.{name}", PLAN, group).dequantize())
    return found


def test_ranks_take_the_parts_that_the_plan_gives_them() -> None:
    matrix = MATRICES["int8"]
    numbers = matrix.dequantize()
    assert torch.equal(torch.cat(parts_of("self_attn.q_proj", matrix)), numbers)
    # The first rank's two queries use the first head of keys, the second rank's both, the third's the second.
    assert [len(part) for part in parts_of("self_attn.k_proj", matrix)] == [12, 24, 12]
    assert torch.equal(parts_of("self_attn.k_proj", matrix)[2], numbers[12:])
    gates, ups = zip(*[part.chunk(2) for part in parts_of("mlp.gate_up_proj", matrix)], strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), numbers)
    assert torch.equal(torch.cat(parts_of("mlp.down_proj", matrix), dim=1), numbers)
    assert all(torch.equal(part, numbers) for part in parts_of("mlp.router", matrix))


def test_a_rank_that_would_cut_a_group_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj cannot be divided among 3 ranks"):
        parts_of("mlp.down_proj", MATRICES["int4"])
