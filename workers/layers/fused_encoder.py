"""Encoder layers of BERT's kind in seven calls instead of some thirty, for rows of texts on a CPU.

The layers use the weights of transformers' own. Queries, keys and values are one matrix product, residual additions are
part of the product before them, and weights are prepared once, at load: torch's linear layers repack a weight in every
call, or multiply it unpacked. Each layer is compared with the one that it replaces.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from workers.csrc.build import c_library
from workers.device.heap import trim_heap
from workers.layers.layer_replacement import make_cpu_method
from workers.layers.linear import LinearMethod, can_pack, is_plain_linear, pack_for_cpu, prepare
from workers.layers.skinny_gemm import MAX_ROWS_IN_ONE_CALL

log = logging.getLogger("servekit.worker")

# Attends with queries, keys and values [num_tokens, 3, num_heads, head_size], scaled by a number, within each text.
# Returns [num_tokens, num_heads * head_size].
Attend = Callable[[Tensor, float], Tensor]

LINEARS = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
MLP_LINEARS = ("intermediate.dense", "output.dense")


class FusedEncoderLayer(nn.Module):
    """y = norm(x + attention(x)), then norm(y + mlp(y)), where the MLP is two products with an activation between."""

    def __init__(self, layer: Any, method: LinearMethod, attend: Attend) -> None:
        """Take the weights of transformers' `layer`."""
        super().__init__()
        attention = layer.attention.self
        self._attend, self._scale = attend, attention.attention_head_size**-0.5
        self._heads = (3, attention.num_attention_heads, attention.attention_head_size)
        self._qkv = prepare(method, attention.query, attention.key, attention.value)
        self._output = prepare(method, layer.attention.output.dense)
        self._up = prepare(method, layer.intermediate.dense)
        self._down = prepare(method, layer.output.dense)
        self._activation = layer.intermediate.intermediate_act_fn
        self.attention_norm, self.mlp_norm = layer.attention.output.LayerNorm, layer.output.LayerNorm

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states after this layer, [1, num_tokens, hidden_size], as the layer that it replaces."""
        return self.compute(hidden_states[0])[None]

    def compute(self, x: Tensor) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] after this layer. `x` may be overwritten."""
        attended = self._attend(self._qkv.multiply(x).view(-1, *self._heads), self._scale)
        x = _norm(self.attention_norm, self._output.multiply_add(attended, x))
        return _norm(self.mlp_norm, self._down.multiply_add(self._activation(self._up.multiply(x)), x))


class FusedEncoder:
    """All layers of an encoder."""

    def __init__(self, layers: list[FusedEncoderLayer], library: ctypes.CDLL | None) -> None:
        self._layers, self._library = layers, library

    def compute(self, x: Tensor) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] after the last layer. `x` may be overwritten."""
        if self._library is not None and len(x) > MAX_ROWS_IN_ONE_CALL:  # oneDNN multiplies, which has no regions
            self._library.use_all_threads()
        for layer in self._layers:
            x = layer.compute(x)
        return x


def fuse_encoder(layers: nn.ModuleList, attend: Attend, row: Tensor, tolerance: float) -> FusedEncoder | None:
    """Replace the layers, in place, and return an encoder of all; None if some are not replaced.

    Each one is compared on `row` [1, num_tokens, hidden_size]. It stays, with all that follow, if it is of another
    kind, or if the fused one gives numbers that differ by more than the tolerance, relative to the largest. Memory
    holds the weights of one layer twice at most.
    """
    dtype, all_fused = row.dtype, []
    if row.device.type != "cpu" or not can_pack(dtype):
        return None
    library = c_library(str(dtype).removeprefix("torch."))
    method = pack_for_cpu if library is None else make_cpu_method(library)
    for index, layer in enumerate(layers):
        if not _can_fuse(layer):
            log.info("layer %d is of another kind than those that are fused", index)
            return None
        expected = layer(row, None)
        fused = FusedEncoderLayer(layer, method, attend)
        error = ((fused(row.clone()) - expected).abs().max() / expected.abs().max().clamp(min=1e-9)).item()
        if not error <= tolerance:
            log.warning("layer %d is transformers' own: fused, hidden states differ by %.2g", index, error)
            return None
        layers[index] = fused
        all_fused.append(fused)
        row = expected
    trim_heap()  # of the layers that were replaced
    log.info("%d layers: fused", len(layers))
    return FusedEncoder(all_fused, library)


def _can_fuse(layer: Any) -> bool:
    """Return whether a layer has the parts that are fused, and no others."""
    named = dict(layer.named_modules())
    linears = {name for name, module in named.items() if isinstance(module, nn.Linear)}
    if linears != {*LINEARS, *MLP_LINEARS} or not all(is_plain_linear(named[name]) for name in linears):
        return False
    biases = [named[name].bias is None for name in LINEARS[:3]]
    norms = (named.get("attention.output.LayerNorm"), named.get("output.LayerNorm"))
    return all(type(norm) is nn.LayerNorm for norm in norms) and len(set(biases)) == 1


def _norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
