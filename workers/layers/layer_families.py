"""What the parts of a decoder layer are called in transformers, and how they are put together, by family.

Layers are recognised by the names of their classes, because a layer's meaning cannot be read from its parts. The
worker's self-check compares the fused layers with the output of transformers' own layers before the first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Norm = tuple[Tensor, float]  # weight [size] float32, epsilon

# The activation functions of MLPs that are fused, by the names of their classes in transformers.
ACTIVATIONS = {"SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0  # the constants of gpt-oss; C has no others


def norm_of(module: Any) -> Norm:
    """Return an RMS norm that multiplies by its weight, in float32: the weight is rounded no more than it is stored."""
    return module.weight.detach().float(), module.variance_epsilon


def norm_of_one_and_weight(module: Any) -> Norm:
    """Return an RMS norm that multiplies by 1 + its weight, as Gemma's do."""
    return 1.0 + module.weight.detach().float(), module.eps


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of the parts of a mixture of experts, and what differs between families."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    is_transposed: bool = False  # gpt-oss: matrices are [num_inputs, num_outputs], and columns of gate and up alternate
    shared_expert: str | None = None  # an MLP that computes all tokens
    shared_router: str | None = None  # a linear layer with one output: the share of that MLP for a token

    def is_in(self, layer: nn.Module) -> bool:
        """Whether the layer has experts. In some models, only every second layer has."""
        parent, _, name = self.experts.rpartition(".")
        return hasattr(layer.get_submodule(parent), name)

    def activation_of(self, layer: nn.Module) -> str | None:
        """Return the name of the experts' activation function; None if it is not fused."""
        experts: Any = layer.get_submodule(self.experts)
        if self.shared_router is not None and not hasattr(layer.get_submodule(self.shared_router), "weight"):
            return None  # its weights are quantized
        if self.is_transposed:
            return "clamped_silu" if (experts.alpha, experts.limit) == (CLAMPED_ALPHA, CLAMPED_LIMIT) else None
        return ACTIVATIONS.get(type(experts.act_fn).__name__)

    def sizes_of(self, layer: nn.Module) -> set[int]:
        """Return the sizes of the vectors between the experts' matrices."""
        experts: Any = layer.get_submodule(self.experts)
        return {*experts.gate_up_proj.shape[1:], *experts.down_proj.shape[1:]}


@dataclass(frozen=True, slots=True)
class Family:
    """The names of a layer's parts, and what differs between families.

    A layer computes y = x + attention(x), and then y + mlp(y). Attention and the MLP may each have a norm of the input
    and a norm of the output. `qkv` and `gate_up` have one name if the files have one matrix for all of them.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    activation: str = "mlp.act_fn"
    attention_norm: str | None = "input_layernorm"
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_output_norm: str | None = None
    norm_of: Callable[[Any], Norm] = norm_of
    norms_span_heads: bool = False  # the norms of queries and keys are over all heads together
    scales_residuals: bool = False  # outputs of attention and MLP are multiplied by `residual_multiplier`
    rotary_has_halves: bool = False  # the decoder gives one half of the cosines and sines; the halves are equal
    experts: ExpertNames | None = None  # in place of the MLP, in layers that have them
    can_be_divided: bool = True  # among ranks: each holds whole heads and a part of the MLP

    def norm_in(self, layer: nn.Module, name: str | None) -> Norm | None:
        """Return the layer's norm of this name; None if the family has none there."""
        return None if name is None else self.norm_of(layer.get_submodule(name))

    def residual_multiplier_of(self, layer: Any) -> float:
        """Return the factor of the outputs of attention and MLP."""
        return float(layer.residual_multiplier) if self.scales_residuals else 1.0

    def experts_of(self, layer: nn.Module) -> ExpertNames | None:
        """Return the names of the layer's experts; None if it has none."""
        return self.experts if self.experts is not None and self.experts.is_in(layer) else None

    def activation_of(self, layer: nn.Module) -> str | None:
        """Return the name of the layer's activation function; None if it is not fused."""
        experts = self.experts_of(layer)
        if experts is not None:
            return experts.activation_of(layer)
        return ACTIVATIONS.get(type(layer.get_submodule(self.activation)).__name__)


LLAMA = Family()
PHI3 = Family(
    qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",), activation="mlp.activation_fn", can_be_divided=False
)
GEMMA = Family(norm_of=norm_of_one_and_weight)
# Norms of the inputs and of the outputs of attention and MLP.
GEMMA2 = Family(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
    norm_of=norm_of_one_and_weight,
)
# Norms of the outputs only.
OLMO2 = Family(
    attention_norm=None,
    attention_output_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_output_norm="post_feedforward_layernorm",
    norms_span_heads=True,
    can_be_divided=False,
)
GRANITE = Family(scales_residuals=True)
MIXTURE = Family(experts=ExpertNames(), can_be_divided=False)
QWEN2_MOE = Family(
    experts=ExpertNames(shared_expert="mlp.shared_expert", shared_router="mlp.shared_expert_gate"), can_be_divided=False
)
GPT_OSS = Family(
    experts=ExpertNames(router="mlp.router", is_transposed=True), rotary_has_halves=True, can_be_divided=False
)

FAMILIES = {
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Qwen2DecoderLayer": LLAMA,
    "Qwen3DecoderLayer": LLAMA,
    "Phi3DecoderLayer": PHI3,
    "GraniteDecoderLayer": GRANITE,
    "GemmaDecoderLayer": GEMMA,
    "Gemma2DecoderLayer": GEMMA2,
    "Gemma3DecoderLayer": GEMMA2,
    "Olmo2DecoderLayer": OLMO2,
    "Olmo3DecoderLayer": OLMO2,
    "MixtralDecoderLayer": MIXTURE,
    "Qwen3MoeDecoderLayer": MIXTURE,
    "Qwen2MoeDecoderLayer": QWEN2_MOE,
    "GptOssDecoderLayer": GPT_OSS,
}


def family_of(layer: nn.Module) -> Family | None:
    """Return the layer's family; None if its layers are not fused."""
    return FAMILIES.get(type(layer).__name__)


@dataclass(frozen=True, slots=True)
class Rotary:
    """How a decoder computes cosines and sines: once for all of its layers, or by kind of layer (Gemma 3)."""

    kinds: tuple[str | None, ...]  # each is given to the decoder's module; None: it takes no kind
    by_layer: tuple[int, ...]  # of each layer, the number of its kind

    @classmethod
    def of(cls, decoder: Any) -> Rotary:
        """Read it from the decoder's module, which has one set of frequencies for each kind of layer, or one in all."""
        num_layers = len(decoder.layers)
        if not hasattr(decoder.rotary_emb, "layer_types"):
            return cls((None,), (0,) * num_layers)
        kinds = tuple(decoder.rotary_emb.layer_types)
        return cls(kinds, tuple(kinds.index(kind) for kind in decoder.config.layer_types[:num_layers]))
