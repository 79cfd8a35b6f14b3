"""Small random models of many architectures, made on the spot: the test suite downloads nothing.

Weights are scaled up from transformers' initialisation, so that logits are far enough apart for greedy decoding to
mean something.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 128

_LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_ONE_HEAD_PER_KEY = {**_LLAMA_LIKE, "num_key_value_heads": 6}
_PARTLY_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
_TWO_ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
_MULTIPLIERS = {  # of Granite 3, nearly
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}
_OPT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
_FALCON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

# name -> (model_type, configuration)
ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", _LLAMA_LIKE),
    "mistral_sliding": ("mistral", {**_LLAMA_LIKE, "sliding_window": 9}),
    "mixtral": ("mixtral", {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", _LLAMA_LIKE),
    "gemma2": ("gemma2", {**_LLAMA_LIKE, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**_LLAMA_LIKE, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3_two_rotations": (
        "gemma3_text",
        {**_LLAMA_LIKE, "sliding_window": 8, "layer_types": _MIXED_LAYERS, "rope_parameters": _TWO_ROTATIONS},
    ),
    "phi": ("phi", _ONE_HEAD_PER_KEY),
    "phi3": ("phi3", {**_LLAMA_LIKE, "sliding_window": 11}),
    "phi3_partly_rotated": ("phi3", {**_LLAMA_LIKE, "rope_parameters": _PARTLY_ROTATED}),  # as Phi-4-mini is
    "opt": ("opt", _OPT),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", _ONE_HEAD_PER_KEY),
    "olmo2": ("olmo2", _LLAMA_LIKE),
    "olmo3": ("olmo3", {**_LLAMA_LIKE, "sliding_window": 8, "layer_types": _MIXED_LAYERS}),
    "granite": ("granite", _LLAMA_LIKE),
    "granite_scaled": ("granite", {**_LLAMA_LIKE, **_MULTIPLIERS}),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA_LIKE, **_EXPERTS, "norm_topk_prob": True}),
    # Every second layer has experts.
    "qwen2_moe": (
        "qwen2_moe",
        {**_LLAMA_LIKE, **_EXPERTS, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 2},
    ),
    # Their decoder layers drop keyword arguments; see workers/loading/attention_recording.py.
    "stablelm": ("stablelm", {**_LLAMA_LIKE, "qk_layernorm": True, "use_parallel_residual": True}),
    "nemotron": ("nemotron", _LLAMA_LIKE),
    # They do their attention themselves; see workers/loading/own_attention.py.
    "bloom": ("bloom", {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": 256}),
    "mpt": ("mpt", {"vocab_size": VOCAB_SIZE, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256}),
    "falcon": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": ("falcon", _FALCON),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 8}),
    "codegen": ("codegen", {**_GPT2, "n_head": 4, "rotary_dim": 8}),
    "gpt_neo": (
        "gpt_neo",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": 6,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "max_position_embeddings": 256,
        },
    ),
    "starcoder2": ("starcoder2", {**_LLAMA_LIKE, "sliding_window": 10}),
    "gpt_oss": (
        "gpt_oss",
        {**_LLAMA_LIKE, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

# Their sizes are multiples of a vector's also if they are divided by two, so that divided layers are fused, too.
_WIDE = {**_LLAMA_LIKE, "head_dim": 16, "intermediate_size": 192}
WIDE_ARCHITECTURES = {"llama_wide": ("llama", _WIDE), "qwen3_wide": ("qwen3", _WIDE)}

# Decoders that keep their state elsewhere, or do their attention themselves.
REFUSED: dict[str, tuple[str, dict[str, object]]] = {
    "big_bird": (
        "big_bird",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "attention_type": "original_full",
            "is_decoder": True,
        },
    ),
    "falcon_alibi": ("falcon", {**_FALCON, "alibi": True}),
    "mamba": ("mamba", {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8}),
}


def make_model(directory: Path, model_type: str, configuration: dict[str, object], seed: int = 0) -> PreTrainedModel:
    """Save a small random model to `directory`; returns it, as transformers runs it, in float32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**_TOKENS, **configuration})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    set_weights_apart(model)
    model.save_pretrained(directory)
    return model


def set_weights_apart(model: PreTrainedModel) -> None:
    """Scale up a random model's weights, so that greedy decoding means something, and no two parameters are alike."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5.0 if "embed" not in name else 10.0)
            elif "sinks" in name:
                parameter.normal_()
            else:  # norms' weights and biases: ones and zeros would be the same wherever they are put
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
