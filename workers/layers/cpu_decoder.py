"""The layers of a decoder in one call of C, on a CPU: all for steps of few tokens, and all but the last for others.

Between two calls, Python takes longer than an OpenMP thread spins before it sleeps, and to wake a thread takes longer
than to multiply by few rows, or than to compute the norm of a few tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from workers.attention.cpu_backend import CpuAttention, head_norms_struct, rotation_struct
from workers.attention.interface import AttentionParams, HeadNorms, PagedStep, Rotation
from workers.csrc.bindings import CDecoderLayer, CLayerPages, CNorm, CRotation
from workers.kv_cache.pages import KVCache
from workers.layers.cpu_ops import C_GATES
from workers.layers.cpu_weight import CpuWeight, SideBySideCpuWeight
from workers.layers.fused_experts import FusedExperts
from workers.layers.layer_families import Norm
from workers.layers.layer_tap import LayerTap
from workers.layers.linear import SideBySideWeight, Weight
from workers.layers.lora_weight import LoraWeight
from workers.lora.lora_linear import CLoraLinear
from workers.lora.lora_step import LoraStep

LORA_FIELDS = ("qkv", "output", "gate_up", "down")  # of CDecoderLayer, in the order of LayerParts.weights


@dataclass(frozen=True, slots=True)
class Mlp:
    """The MLP of a layer: a gated linear unit."""

    gate_up: Weight
    activation: str
    down: Weight


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer, in the order in which they are used."""

    attention_norm: Norm | None
    qkv: Weight
    head_norms: HeadNorms | None
    rotation: int  # its number among those of a step
    attention: AttentionParams
    output: Weight
    attention_output_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | FusedExperts
    mlp_output_norm: Norm | None

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Those that all tokens are multiplied by, in the order of LORA_FIELDS."""
        return self.qkv, self.output, *((self.mlp.gate_up, self.mlp.down) if isinstance(self.mlp, Mlp) else ())


CpuWeights = tuple[CpuWeight, ...]  # as LayerParts.weights


def make_cpu_decoder(layers: list[LayerParts]) -> CpuDecoder | None:
    """Return a decoder of these layers; None if C cannot multiply by one of their weights."""
    weights: list[CpuWeights] = []
    for layer in layers:
        found = tuple(filter(None, map(_in_one_call, layer.weights)))
        lacks_experts = isinstance(layer.mlp, FusedExperts) and layer.mlp.address is None
        if len(found) < len(layer.weights) or lacks_experts:
            return None
        weights.append(found)
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
    """The layers, for steps that it `can_decode` or `can_prefill`."""

    def __init__(self, layers: list[LayerParts], weights: list[CpuWeights]) -> None:
        """Make the structs that C reads. `weights` are those of `layers`."""
        in_order = [weight for layer in weights for weight in layer]
        experts = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts)]
        of_experts = [weight for mixture in experts for weight in mixture.cpu_weights]
        self.max_tokens = min(weight.max_rows for weight in (*in_order, *of_experts))
        self._takes_any_rows = not experts and all(weight.takes_any_rows for weight in in_order)
        self._decode_layers = in_order[0].library.decode_layers
        self.use_all_threads = in_order[0].library.use_all_threads  # before a step that it does not decode
        # After attention, a router chooses which experts are multiplied next.
        known: list[tuple[CpuWeight | None, ...]] = [
            of_layer if isinstance(layer.mlp, Mlp) else (*of_layer, None)
            for layer, of_layer in zip(layers, weights, strict=True)
        ]
        for weight, next_weight in pairwise(weight for of_layer in known for weight in of_layer):
            if weight is not None and next_weight is not None:
                weight.prefetch_next(next_weight)
        self._layers, self._weights = layers, weights  # keep the tensors alive, because C has only addresses
        self.structs = (CDecoderLayer * len(layers))(*map(_make_struct, layers, weights))
        self._attention_sizes = [output.num_inputs for _, output, *_ in weights]  # num_heads * value_dim, by layer
        self.workspace_per_token = max(map(_workspace_per_token, layers, weights))
        self.gemm_workspace_bytes = max(weight.workspace_bytes for weight in (*in_order, *of_experts))  # for each token
        self.largest_weight = max(weight.num_inputs * weight.num_outputs for weight in (*in_order, *of_experts))

    def can_decode(self, num_tokens: int, paged: PagedStep, adapters: LoraStep | None = None) -> bool:
        """Return whether a step of so many tokens can take this path through all layers."""
        is_masked = adapters is not None and adapters.mask is not None
        return 0 < num_tokens <= self.max_tokens and isinstance(paged.backend, CpuAttention) and not is_masked

    def can_prefill(self, paged: PagedStep, adapters: LoraStep | None = None) -> bool:
        """Return whether any step can take this path through all layers but the last."""
        return self._takes_any_rows and isinstance(paged.backend, CpuAttention) and adapters is None

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
        rotations: Sequence[Rotation],
        paged: PagedStep,
        tap: LayerTap | None = None,
        adapters: LoraStep | None = None,
        num_layers: int | None = None,
    ) -> None:
        """Run the first `num_layers`, or all, on x [num_tokens, hidden_size], in place.

        `adapters` says which rows have which. A tap divides the layers into several calls, and keeps x between them.
        """
        backend = paged.backend
        assert isinstance(backend, CpuAttention) and x.is_contiguous()
        pages = self.pages(backend, paged.cache)
        rotation_structs = (CRotation * len(rotations))(*(rotation_struct(each, x.dtype) for each in rotations))
        workspace = x.new_empty(len(x) * self.workspace_per_token)
        gemm_workspace = torch.empty(self._gemm_workspace_bytes(len(x)), dtype=torch.uint8)
        last = len(self._layers) if num_layers is None else num_layers
        tapped = () if tap is None else tap.layers
        bounds = {0, last, *(layer for layer in tapped if layer < last)}
        for first, stop in pairwise(sorted(bounds)):
            if tap is not None:
                tap.keep(first, x.clone())
            self._decode_layers(
                ctypes.byref(self.structs, first * ctypes.sizeof(CDecoderLayer)),
                ctypes.byref(pages, first * ctypes.sizeof(CLayerPages)),
                stop - first,
                ctypes.byref(paged.prepared),
                None if adapters is None else adapters.address,
                rotation_structs,
                x.data_ptr(),
                workspace.data_ptr(),
                gemm_workspace.data_ptr(),
            )
        if tap is not None and last == len(self._layers):
            tap.keep(last, x)

    def _gemm_workspace_bytes(self, num_tokens: int) -> int:
        if num_tokens <= self.max_tokens:
            return num_tokens * self.gemm_workspace_bytes
        return max(weight.workspace_bytes_of(num_tokens) for layer in self._weights for weight in layer)


def _make_struct(layer: LayerParts, weights: CpuWeights) -> CDecoderLayer:
    mlp = layer.mlp
    return CDecoderLayer(
        **{field: weight.address for field, weight in zip(LORA_FIELDS, weights, strict=False)},
        attention_norm=_norm_struct(layer.attention_norm),
        attention_output_norm=_norm_struct(layer.attention_output_norm),
        mlp_norm=_norm_struct(layer.mlp_norm),
        mlp_output_norm=_norm_struct(layer.mlp_output_norm),
        head_norms=head_norms_struct(layer.head_norms),
        rotation=layer.rotation,
        gate=_gate_address(mlp, weights[0].library) if isinstance(mlp, Mlp) else None,
        experts=mlp.address if isinstance(mlp, FusedExperts) else None,
        **{f"{field}_lora": _lora_address(weight) for field, weight in zip(LORA_FIELDS, layer.weights, strict=False)},
    )


def _gate_address(mlp: Mlp, library: ctypes.CDLL) -> int | None:
    return ctypes.cast(getattr(library, C_GATES[mlp.activation]), ctypes.c_void_p).value


def _norm_struct(norm: Norm | None) -> CNorm:
    if norm is None:
        return CNorm()
    weight, epsilon = norm
    assert weight.dtype is torch.float32 and weight.is_contiguous()
    return CNorm(weight.data_ptr(), epsilon)


def _lora_address(weight: Weight) -> int | None:
    if isinstance(weight, LoraWeight) and isinstance(weight.linear, CLoraLinear):
        return weight.linear.address
    return None


def _workspace_per_token(layer: LayerParts, weights: CpuWeights) -> int:
    """Return the scalars that a layer's intermediate results take for one token; see decode_layers in C."""
    qkv, output, *of_mlp = weights
    of_attention = qkv.num_outputs + output.num_inputs
    if isinstance(layer.mlp, FusedExperts):
        return qkv.num_inputs + max(of_attention, layer.mlp.workspace_scalars)
    gate_up, down = of_mlp
    return qkv.num_inputs + max(of_attention, gate_up.num_outputs + down.num_inputs)
