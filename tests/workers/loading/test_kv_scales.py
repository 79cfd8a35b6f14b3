"""A checkpoint's scales of keys and values are read for a KV cache in float8, and refused if they are wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.kv_cache.pages import LayerShape
from workers.loading.kv_scales import with_checkpoint_scales

LAYERS = [LayerShape(2, 8, 8)] * 3


def save(path: Path, **tensors: float | list[float]) -> None:
    """Save scales; the dots of their names are double underscores here."""
    saved = {name.replace("__", "."): torch.tensor(numbers) for name, numbers in tensors.items()}
    save_file({"model.norm.weight": torch.ones(4), **saved}, path / "model.safetensors")


def test_scales_of_all_heads_or_of_each_are_read_by_the_names_of_each_tool(tmp_path: Path) -> None:
    save(
        tmp_path,
        model__layers__0__self_attn__k_scale=0.5,
        model__layers__0__self_attn__v_scale=[0.25, 2.0],
        model__layers__1__self_attn__k_proj__k_scale=[3.0],
        model__layers__2__self_attn__v_proj__output_scale=4.0,
        model__layers__2__self_attn__k_proj__weight_scale=9.0,
    )
    layers = with_checkpoint_scales(LAYERS, tmp_path)
    assert [layer.key_scales for layer in layers] == [(0.5, 0.5), (3.0, 3.0), None]
    assert [layer.value_scales for layer in layers] == [(0.25, 2.0), None, (4.0, 4.0)]
    assert with_checkpoint_scales(LAYERS[:1], tmp_path, first_layer=1)[0].key_scales == (3.0, 3.0)


def test_without_scales_each_vector_has_its_own(tmp_path: Path) -> None:
    save(tmp_path)
    assert with_checkpoint_scales(LAYERS, tmp_path) == LAYERS
    assert with_checkpoint_scales(LAYERS, tmp_path / "model.gguf") == LAYERS


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, [1.0, 2.0, 3.0]])
def test_scales_that_cannot_be_right_are_refused_by_name(wrong: float | list[float], tmp_path: Path) -> None:
    save(tmp_path, model__layers__1__self_attn__k_scale=wrong)
    with pytest.raises(ConfigError, match=r"in model.layers.1.self_attn.k_scale.*--kv-cache-dtype int8"):
        with_checkpoint_scales(LAYERS, tmp_path)


def test_a_model_is_served_with_its_own_scales_in_float8_only(tmp_path: Path) -> None:
    make_model(tmp_path, *ARCHITECTURES["llama"])
    weights = load_file(tmp_path / "model.safetensors")
    scales: dict[str, Tensor] = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(0.01) for layer in range(3) for kind in "kv"
    }
    save_file({**weights, **scales}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path)
    runner = InProcessEngine(loaded, kv_cache_dtype="fp8_e4m3").runner
    assert all(layer.key_scales == pytest.approx((0.01, 0.01)) for layer in runner.cache.layers)
    assert 1e-4 < runner.self_check() < 0.1
    assert all(layer.key_scales is None for layer in InProcessEngine(loaded, kv_cache_dtype="int8").runner.cache.layers)
