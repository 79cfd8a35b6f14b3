"""Decoder layers of the Llama family in nine calls instead of some forty.

transformers' layers consist of small operations. Each of them reads and writes all activations once more, and each has
torch's dispatch overhead. The layers here use the same weights. Projections with the same input are one matrix product;
residual additions are part of the matrix product before them; the operations between two matrix products are one pass.
On a CPU with AVX-512, a step of few tokens is one call in all (cpu_decoder.py).

Layers are recognised by the names of their classes, because a layer's meaning cannot be read from its parts. The
worker's self-check compares the fused layers with the output of transformers' own layers before the first request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from workers.attention.interface import AttentionParams, HeadNorms, PagedStep, Rotation
from workers.csrc.build import LANES
from workers.layers.cpu_decoder import CpuDecoder, LayerParts, Norm
from workers.layers.layer_tap import LayerTap
from workers.layers.linear import LinearMethod, RowParallelWeight, Weight, is_plain, prepare
from workers.layers.lora_weight import LoraWeight
from workers.layers.quantized_linear import QuantizedLinear
from workers.lora.lora_pool import LoraPool
from workers.parallel.pipeline_stage import PassOn, PipelineStage
from workers.parallel.rank_group import RankGroup
from workers.parallel.ranks import Ranks

FUSIBLE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}


class LayerOps(Protocol):
    """The operations between a layer's matrix products, one pass each."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return x / rms(x) * weight, for x [num_tokens, size]."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""


MakeCpuDecoder = Callable[[list[LayerParts]], CpuDecoder | None]


class FusedLayer:
    """y = x + attention(norm(x)), then y + mlp(norm(y)); with SwiGLU and rotary position embeddings."""

    def __init__(
        self,
        layer: Any,
        params: AttentionParams,
        ops: LayerOps,
        method: LinearMethod,
        group: RankGroup | None,
        lora: LoraPool | None = None,
    ) -> None:
        """Take the weights of transformers' `layer`, which attends with `params`; `group` holds its other parts.

        With `lora`, adapters may change them.
        """
        attention = layer.self_attn
        head_norms = None
        if hasattr(attention, "q_norm"):
            (query_weight, epsilon), (key_weight, _) = _norm_of(attention.q_norm), _norm_of(attention.k_norm)
            head_norms = HeadNorms(query_weight, key_weight, epsilon)
        self._ops, self._layer = ops, attention.layer_idx

        def weight_of(module: str, *names: str) -> Weight:
            linears = [layer.get_submodule(f"{module}.{name}") for name in names]
            prepared = prepare(method, *linears)
            if lora is None:
                return prepared
            full_names = [f"model.layers.{self._layer}.{module}.{name}" for name in names]
            sizes = [linear.out_features for linear in linears]
            return LoraWeight(prepared, lora.make_linear(full_names, linears[0].in_features, sizes))

        self.parts = LayerParts(
            attention_norm=_norm_of(layer.input_layernorm),
            qkv=weight_of("self_attn", "q_proj", "k_proj", "v_proj"),
            head_norms=head_norms,
            attention=params,
            output=_row_parallel(weight_of("self_attn", "o_proj"), group),
            mlp_norm=_norm_of(layer.post_attention_layernorm),
            gate_up=weight_of("mlp", "gate_proj", "up_proj"),
            down=_row_parallel(weight_of("mlp", "down_proj"), group),
        )

    def attend(self, x: Tensor, rotation: Rotation, paged: PagedStep) -> Tensor:
        """Attend with x [num_tokens, hidden_size]. Returns [num_tokens, num_heads * head_dim], not yet projected."""
        parts = self.parts
        qkv = parts.qkv.multiply(self._ops.norm(x, *parts.attention_norm))
        return paged.backend.rotate_and_attend(paged, self._layer, qkv, rotation, parts.head_norms, parts.attention)

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        """Compute the rest of the layer, in which tokens are independent of each other. `x` may be overwritten."""
        parts, ops = self.parts, self._ops
        x = parts.output.multiply_add(attended, x)
        gate_up = parts.gate_up.multiply(ops.norm(x, *parts.mlp_norm))
        return parts.down.multiply_add(ops.swiglu(gate_up), x)


class FusedDecoder(nn.Module):
    """A whole decoder of fused layers, in place of transformers' own.

    In the last layer, tokens whose hidden state is not used only store their keys and values; in a prompt chunk these
    are nearly all tokens.
    """

    def __init__(
        self,
        decoder: Any,
        params: list[AttentionParams],
        ops: LayerOps,
        method: LinearMethod,
        make_cpu_decoder: MakeCpuDecoder | None = None,
        group: RankGroup | None = None,
        stage: PipelineStage | None = None,
        lora: LoraPool | None = None,
    ) -> None:
        """Take the weights of transformers' `decoder`, one layer after the other.

        `params` has one entry for each layer. `make_cpu_decoder` makes what runs steps of few tokens in one call; None
        on GPUs. `group` is given where this process holds a part of each layer, and `stage` where it has a part of the
        layers. With `lora`, adapters may change them.
        """
        super().__init__()
        self.tap: LayerTap | None = None
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb
        self._ops = ops
        self.last_norm = (
            _norm_of(decoder.norm) if stage is None or stage.is_last else None
        )  # None: a later stage has it
        self._layers, self._stage, self._lora = [], stage, lora
        first = 0 if stage is None else stage.layers_of(len(decoder.layers)).start
        for index, layer_params in enumerate(params, start=first):
            self._layers.append(FusedLayer(decoder.layers[index], layer_params, ops, method, group, lora))
            decoder.layers[index] = nn.Identity()  # frees the layer, so that memory holds at most one layer twice
        self.cpu_decoder = make_cpu_decoder([layer.parts for layer in self._layers]) if make_cpu_decoder else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, *, paged: PagedStep, **_: Any
    ) -> BaseModelOutputWithPast:
        """Compute hidden states [1, num_tokens, hidden_size] of token ids and positions [1, num_tokens].

        Only the hidden states at `paged.logits_indices` are meaningful.
        """
        x = self.embed_tokens(input_ids)
        cosines, sines = self.rotary_emb(x, position_ids=position_ids)
        hidden_states = self.compute(x[0], (cosines[0], sines[0]), paged)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states[None])

    def compute(self, x: Tensor, rotation: Rotation, paged: PagedStep) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of embedded tokens, which may be overwritten."""
        if self._stage is not None and not self._stage.is_first:
            x = self._stage.receive(x)
        # With few tokens, leaving some out of the last layer saves nothing, so logits_indices is not used here.
        tap = self.tap
        adapters = None if self._lora is None else self._lora.step
        if self.cpu_decoder is not None and self.cpu_decoder.can_decode(len(x), paged, adapters):
            self.cpu_decoder.decode(x, rotation, paged, tap, adapters)
            return self._output(x)
        if self.cpu_decoder is not None:
            self.cpu_decoder.use_all_threads()
        is_last_stage = self._stage is None or self._stage.is_last
        *layers, last = self._layers
        for index, layer in enumerate(layers):
            if tap is not None:
                tap.keep_copy(index, x)
            x = layer.finish(layer.attend(x, rotation, paged), x)
        attended, indices = last.attend(x, rotation, paged), paged.logits_indices
        is_whole = not is_last_stage or indices is None or len(indices) >= len(x)
        if tap is not None:
            tap.keep_copy(len(layers), x)
            is_whole = is_whole or len(self._layers) in tap.layers
        if is_whole:
            x = last.finish(attended, x)
            if tap is not None:
                tap.keep(len(self._layers), x)
            return self._output(x)
        assert indices is not None
        hidden_states = torch.zeros_like(x)
        with contextlib.nullcontext() if self._lora is None else self._lora.selecting(indices):
            hidden_states[indices] = last.finish(attended[indices], x[indices])
        return self._output(hidden_states)

    def _output(self, x: Tensor) -> Tensor:
        if self.last_norm is None:
            assert self._stage is not None
            self._stage.send_on(x)
            return x
        return self._ops.norm(x, *self.last_norm)


def _row_parallel(part: Weight, group: RankGroup | None) -> Weight:
    return part if group is None else RowParallelWeight(part, group)


def _norm_of(module: Any) -> Norm:
    return module.weight.detach(), module.variance_epsilon


def can_fuse(layer: nn.Module) -> bool:
    """Return whether FusedLayer computes the same as `layer`."""
    if type(layer).__name__ not in FUSIBLE:
        return False
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear | QuantizedLinear)]
    is_silu = getattr(layer.self_attn.config, "hidden_act", None) == "silu"  # type: ignore[union-attr]
    sizes = {size for linear in linears for size in (linear.in_features, linear.out_features)}
    return is_silu and all(map(is_plain, linears)) and not any(size % LANES for size in sizes)


def fuse_layers(
    model: Any,
    decoder: Any,
    params: list[AttentionParams],
    ops: LayerOps,
    method: LinearMethod,
    make_cpu_decoder: MakeCpuDecoder | None = None,
    ranks: Ranks | None = None,
    lora: LoraPool | None = None,
) -> nn.Module | None:
    """Replace the model's decoder and return the new one; None, and no change, if some layer cannot be fused."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or getattr(model, "model", None) is not decoder:
        return None
    group, stage = (None, None) if ranks is None else (ranks.group, ranks.stage)
    can_fuse_all = all(can_fuse(layer) for layer in layers if not isinstance(layer, PassOn))
    if group is not None:  # parts may differ in size; ranks with and without fused layers would exchange other tensors
        can_fuse_all = group.total(int(can_fuse_all)) == group.size
    if not can_fuse_all:
        return None
    fused = FusedDecoder(decoder, params, ops, method, make_cpu_decoder, group, stage, lora)
    model.model = fused
    return fused
