"""Fused decoder layers agree with transformers' own, and only layers they are meant for are fused."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.layers.cpu_ops import CpuOps
from workers.layers.fused_decoder import FusedDecoder, can_fuse
from workers.layers.layer_families import FAMILIES
from workers.loading.model_manager import ModelManager
from workers.parallel.pipeline_stage import PipelineStage

FUSED = [
    *("llama", "mistral_sliding", "qwen2", "qwen3", "phi3", "phi3_partly_rotated", "granite", "granite_scaled"),
    *("gemma", "gemma2", "gemma3", "gemma3_two_rotations", "olmo2", "olmo3"),
    *("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"),
]


@pytest.mark.parametrize("name", FUSED)
def test_layers_of_these_families_are_fused(name: str, tmp_path: Path) -> None:
    """test_token_identity.py tests for each of them that the tokens are those of `generate`."""
    make_model(tmp_path, *ARCHITECTURES[name])
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    assert isinstance(loaded.decoder, FusedDecoder) and loaded.model.model is loaded.decoder
    assert not [module for module in loaded.model.modules() if type(module).__name__ in FAMILIES], "weights held twice"


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"intermediate_size": 56}])
def test_a_layer_with_another_activation_or_an_odd_size_is_not_fused(change: dict[str, Any], tmp_path: Path) -> None:
    make_model(tmp_path, "llama", {**ARCHITECTURES["llama"][1], **change})
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    assert not isinstance(loaded.decoder, FusedDecoder)
    assert InProcessEngine(loaded).runner.self_check() < 1e-5


def test_a_layer_with_a_subclass_of_linear_is_not_fused(tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        pass

    make_model(tmp_path, *ARCHITECTURES["llama"])
    layer = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[0]
    assert can_fuse(layer)
    layer.mlp.up_proj = Adapted(48, 64)
    assert not can_fuse(layer)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_layers_agree_with_transformers_up_to_rounding(name: str, dtype: str, tmp_path: Path) -> None:
    # A router may choose another expert where two scores are nearly equal: in bfloat16, with one seed of some twelve.
    make_model(tmp_path, *ARCHITECTURES[name], seed=1)
    loaded = ModelManager("cpu").load(tmp_path, dtype, None)
    assert InProcessEngine(loaded).runner.self_check() < (1e-5 if dtype == "float32" else 0.05)


def test_stages_of_fused_layers_exchange_what_those_of_transformers_do(tmp_path: Path) -> None:
    """Granite's layers are fused with smaller hidden states. A stage that cannot fuse its layers must not get those."""
    sent: deque[Tensor] = deque()

    class OneProcess(PipelineStage):
        def send_on(self, hidden_states: Tensor) -> None:
            sent.append(hidden_states.clone())

        def receive(self, like: Tensor) -> Tensor:
            return sent.popleft().view_as(like)

    make_model(tmp_path, *ARCHITECTURES["granite_scaled"])
    for index in range(2):
        ranks: Any = SimpleNamespace(group=None, stage=OneProcess(index, 1, 2), minimum=lambda value: value)
        loaded = ModelManager("cpu").load(tmp_path, "float32", None, ranks=ranks)
        assert isinstance(loaded.decoder, FusedDecoder)
        assert InProcessEngine(loaded, pipeline_parallel_size=2).runner.self_check() < 1e-5
    whole = ModelManager("cpu").load(tmp_path, "float32", None)
    torch.testing.assert_close(loaded.sample.logits, whole.sample.logits)
    assert not sent


def test_a_wrong_layer_is_refused_by_the_self_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    monkeypatch.setattr(CpuOps, "swiglu", lambda _, gate_up: gate_up.chunk(2, dim=-1)[0].contiguous())
    loaded = ModelManager("cpu").load(tmp_path, "float32", None)
    with pytest.raises(ConfigError, match="its logits differ"):
        InProcessEngine(loaded).runner.self_check()
