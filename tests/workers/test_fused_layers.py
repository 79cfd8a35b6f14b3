"""Claims about decoder layers in few calls, against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from servekit.errors import ConfigError
from tests.inprocess import InProcessEngine
from tests.tiny_models import ARCHITECTURES, make_model
from workers.c_library import c_library
from workers.cpu_layers import CpuLayers
from workers.fused_layers import FUSIBLE, FusedDecoder, can_fuse
from workers.model_manager import ModelManager
from workers.packed_linear import can_pack

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype)]
FUSED = ["llama", "mistral_sliding", "qwen2", "qwen3"]


def kernels(dtype: torch.dtype) -> CpuLayers:
    library = c_library(str(dtype).removeprefix("torch."))
    assert library is not None
    return CpuLayers(library)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 48), (1, 768), (70, 2048)])
def test_norm_and_swiglu_are_torchs(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, weight = (3 * torch.randn(shape)).to(dtype), torch.randn(shape[1]).to(dtype)
    tolerance = {"rtol": 2e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    expected = nn.functional.rms_norm(x.double(), shape[1:], weight.double(), 1e-5)
    torch.testing.assert_close(kernels(dtype).norm(x, weight, 1e-5).double(), expected, **tolerance)
    gate_up = (8 * torch.randn(shape[0], 2 * shape[1])).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels(dtype).swiglu(gate_up).double(), expected, **tolerance)


@pytest.mark.parametrize("name", FUSED)
def test_the_llama_family_is_fused_and_the_others_are_left_alone(name: str, tmp_path: Path) -> None:
    """That the tokens are those of `generate` is tested for each of them in test_token_identity.py."""
    make_model(tmp_path, *ARCHITECTURES[name])
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    assert isinstance(loaded.decoder, FusedDecoder) and loaded.model.model is loaded.decoder
    assert not [module for module in loaded.model.modules() if type(module).__name__ in FUSIBLE], "weights held twice"


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"intermediate_size": 56}])
def test_a_layer_that_means_something_else_is_left_alone(change: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path, "llama", {**ARCHITECTURES["llama"][1], **change})
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    assert not isinstance(loaded.decoder, FusedDecoder)
    assert InProcessEngine(loaded).runner.self_check() < 1e-5


def test_a_layer_with_a_linear_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        pass

    make_model(tmp_path, *ARCHITECTURES["llama"])
    layer = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0]
    assert can_fuse(layer)
    layer.mlp.up_proj = Adapted(48, 64)
    assert not can_fuse(layer)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_agrees_with_transformers_to_rounding(name: str, dtype: str, tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES[name])
    loaded = ModelManager("cpu").load(tmp_path, dtype, None)
    assert InProcessEngine(loaded).runner.self_check() < (1e-5 if dtype == "float32" else 0.05)


def test_a_layer_that_is_meant_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    monkeypatch.setattr(CpuLayers, "swiglu", lambda _, gate_up: gate_up.chunk(2, dim=-1)[0].contiguous())
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    with pytest.raises(ConfigError, match="its logits differ"):
        InProcessEngine(loaded).runner.self_check()
