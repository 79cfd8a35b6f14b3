"""Decoder layers of the Llama family in nine calls instead of some forty.

transformers' layers are made of small operations, each of which reads and writes everything once more, and asks torch
once more. What is here is made of such a layer's weights: projections of one input are one multiplication, the sum with
what came in is part of the multiplication before it, and what is between two multiplications is one pass. On a CPU that
multiplies bfloat16, steps of few tokens are one call in all (cpu_decoder.py).

Which layers these are is a list of names, for what a layer means is not to be read from its parts. That it is meant
right is seen by the worker's self-check, which compares with what transformers' own layers said before.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from workers.cpu_decoder import CpuDecoder, LayerParts, Norm
from workers.packed_linear import MakeWeight, joined
from workers.paged_step import HeadNorms, PagedStep, Rotation, Score

FUSIBLE = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
LANES = 16


class LayerKernels(Protocol):
    """What is between a layer's multiplications, one pass each."""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / rms(x) * weight, for x [num_tokens, size]."""

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""


class FusedLayer:
    """x + attention(norm(x)), and the same with an MLP; SwiGLU, and rotary positions."""

    def __init__(self, layer: Any, score: Score, kernels: LayerKernels, weight: MakeWeight) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        head_norms = None
        if hasattr(attention, "q_norm"):
            (query_weight, epsilon), (key_weight, _) = map(_parts, (attention.q_norm, attention.k_norm))
            head_norms = HeadNorms(query_weight, key_weight, epsilon)
        self._kernels, self._layer = kernels, attention.layer_idx
        self.parts = LayerParts(
            attention_norm=_parts(layer.input_layernorm),
            qkv=weight(*joined(attention.q_proj, attention.k_proj, attention.v_proj)),
            head_norms=head_norms,
            score=score,
            output=weight(*joined(attention.o_proj)),
            mlp_norm=_parts(layer.post_attention_layernorm),
            gate_up=weight(*joined(mlp.gate_proj, mlp.up_proj)),
            down=weight(*joined(mlp.down_proj)),
        )

    def attend(self, x: Tensor, rotation: Rotation, paged: PagedStep) -> Tensor:
        """What attention makes of x [num_tokens, size], before it is projected: [num_tokens, num_heads * head_dim]."""
        parts = self.parts
        qkv = parts.qkv.multiply(self._kernels.norm(x, *parts.attention_norm))
        return paged.attention.attend_rotated(paged, self._layer, qkv, rotation, parts.head_norms, parts.score)

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        """The rest of the layer, for which tokens do not matter to each other."""
        parts, kernels = self.parts, self._kernels
        x = parts.output.add(attended, x)
        gate_up = parts.gate_up.multiply(kernels.norm(x, *parts.mlp_norm))
        return parts.down.add(kernels.swiglu(gate_up), x)


class FusedDecoder(nn.Module):
    """A whole decoder of such layers, in the place of transformers' own.

    In the last layer, what nobody looks at ends with its keys and values: of a prompt chunk that is nearly all.
    """

    def __init__(self, decoder: Any, scores: list[Score], kernels: LayerKernels, weight: MakeWeight) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = decoder.embed_tokens, decoder.rotary_emb
        self._kernels, self._last_norm = kernels, _parts(decoder.norm)
        self._layers = []
        for index, score in enumerate(scores):
            self._layers.append(FusedLayer(decoder.layers[index], score, kernels, weight))
            decoder.layers[index] = nn.Identity()  # so that memory holds one layer twice at most
        self._few = CpuDecoder([layer.parts for layer in self._layers])

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, *, paged: PagedStep, **_: Any
    ) -> BaseModelOutputWithPast:
        """For token ids and positions [1, num_tokens], as transformers has it. Only `paged.wanted` hidden states mean
        anything.
        """
        x = self.embed_tokens(input_ids)
        cosines, sines = self.rotary_emb(x, position_ids=position_ids)
        x, rotation = x[0], (cosines[0], sines[0])
        if self._few.can_take(len(x), paged):  # whoever looks at it: of few tokens, to leave some out saves nothing
            self._few.decode(x, rotation, paged)
            return self._output(x)
        *layers, last = self._layers
        for layer in layers:
            x = layer.finish(layer.attend(x, rotation, paged), x)
        attended, wanted = last.attend(x, rotation, paged), paged.wanted
        if wanted is None or len(wanted) == len(x):
            return self._output(last.finish(attended, x))
        whole = torch.zeros_like(x)
        whole[wanted] = last.finish(attended[wanted], x[wanted])
        return self._output(whole)

    def _output(self, x: Tensor) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self._kernels.norm(x, *self._last_norm)[None])


def _parts(norm: Any) -> Norm:
    return norm.weight.detach(), norm.variance_epsilon


def can_fuse(layer: nn.Module) -> bool:
    """Whether it is a layer that FusedLayer says the same as."""
    if type(layer).__name__ not in FUSIBLE:
        return False
    linears = [module for module in layer.modules() if isinstance(module, nn.Linear)]
    is_silu = getattr(layer.self_attn.config, "hidden_act", None) == "silu"  # type: ignore[union-attr]
    sizes = {size for linear in linears for size in (linear.in_features, linear.out_features)}
    return is_silu and all(type(linear) is nn.Linear for linear in linears) and not any(size % LANES for size in sizes)


def fuse_layers(
    model: Any, decoder: Any, scores: list[Score], kernels: LayerKernels, weight: MakeWeight
) -> nn.Module | None:
    """Replace the model's decoder, if all its layers can be; returns what is there now."""
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(map(can_fuse, layers)) or model.model is not decoder:
        return None
    fused = FusedDecoder(decoder, scores, kernels, weight)
    model.model = fused
    return fused
