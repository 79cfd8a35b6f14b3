"""All layers of a decoder in one call of C, for steps of few tokens on a CPU.

Between two calls, Python takes longer than an OpenMP thread spins before it sleeps, and to wake a thread takes longer
than to multiply.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionParams, HeadNorms, PagedStep, Rotation
from workers.csrc.bindings import CDecoderLayer, CLayerPages
from workers.kv_cache.pages import KVCache
from workers.layers.cpu_weight import CpuWeight, SideBySideCpuWeight
from workers.layers.layer_tap import LayerTap
from workers.layers.linear import SideBySideWeight, Weight
from workers.layers.lora_weight import LoraWeight
from workers.lora.lora_linear import CLoraLinear
from workers.lora.lora_step import LoraStep

Norm = tuple[Tensor, float]  # weight [size], epsilon
LORA_FIELDS = ("qkv", "output", "gate_up", "down")  # of CDecoderLayer, in the order of LayerParts.weights


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer of the Llama family, in the order in which they are used."""

    attention_norm: Norm
    qkv: Weight
    head_norms: HeadNorms | None
    attention: AttentionParams
    output: Weight
    mlp_norm: Norm
    gate_up: Weight
    down: Weight

    @property
    def weights(self) -> tuple[Weight, Weight, Weight, Weight]:
        return self.qkv, self.output, self.gate_up, self.down


CpuWeights = tuple[CpuWeight, CpuWeight, CpuWeight, CpuWeight]  # as LayerParts.weights


def make_cpu_decoder(layers: list[LayerParts]) -> CpuDecoder | None:
    """Return a decoder of these layers; None if C cannot multiply by one of their weights."""
    weights: list[CpuWeights] = []
    for layer in layers:
        match [_in_one_call(weight) for weight in layer.weights]:
            case [CpuWeight() as qkv, CpuWeight() as output, CpuWeight() as gate_up, CpuWeight() as down]:
                weights.append((qkv, output, gate_up, down))
            case _:
                return None
    return CpuDecoder(layers, weights) if layers else None


def _in_one_call(weight: Weight) -> CpuWeight | None:
    """Return a weight as C multiplies it between others; None if it cannot."""
    if isinstance(weight, LoraWeight):
        return _in_one_call(weight.base) if isinstance(weight.linear, CLoraLinear) else None
    if isinstance(weight, SideBySideWeight):
        parts = [part for part in weight.parts if isinstance(part, CpuWeight)]
        return SideBySideCpuWeight(parts) if len(parts) == len(weight.parts) else None
    return weight if isinstance(weight, CpuWeight) else None


class CpuDecoder:
    """The layers, for steps that `can_decode`."""

    def __init__(self, layers: list[LayerParts], weights: list[CpuWeights]) -> None:
        """Make the structs that C reads. `weights` are those of `layers`."""
        in_order = [weight for layer in weights for weight in layer]
        self.max_tokens = min(weight.max_rows for weight in in_order)
        self._decode_layers = in_order[0].library.decode_layers
        self.use_all_threads = in_order[0].library.use_all_threads  # before a step that it does not decode
        for weight, next_weight in pairwise(in_order):
            weight.prefetch_next(next_weight)
        self._layers, self._weights = layers, weights  # keep the tensors alive, because C has only addresses
        self.structs = (CDecoderLayer * len(layers))(*map(_make_struct, layers, weights))
        self._attention_sizes = [output.num_inputs for _, output, _, _ in weights]  # num_heads * value_dim, by layer
        self.workspace_per_token = max(map(_workspace_per_token, weights))
        self.gemm_workspace_bytes = max(weight.workspace_bytes for weight in in_order)  # for each token
        self.largest_weight = max(weight.num_inputs * weight.num_outputs for weight in in_order)

    def can_decode(self, num_tokens: int, paged: PagedStep, adapters: LoraStep | None = None) -> bool:
        """Return whether a step of so many tokens can take this path."""
        is_masked = adapters is not None and adapters.mask is not None
        return 0 < num_tokens <= self.max_tokens and isinstance(paged.backend, CpuAttention) and not is_masked

    def pages(self, backend: CpuAttention, cache: KVCache) -> ctypes.Array[CLayerPages]:
        """Return the pages of all layers as C reads them. They point to the cache's tensors."""
        pages = (CLayerPages * len(self._layers))()
        for index, layer in enumerate(self._layers):
            num_heads = self._attention_sizes[index] // cache.layers[index].value_dim
            pages[index] = backend.layer_pages(cache, index, num_heads, layer.attention)
        return pages

    def decode(
        self,
        x: Tensor,
        rotation: Rotation,
        paged: PagedStep,
        tap: LayerTap | None = None,
        adapters: LoraStep | None = None,
    ) -> None:
        """Run all layers on x [num_tokens, hidden_size], in place. `adapters` says which rows have which.

        A tap divides the layers into several calls, between which it keeps a copy of x.
        """
        backend, (cosines, sines) = paged.backend, rotation
        assert isinstance(backend, CpuAttention)
        assert x.is_contiguous() and cosines.is_contiguous() and sines.is_contiguous()
        pages = self.pages(backend, paged.cache)
        workspace = x.new_empty(len(x) * self.workspace_per_token)
        gemm_workspace = torch.empty(len(x) * self.gemm_workspace_bytes, dtype=torch.uint8)
        bounds = {0, len(self._layers)}.union(() if tap is None else tap.layers)
        for first, stop in pairwise(sorted(bounds)):
            if tap is not None:
                tap.keep(first, x.clone())
            self._decode_layers(
                ctypes.byref(self.structs, first * ctypes.sizeof(CDecoderLayer)),
                ctypes.byref(pages, first * ctypes.sizeof(CLayerPages)),
                stop - first,
                ctypes.byref(paged.prepared),
                None if adapters is None else adapters.address,
                cosines.data_ptr(),
                sines.data_ptr(),
                x.data_ptr(),
                workspace.data_ptr(),
                gemm_workspace.data_ptr(),
            )
        if tap is not None:
            tap.keep(len(self._layers), x)


def _make_struct(layer: LayerParts, weights: CpuWeights) -> CDecoderLayer:
    qkv, output, gate_up, down = weights
    (attention_norm, attention_epsilon), (mlp_norm, mlp_epsilon) = layer.attention_norm, layer.mlp_norm
    norms = layer.head_norms
    return CDecoderLayer(
        qkv=qkv.address,
        output=output.address,
        gate_up=gate_up.address,
        down=down.address,
        attention_norm=attention_norm.data_ptr(),
        mlp_norm=mlp_norm.data_ptr(),
        query_norm=None if norms is None else norms.query_weight.data_ptr(),
        key_norm=None if norms is None else norms.key_weight.data_ptr(),
        attention_epsilon=attention_epsilon,
        mlp_epsilon=mlp_epsilon,
        head_epsilon=0.0 if norms is None else norms.epsilon,
        **{f"{field}_lora": _lora_address(weight) for field, weight in zip(LORA_FIELDS, layer.weights, strict=True)},
    )


def _lora_address(weight: Weight) -> int | None:
    if isinstance(weight, LoraWeight) and isinstance(weight.linear, CLoraLinear):
        return weight.linear.address
    return None


def _workspace_per_token(weights: CpuWeights) -> int:
    """Return the scalars that a layer's intermediate results take for one token; see decode_layers in C."""
    qkv, output, gate_up, down = weights
    return qkv.num_inputs + qkv.num_outputs + output.num_inputs + gate_up.num_outputs + down.num_inputs
