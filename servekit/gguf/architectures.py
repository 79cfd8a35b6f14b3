"""Define the supported architectures of GGUF files: llama.cpp's names of their tensors, and transformers' names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from servekit.errors import ConfigError
from servekit.gguf.header import Header
from servekit.protocol.gguf_index import GgufIndex, GgufTensor

# Of a layer; `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_LAYER = _LLAMA_LAYER | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2_LAYER = _LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3_LAYER = _GEMMA2_LAYER | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Read as part of the configuration: they divide the frequencies of rotary positions.
ROPE_FACTORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})

_LAYER_TENSOR = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", re.ASCII)
_OUTSIDE_TENSOR = re.compile(r"(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str  # of transformers
    model_class: str
    layer: dict[str, str] = field(default_factory=lambda: _LLAMA_LAYER)
    interleaves_heads: bool = False
    norms_add_one: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaves_heads=True),  # and Mistral
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _QWEN3_LAYER),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norms_add_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _GEMMA2_LAYER, norms_add_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3_LAYER, norms_add_one=True),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _PHI3_LAYER),
}


def architecture_of(header: Header) -> Architecture:
    """Return the file's architecture. Raises ConfigError for one that is not read."""
    name = header.metadata.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"{header.path} holds a model of the architecture {str(name)[:40]!r}, which servekit does not read from "
            f"GGUF files; it reads {', '.join(ARCHITECTURES)}. Serve the safetensors checkpoint of the same model"
        )
    return found


def index_of(header: Header, num_heads: int, num_key_value_heads: int) -> GgufIndex:
    """Return the file's tensors by the names of transformers' parameters.

    Raises ConfigError for a tensor that the architecture does not have. To leave it out would change every answer.
    """
    architecture = architecture_of(header)
    heads = {"attn_q": num_heads, "attn_k": num_key_value_heads} if architecture.interleaves_heads else {}
    tensors = {}
    for tensor in header.tensors.values():
        if tensor.name in ROPE_FACTORS:
            continue
        in_layer, outside = _LAYER_TENSOR.fullmatch(tensor.name), _OUTSIDE_TENSOR.fullmatch(tensor.name)
        name = None
        if in_layer is not None and in_layer[2] in architecture.layer:
            name = f"model.layers.{int(in_layer[1])}.{architecture.layer[in_layer[2]]}.{in_layer[3]}"
        elif outside is not None and outside[1] in _OUTSIDE:
            name = f"{_OUTSIDE[outside[1]]}.{outside[2]}"
        if name is None or name in tensors:
            raise ConfigError(
                f"{header.path} holds the tensor {tensor.name[:60]!r}, which servekit does not know in models of the "
                f"architecture {header.metadata['general.architecture']}; serve the safetensors checkpoint of the same "
                "model"
            )
        num_interleaved = heads.get(in_layer[2], 0) if in_layer is not None else 0
        if num_interleaved and (tensor.shape[0] % (2 * num_interleaved) or num_interleaved < 1):
            raise ConfigError(
                f"{header.path}: {tensor.name} has {tensor.shape[0]} rows, which are not {num_interleaved} heads of an "
                "even size; the file is damaged, download it again"
            )
        tensors[name] = GgufTensor(
            type=tensor.type,
            shape=tensor.shape,
            offset=tensor.offset,
            num_interleaved_heads=num_interleaved,
            adds_one=architecture.norms_add_one and tensor.name.endswith("norm.weight"),
        )
    return GgufIndex(tensors)
