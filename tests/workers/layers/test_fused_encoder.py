"""Fused encoder layers compute what transformers' own do; a layer of another kind stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from workers.layers.fused_encoder import FusedEncoderLayer, fuse_encoder

TOLERANCE = 1e-5
CONFIG = BertConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=160, vocab_size=50, layer_norm_eps=0.1
)


def attend(qkv: Tensor, scale: float) -> Tensor:
    """Attend within one text, which is the whole row."""
    q, k, v = qkv.permute(1, 2, 0, 3)
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(0, 1).flatten(1)


@torch.inference_mode()
def make_layers(config: BertConfig = CONFIG) -> nn.ModuleList:
    """Return layers with random weights, biases and norms, so that leaving one out changes the result."""
    torch.manual_seed(0)
    layers = BertModel(config).eval().encoder.layer
    for parameter in layers.parameters():
        parameter.copy_(torch.randn_like(parameter) / (8 if parameter.ndim == 2 else 1))
    return layers


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new"])
def test_rows_of_any_length_equal_transformers(activation: str, dtype: torch.dtype) -> None:
    """With few rows C multiplies, with many oneDNN."""
    layers = make_layers(BertConfig(**{**CONFIG.to_dict(), "hidden_act": activation})).to(dtype)
    own = copy.deepcopy(layers)
    tolerance = TOLERANCE if dtype is torch.float32 else 0.03
    encoder = fuse_encoder(layers, attend, torch.randn(1, 9, 64, dtype=dtype), tolerance)
    assert encoder is not None and all(isinstance(layer, FusedEncoderLayer) for layer in layers)
    for num_tokens in (1, 7, 33, 200):
        row = expected = torch.randn(1, num_tokens, 64, dtype=dtype)
        for layer in own:
            expected = layer(expected, None)
        for found in (encoder.compute(row[0].clone()), layers[1](layers[0](row.clone(), None))[0]):
            assert (found - expected[0]).abs().max() < tolerance * expected.abs().max()


@torch.inference_mode()
def test_layers_of_another_kind_stay() -> None:
    row = torch.randn(1, 9, 64)
    decoder = BertConfig(**{**CONFIG.to_dict(), "is_decoder": True, "add_cross_attention": True})
    with_more, with_other_norm = make_layers(decoder), make_layers()
    with_other_norm[0].output.LayerNorm = nn.RMSNorm(64)
    for layers in (with_more, with_other_norm):
        assert fuse_encoder(layers, attend, row, TOLERANCE) is None
        assert not any(isinstance(layer, FusedEncoderLayer) for layer in layers)


@torch.inference_mode()
def test_a_layer_that_would_give_other_numbers_stays() -> None:
    layers = make_layers()

    class Doubled(type(layers[1])):  # type: ignore[misc]
        def forward(self, *arguments: object, **named: object) -> Tensor:
            output: Tensor = super().forward(*arguments, **named)
            return 2 * output

    layers[1].__class__ = Doubled
    assert fuse_encoder(layers, attend, torch.randn(1, 9, 64), TOLERANCE) is None
    assert isinstance(layers[0], FusedEncoderLayer) and isinstance(layers[1], Doubled)
