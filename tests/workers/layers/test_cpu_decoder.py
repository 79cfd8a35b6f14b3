"""All layers in one call of C compute what the layers compute one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from tests.workers.layers.test_fused_decoder import FUSED
from workers.csrc.build import c_library
from workers.layers.cpu_decoder import CpuDecoder
from workers.layers.linear import PackedWeight, can_pack
from workers.layers.skinny_gemm import SkinnyGemm, SkinnyGemmWeight
from workers.loading.model_manager import ModelManager

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # multiples of 32, as in real models


@pytest.mark.parametrize(
    ("name", "dtype", "kv_cache_dtype"),
    [
        *((name, "bfloat16", "auto") for name in FUSED),
        ("llama", "bfloat16", "int8"),
        ("qwen3", "bfloat16", "fp8_e4m3"),
        *((name, "float32", "auto") for name in FUSED),
        ("qwen3", "float32", "int8"),
    ],
)
def test_one_call_for_all_layers_computes_what_the_layers_compute(
    name: str, dtype: str, kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = c_library(dtype) if can_pack(getattr(torch, dtype)) else None
    weight = torch.randn(64, 64).to(getattr(torch, dtype))
    if library is None or not isinstance(SkinnyGemm(library).make_weight(weight, None), SkinnyGemmWeight):
        pytest.skip("this processor lacks the instructions, or oneDNN has a layout that the C code cannot read")
    difference = 0.02 if dtype == "bfloat16" else 1e-5
    model_type, sizes = ARCHITECTURES[name]
    make_model(tmp_path, model_type, {**sizes, **SIZES})
    loaded = ModelManager("cpu").load(tmp_path, dtype, None)
    runner = InProcessEngine(loaded, kv_cache_dtype=kv_cache_dtype).runner
    calls: list[int] = []
    decode = CpuDecoder.decode
    monkeypatch.setattr(CpuDecoder, "decode", lambda self, x, *rest: (calls.append(len(x)), decode(self, x, *rest)))
    token_ids = tuple(range(1, 25))
    in_one_call = runner._run_in_chunks(token_ids)
    assert calls and max(calls) <= 32, "no step was decoded in one call"
    assert runner.self_check() < 0.05
    calls.clear()
    monkeypatch.setattr(CpuDecoder, "can_decode", lambda *_: False)
    by_all_but_one = runner._run_in_chunks(token_ids)
    assert bool(calls) == runner.loaded.decoder.cpu_decoder._takes_any_rows  # type: ignore[union-attr]
    assert (in_one_call - by_all_but_one).norm() <= difference * by_all_but_one.norm()
    calls.clear()
    monkeypatch.setattr(CpuDecoder, "can_prefill", lambda *_: False)
    by_layers = runner._run_in_chunks(token_ids)
    assert not calls
    assert (in_one_call - by_layers).norm() <= difference * by_layers.norm()
    monkeypatch.setattr(SkinnyGemmWeight, "multiply", lambda self, x: self._packed.multiply(x))
    monkeypatch.setattr(SkinnyGemmWeight, "multiply_add", lambda self, x, to: self._packed.multiply_add(x, to))
    by_onednn = runner._run_in_chunks(token_ids)
    assert (by_layers - by_onednn).norm() <= difference * by_onednn.norm()


def test_layers_that_onednn_multiplies_have_no_cpu_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    monkeypatch.setattr(SkinnyGemm, "make_weight", lambda self, weight, bias: PackedWeight(weight, bias))
    assert ModelManager("cpu").load(tmp_path, "float32", None).decoder.cpu_decoder is None
