"""Decoder layers in nine calls instead of some forty.

transformers' layers consist of small operations. Each of them reads and writes all activations once more, and each has
torch's dispatch overhead. The layers here use the same weights. Projections with the same input are one matrix product;
residual additions are part of the matrix product before them; the operations between two matrix products are one pass.
On a CPU with AVX-512, a step of few tokens is one call in all (cpu_decoder.py).

layer_families.py says which layers are fused, and what their parts are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from workers.attention.interface import AttentionParams, HeadNorms, PagedStep, Rotation
from workers.csrc.build import LANES
from workers.layers.cpu_decoder import CpuDecoder, LayerParts, Mlp
from workers.layers.fused_experts import FusedExperts
from workers.layers.layer_families import ExpertNames, Family, Norm, Rotary, family_of
from workers.layers.layer_tap import LayerTap
from workers.layers.linear import LinearMethod, RowParallelWeight, Weight, is_plain, prepare
from workers.layers.lora_weight import LoraWeight
from workers.layers.quantized_linear import QuantizedLinear
from workers.lora.lora_pool import LoraPool
from workers.parallel.pipeline_stage import PassOn, PipelineStage
from workers.parallel.rank_group import RankGroup
from workers.parallel.ranks import Ranks


class LayerOps(Protocol):
    """The operations between a layer's matrix products, one pass each."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return x / rms(x) * weight, for x [num_tokens, size] and weight [size] float32."""

    def norm_add(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> Tensor:
        """Return residual + x / rms(x) * weight. `residual` may be overwritten."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, approximated by tanh."""


MakeExperts = Callable[[nn.Module, ExpertNames], FusedExperts]
MakeCpuDecoder = Callable[[list[LayerParts]], CpuDecoder | None]


class FusedLayer:
    """y = x + attention(x), then y + mlp(y), each with the norms of its family; with a GLU and rotary embeddings."""

    def __init__(
        self,
        layer: Any,
        family: Family,
        params: AttentionParams,
        rotation: int,
        ops: LayerOps,
        method: LinearMethod,
        group: RankGroup | None,
        lora: LoraPool | None = None,
        make_experts: MakeExperts | None = None,
        decoder_name: str = "model",
    ) -> None:
        """Take the weights of transformers' `layer`, which attends with `params`; `group` holds its other parts.

        `rotation` is the number of its rotation in a step. With `lora`, adapters may change the weights, which
        are those of the layer in `decoder_name`.
        """
        attention, activation = layer.self_attn, family.activation_of(layer)
        multiplier = family.residual_multiplier_of(layer)
        assert activation is not None
        head_norms = None
        if hasattr(attention, "q_norm"):
            query_weight, epsilon = family.norm_of(attention.q_norm)
            key_weight, _ = family.norm_of(attention.k_norm)
            head_norms = HeadNorms(query_weight, key_weight, epsilon, family.norms_span_heads)
        self._ops, self._layer = ops, attention.layer_idx
        self._gates = {"silu": ops.swiglu, "gelu_tanh": ops.geglu}
        experts = family.experts_of(layer)

        def weight_of(*names: str) -> Weight:
            linears: list[Any] = [layer.get_submodule(name) for name in names]
            prepared = prepare(method, *linears)
            if lora is None:
                return prepared
            full_names = [f"{decoder_name}.layers.{self._layer}.{name}" for name in names]
            sizes = [linear.out_features for linear in linears]
            return LoraWeight(prepared, lora.make_linear(full_names, linears[0].in_features, sizes))

        def mlp() -> Mlp | FusedExperts:
            if experts is not None:
                assert make_experts is not None
                return make_experts(layer, experts)
            # The largest ones, which are made one matrix before they are prepared, are prepared before another one is.
            gate_up = weight_of(*family.gate_up)
            return Mlp(gate_up, activation, _row_parallel(weight_of("mlp.down_proj"), group))

        self.parts = LayerParts(
            attention_norm=_scaled(family.norm_in(layer, family.attention_norm), multiplier),
            qkv=weight_of(*family.qkv),
            head_norms=head_norms,
            rotation=rotation,
            attention=params,
            output=_row_parallel(weight_of("self_attn.o_proj"), group),
            attention_output_norm=family.norm_in(layer, family.attention_output_norm),
            mlp_norm=_scaled(family.norm_in(layer, family.mlp_norm), multiplier),
            mlp=mlp(),
            mlp_output_norm=family.norm_in(layer, family.mlp_output_norm),
        )

    def attend(self, x: Tensor, rotations: Sequence[Rotation], paged: PagedStep) -> Tensor:
        """Attend with x [num_tokens, hidden_size]. Returns [num_tokens, num_heads * head_dim], not yet projected."""
        parts, rotation = self.parts, rotations[self.parts.rotation]
        qkv = parts.qkv.multiply(self._input(parts.attention_norm, x))
        return paged.backend.rotate_and_attend(paged, self._layer, qkv, rotation, parts.head_norms, parts.attention)

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        """Compute the rest of the layer, in which tokens are independent of each other. `x` may be overwritten."""
        parts = self.parts
        x = self._add(parts.output, parts.attention_output_norm, attended, x)
        inputs, mlp = self._input(parts.mlp_norm, x), parts.mlp
        if isinstance(mlp, FusedExperts):
            return mlp.add(inputs, x)
        activated = self._gates[mlp.activation](mlp.gate_up.multiply(inputs))
        return self._add(mlp.down, parts.mlp_output_norm, activated, x)

    def _input(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else self._ops.norm(x, *norm)

    def _add(self, weight: Weight, norm: Norm | None, inputs: Tensor, x: Tensor) -> Tensor:
        """Return x + norm(inputs W' + b)."""
        return weight.multiply_add(inputs, x) if norm is None else self._ops.norm_add(weight.multiply(inputs), *norm, x)


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
        make_experts: MakeExperts | None = None,
        name: str = "model",
    ) -> None:
        """Take the weights of transformers' `decoder`, one layer after the other.

        `params` has one entry for each layer. `make_cpu_decoder` makes what runs steps of few tokens in one call; None
        on GPUs. `group` is given where this process holds a part of each layer, and `stage` where it has a part of the
        layers. With `lora`, adapters may change them. `name` is the decoder's in the model.
        """
        super().__init__()
        self.config = decoder.config
        self.tap: LayerTap | None = None
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb
        self._ops = ops
        self._layers, self._stage, self._lora = [], stage, lora
        self.rotary = Rotary.of(decoder)
        first = 0 if stage is None else stage.layers_of(len(decoder.layers)).start
        family = family_of(decoder.layers[first])
        assert family is not None
        self._rotary_has_halves = family.rotary_has_halves
        # Granite computes x + m * attention(x). Everything that reads x norms it, so that x / m gives the same with
        # epsilon / m^2: layers compute x / m + attention(x / m), without a multiplication. A tap multiplies by m. So do
        # stages before they send x, because the next one may have transformers' own layers.
        self.residual_multiplier = multiplier = family.residual_multiplier_of(decoder.layers[first])
        self.embedding_factor = getattr(decoder, "embedding_multiplier", 1.0) / multiplier
        self.last_norm: Norm | None = None  # a later stage has it
        if stage is None or stage.is_last:
            self.last_norm = _scaled(family.norm_of(decoder.norm), multiplier)
        for index, layer_params in enumerate(params, start=first):
            layer, rotation = decoder.layers[index], self.rotary.by_layer[index]
            fused = FusedLayer(layer, family, layer_params, rotation, ops, method, group, lora, make_experts, name)
            self._layers.append(fused)
            decoder.layers[index] = nn.Identity()
            del layer  # now it is freed, before `params` trims the heap, so that memory holds at most one layer twice
        self.cpu_decoder = make_cpu_decoder([layer.parts for layer in self._layers]) if make_cpu_decoder else None

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        paged: PagedStep,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> MoeModelOutputWithPast:
        """Compute hidden states [1, num_tokens, hidden_size] of positions, and of token ids, [1, num_tokens].

        Models that take more than text embed the tokens themselves, and give `inputs_embeds` in place of their ids.
        Only the hidden states at `paged.logits_indices` are meaningful. Output heads of mixtures read more fields than
        those of other models.
        """
        assert position_ids is not None
        x = self._scale(self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds)
        hidden_states = self.compute(x[0], self.rotations(x, position_ids), paged)
        return MoeModelOutputWithPast(last_hidden_state=hidden_states[None])

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return what enters the first layer [..., hidden_size] for token ids [...]."""
        return self._scale(self.embed_tokens(input_ids))

    def get_input_embeddings(self) -> nn.Module:
        """Return what embeds tokens, as models ask their parts for it."""
        found: nn.Module = self.embed_tokens
        return found

    def _scale(self, embedded: Tensor) -> Tensor:
        return embedded if self.embedding_factor == 1.0 else embedded * self.embedding_factor

    def rotations(self, x: Tensor, position_ids: Tensor) -> list[Rotation]:
        """Return the rotations of a step's positions [1, num_tokens], in the dtype of x; each layer has one of them."""
        found = []
        for kind in self.rotary.kinds:
            given = {} if kind is None else {"layer_type": kind}
            cosines, sines = self.rotary_emb(x, position_ids=position_ids, **given)
            if self._rotary_has_halves:
                cosines, sines = cosines.repeat(1, 1, 2), sines.repeat(1, 1, 2)
            found.append((cosines[0].to(x.dtype), sines[0].to(x.dtype)))  # OLMo 2 leaves them in float32
        return found

    def compute(self, x: Tensor, rotations: Sequence[Rotation], paged: PagedStep) -> Tensor:
        """Return the hidden states [num_tokens, hidden_size] of embedded tokens, which may be overwritten."""
        if self._stage is not None and not self._stage.is_first:
            x = self._stage.receive(x)
            if self.residual_multiplier != 1.0:
                x = x / self.residual_multiplier
        # With few tokens, leaving some out of the last layer saves nothing, so logits_indices is not used here.
        tap = self.tap
        adapters = None if self._lora is None else self._lora.step
        if self.cpu_decoder is not None and self.cpu_decoder.can_decode(len(x), paged, adapters):
            self.cpu_decoder.decode(x, rotations, paged, tap, adapters)
            return self._output(x)
        if self.cpu_decoder is not None:
            self.cpu_decoder.use_all_threads()
        is_last_stage = self._stage is None or self._stage.is_last
        *layers, last = self._layers
        if self.cpu_decoder is not None and self.cpu_decoder.can_prefill(paged, adapters):
            self.cpu_decoder.decode(x, rotations, paged, tap, adapters, len(layers))
        else:
            for index, layer in enumerate(layers):
                if tap is not None:
                    tap.keep_copy(index, x)
                x = layer.finish(layer.attend(x, rotations, paged), x)
        attended, indices = last.attend(x, rotations, paged), paged.logits_indices
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
            if self.residual_multiplier != 1.0:
                x = x * self.residual_multiplier
            self._stage.send_on(x)
            return x
        return self._ops.norm(x, *self.last_norm)


def _row_parallel(part: Weight, group: RankGroup | None) -> Weight:
    return part if group is None else RowParallelWeight(part, group)


def _scaled(norm: Norm | None, multiplier: float) -> Norm | None:
    """Return the norm of x / multiplier that is the norm of x."""
    return None if norm is None else (norm[0], norm[1] / multiplier**2)


def can_fuse(layer: nn.Module, with_experts: bool = True) -> bool:
    """Return whether FusedLayer computes the same as `layer`; `with_experts`, whether it can if the layer has some."""
    family = family_of(layer)
    if family is None or family.activation_of(layer) is None:
        return False
    experts = family.experts_of(layer)
    if experts is not None and not with_experts:
        return False
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear | QuantizedLinear)]
    sizes = {size for linear in linears for size in (linear.in_features, linear.out_features)}
    if experts is not None:
        sizes = (sizes - {1}) | experts.sizes_of(layer)  # 1: the score of an expert of all tokens
    return (
        family.residual_multiplier_of(layer) > 0.0
        and all(map(is_plain, linears))
        and not any(size % LANES for size in sizes)
    )


def fuse_layers(
    model: Any,
    decoder: Any,
    params: list[AttentionParams],
    ops: LayerOps,
    method: LinearMethod,
    make_cpu_decoder: MakeCpuDecoder | None = None,
    ranks: Ranks | None = None,
    lora: LoraPool | None = None,
    make_experts: MakeExperts | None = None,
) -> nn.Module | None:
    """Replace the model's decoder and return the new one; None, and no change, if some layer cannot be fused.

    In models that take more than text, the decoder's `language_model` is replaced, and the decoder returned.
    """
    if getattr(model, "model", None) is not decoder:
        return None
    parent, name, whole = model, "model", decoder
    language_model = getattr(decoder, "language_model", None)
    if language_model is not None and not hasattr(decoder, "layers"):
        parent, name, decoder = decoder, "language_model", language_model
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return None
    group, stage = (None, None) if ranks is None else (ranks.group, ranks.stage)
    of_stage = [layer for layer in layers if not isinstance(layer, PassOn)]
    can_fuse_all = all(can_fuse(layer, make_experts is not None) for layer in of_stage)
    families = {family_of(layer) for layer in of_stage}
    if group is not None:
        can_fuse_all = can_fuse_all and all(family is not None and family.can_be_divided for family in families)
    if lora is not None:  # adapters may change the expert of all tokens
        shared = [family.experts.shared_expert for family in families if family is not None and family.experts]
        can_fuse_all = can_fuse_all and not any(shared)
    if group is not None:  # parts may differ in size; ranks with and without fused layers would exchange other tensors
        can_fuse_all = group.all_can(can_fuse_all)
    if not can_fuse_all:
        return None
    full_name = name if parent is model else f"model.{name}"
    del of_stage  # each layer is freed as soon as it is replaced
    fused = FusedDecoder(decoder, params, ops, method, make_cpu_decoder, group, stage, lora, make_experts, full_name)
    setattr(parent, name, fused)
    return fused if parent is model else whole
