"""A decoder with quantized weights: one call of C computes what the layers compute, and what dequantized weights do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.inprocess import InProcessEngine
from tests.support.quantized_models import make_quantized_model
from tests.support.tiny_models import WIDE_ARCHITECTURES, make_model
from workers.csrc.build import c_library
from workers.layers.cpu_decoder import CpuDecoder
from workers.layers.linear import SideBySideWeight, Weight, can_pack
from workers.layers.quantized_gemm import QuantizedGemm
from workers.layers.quantized_linear import DequantizingWeight
from workers.layers.skinny_gemm import SkinnyGemm
from workers.loading.model_manager import ModelManager
from workers.quantization.quantized_tensor import Activations, QuantizedTensor, pack_nibbles

TOKEN_IDS = tuple(range(1, 73))
SIZES = {"hidden_size": 96}  # with those of the wide models, all sizes are multiples of a group


def rounded(weight: Tensor, encoding: str, activations: Activations, group_size: int = 32) -> QuantizedTensor:
    """Return the weight rounded to the nearest codes."""
    groups = weight.float().unflatten(1, (-1, group_size))
    limit = 7 if encoding == "int4" else 127
    scales = groups.abs().amax(dim=-1) / limit
    codes = (groups / scales[..., None]).round().flatten(1)
    stored = pack_nibbles((codes + 8).to(torch.uint8)) if encoding == "int4" else codes.to(torch.int8)
    return QuantizedTensor(stored, scales, activations=activations)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("encoding", "activations"), [("int4", "float"), ("int8", "float"), ("int4", "int8"), ("mixed", "float")]
)
@pytest.mark.parametrize("name", WIDE_ARCHITECTURES)
def test_one_call_computes_what_the_layers_and_dequantized_weights_compute(
    name: str, encoding: str, activations: Activations, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if c_library(dtype) is None or not can_pack(getattr(torch, dtype)):
        pytest.skip("this processor has no bfloat16 instructions, or there is no compiler")

    def quantize(gemm: SkinnyGemm, weight: Tensor, bias: Tensor | None) -> Weight:
        if encoding == "mixed":  # as in GGUF files, whose values often have more bits than queries and keys
            if len(weight) != SIZES["hidden_size"]:
                half = len(weight) // 32 * 16
                rows = ((slice(None, half), "int4"), (slice(half, None), "int8"))
                return SideBySideWeight(
                    [prepared(gemm, weight[some], None if bias is None else bias[some], each) for some, each in rows]
                )
            return prepared(gemm, weight, bias, "int4")
        return prepared(gemm, weight, bias, encoding)

    def prepared(gemm: SkinnyGemm, weight: Tensor, bias: Tensor | None, encoding: str) -> Weight:
        matrix = rounded(weight, encoding, activations)
        return (
            DequantizingWeight(matrix, bias) if dequantizes else QuantizedGemm(gemm.library).make_weight(matrix, bias)
        )

    monkeypatch.setattr(SkinnyGemm, "make_weight", quantize)
    model_type, sizes = WIDE_ARCHITECTURES[name]
    make_model(tmp_path, model_type, {**sizes, **SIZES})
    dequantizes = False
    runner = InProcessEngine(ModelManager("cpu").load(tmp_path, dtype, None)).runner
    calls: list[int] = []
    decode = CpuDecoder.decode
    monkeypatch.setattr(CpuDecoder, "decode", lambda self, x, *rest: (calls.append(len(x)), decode(self, x, *rest)))
    in_one_call = runner._run_in_chunks(TOKEN_IDS)
    assert min(calls) <= 32, "no step was decoded in one call"
    assert max(calls) > 32, "no prompt was one call up to its last layer"
    calls.clear()
    monkeypatch.setattr(CpuDecoder, "can_decode", lambda *_: False)
    monkeypatch.setattr(CpuDecoder, "can_prefill", lambda *_: False)
    by_layers = runner._run_in_chunks(TOKEN_IDS)
    assert not calls
    is_exact = dtype == "float32" and activations == "float"
    assert distance(in_one_call, by_layers) < (1e-5 if dtype == "float32" else 0.02)
    dequantizes = True
    reference = InProcessEngine(ModelManager("cpu").load(tmp_path, dtype, None)).runner
    assert distance(in_one_call[-1], by_layers[0]) < (1e-5 if dtype == "float32" else 0.02), "from token ids to logits"
    assert distance(by_layers[:2], reference._run_in_chunks(TOKEN_IDS)) < (1e-4 if is_exact else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_the_self_check_accepts_what_int8_activations_change(scheme: str, dtype: str, tmp_path: Path) -> None:
    if c_library(dtype) is None or not can_pack(getattr(torch, dtype)):
        pytest.skip("this processor has no bfloat16 instructions, or there is no compiler")
    make_quantized_model(tmp_path, scheme)
    loaded = ModelManager("cpu").load(tmp_path, dtype, None)
    assert loaded.rounds_activations
    assert InProcessEngine(loaded).runner.self_check() < 0.05


def distance(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm())
