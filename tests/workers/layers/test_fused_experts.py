"""Experts whose tokens are grouped compute what transformers' do, in C and by oneDNN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.csrc.build import c_library
from workers.layers.cpu_ops import CpuOps
from workers.layers.cpu_weight import CpuWeight
from workers.layers.fused_experts import FusedExperts
from workers.layers.layer_families import family_of
from workers.layers.layer_replacement import make_cpu_method
from workers.layers.linear import PackedWeight, can_pack
from workers.layers.skinny_gemm import SkinnyGemmWeight

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
LARGE = 30.0  # gpt-oss limits what it gates


def experts_of(name: str, directory: Path, dtype: torch.dtype, in_c: bool) -> tuple[FusedExperts, Any]:
    """Return the experts of a layer, and transformers' MLP in float32 with the same weights."""
    model_type, sizes = ARCHITECTURES[name]
    model = make_model(directory, model_type, {**sizes, "hidden_size": 64, "intermediate_size": 96})
    layer: Any = model.model.layers[1].to(dtype)
    family, library = family_of(layer), c_library(str(dtype).removeprefix("torch."))
    assert family is not None and family.experts is not None and library is not None
    method = make_cpu_method(library) if in_c else lambda weight, bias: PackedWeight(weight, bias)
    if in_c and not isinstance(method(torch.randn(64, 64).to(dtype), None), SkinnyGemmWeight | CpuWeight):
        pytest.skip("this processor lacks the instructions, or oneDNN has a layout that the C code cannot read")
    fused = FusedExperts(layer, family.experts, method, CpuOps(library, dtype))
    assert (fused.address is not None) == in_c
    return fused, layer.mlp.float()


def expected_of(mlp: Any, inputs: Tensor, x: Tensor) -> Tensor:
    with torch.inference_mode():
        output = mlp(inputs.float()[None])
    return x.float() + (output[0] if isinstance(output, tuple) else output)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_experts_compute_what_those_of_transformers_do(
    name: str, in_c: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    fused, mlp = experts_of(name, tmp_path, dtype, in_c)
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    for num_tokens in (1, 2, 7, 20, 100):
        inputs = torch.randn(num_tokens, 64).mul(LARGE if num_tokens == 7 else 1.0).to(dtype)
        x = torch.randn(num_tokens, 64).to(dtype)
        expected = expected_of(mlp, inputs, x)
        output = fused.add(inputs, x.clone())
        assert output.dtype is dtype
        assert (output.float() - expected).norm() <= tolerance * expected.norm(), num_tokens


def test_an_expert_of_more_tokens_than_c_multiplies_at_once(tmp_path: Path) -> None:
    fused, mlp = experts_of("qwen3_moe", tmp_path, torch.float32, in_c=True)
    assert fused._in_c is not None
    num_tokens = fused._in_c.struct.max_rows + 12
    inputs = torch.randn(1, 64).repeat(num_tokens, 1)  # all of them have the same experts
    x = torch.randn(num_tokens, 64)
    assert fused._in_c.has_small_groups(num_tokens), "this is not computed in C"
    torch.testing.assert_close(fused.add(inputs, x.clone()), expected_of(mlp, inputs, x), rtol=1e-5, atol=1e-5)
    assert fused.add(inputs[:0], x[:0]).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe"])  # with shares of the chosen experts, and of all
def test_what_is_not_finite_spoils_its_own_token_only(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    fused, _ = experts_of(name, tmp_path, dtype, in_c=True)
    inputs, x = torch.randn(12, 64).to(dtype), torch.randn(12, 64).to(dtype)
    expected = fused.add(inputs, x.clone())
    spoiled = torch.arange(12) % 3 != 1
    for value in (torch.nan, torch.inf):
        broken = inputs.clone()
        broken[spoiled] = value
        output = fused.add(broken, x.clone())
        assert bool(output[spoiled].isnan().all())
        torch.testing.assert_close(output[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("normalizes", [False, True])
def test_a_token_without_scores_has_as_many_different_experts_as_any_other(normalizes: bool, tmp_path: Path) -> None:
    fused, _ = experts_of("qwen3_moe", tmp_path, torch.float32, in_c=True)
    assert fused._in_c is not None
    fused._in_c.struct.normalizes = normalizes
    fused._router[2] = torch.nan  # so all tokens have the sum of scores that is NaN
    output = fused.add(torch.randn(3, 64), torch.randn(3, 64))
    assert bool(output.isnan().all())
