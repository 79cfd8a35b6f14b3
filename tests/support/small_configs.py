"""Make a small configuration of any model type of transformers, by the names of its fields.

Sizes have the same few names everywhere, or other names that a class maps to these (`attribute_map`). So one table
serves for nearly all types. What a type needs beside that is in `OWN`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

VOCAB_SIZE = 128
NUM_LAYERS = 4
FIRST_OTHER_TOKEN = 100  # from here on are tokens that stand for images and the like, which no prompt has

# A field's name, or the name that its class maps to it, and its small value. Fields that are None stay None.
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "n_words", "n_token", "decoder_vocab_size"), VOCAB_SIZE
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), NUM_LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "dim_model", "n_embd", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "d_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("dense_intermediate_size", "mlp_dim", "dim_ff", "dff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("prefix_dense_intermediate_size", "feed_forward_size", "mlp_hidden_size"), 96),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "num_sliding_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "num_attention_groups"), 2),
    **dict.fromkeys(("num_global_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_kv", "dim_head", "attention_head_dim", "global_head_dim"), 16),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("qk_head_dim",), 24),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len", "n_positions", "n_ctx", "seq_length"), 256),
    **dict.fromkeys(("max_target_positions", "max_source_positions", "model_max_length"), 256),
    **dict.fromkeys(("sliding_window", "local_attention", "attention_window_size"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group",), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("index_head_dim",), 16),
    **dict.fromkeys(("index_n_heads",), 2),
    **dict.fromkeys(("index_topk",), 8),
    **dict.fromkeys(("index_block_size", "index_topk_blocks", "index_kpool"), 2),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 16),
    "query_pre_attn_scalar": 16,
    "max_window_layers": 2,
    "num_kv_shared_layers": 0,
    # Of what is no part of a model for text.
    "image_size": 28,
    "patch_size": 14,
    "num_mel_bins": 16,
    **dict.fromkeys(
        ("out_hidden_size", "projection_dim", "output_dim", "text_hidden_size", "projector_hidden_size"), 64
    ),
    "num_position_embeddings": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_ssm": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "state_size": 8,
}

# What the table above cannot know, by model type; of parts, too.
OWN: dict[str, dict[str, Any]] = {
    "dots3_note_text": {"num_key_value_heads": 4},
    "bloom": {"seq_length": 256},
    "deepseek_v2": {"num_experts_per_tok": 2},
    **{
        key: {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
        for key in (
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "paddleocr_vl_text",
            "qwen2_5_omni_text",
            "glm4v_text",
            "glm_ocr_text",
        )
    },
    "glm5_next_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    **{key: {"layer_types": ["conv", "full_attention"] * 2} for key in ("lfm2", "lfm2_moe")},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "moshi": {"audio_vocab_size": 64},
    "nemotron": {"num_key_value_heads": 2},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 16},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [1, 1, 2],
            "partial_rotary_factor": 0.5,
        }
    },
    "longcat_flash": {"head_dim": 8},
    "step3p7_text": {"sliding_window": 8},
    "emu3": {"vocabulary_map": {"<image>": 100, "<|extra_200|>": 101}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
}


def small_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of a model of four layers, as its class's defaults describe it but for the sizes."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**small_fields(config_class))


def small_fields(config_class: Any) -> dict[str, Any]:
    """Return the arguments that make a small configuration."""
    fields, default_config = dataclasses.fields(config_class), config_class()
    mapped = {own: name for name, own in (getattr(config_class, "attribute_map", None) or {}).items()}
    small: dict[str, Any] = {}
    for name, part_class in (config_class.sub_configs or {}).items():
        if part_class is AutoConfig:  # the class that the defaults choose
            part_class = type(getattr(default_config, name, None))
        if issubclass(part_class, PreTrainedConfig):
            small[name] = {"model_type": part_class.model_type, **small_fields(part_class)}
    defaults = {field.name: _default(field) for field in fields}
    next((value for name, value in defaults.items() if mapped.get(name, name) == "num_hidden_layers"), None)
    tokens = iter(range(FIRST_OTHER_TOKEN, VOCAB_SIZE))
    for name, default in defaults.items():
        value = _small(mapped.get(name, name), name, default)
        if name in _TOKENS:
            small[name] = _TOKENS[name]
        elif _IS_TOKEN.search(name) and type(default) is int and default >= FIRST_OTHER_TOKEN:
            small[name] = next(tokens)
        elif value is not None:
            small[name] = value
    small |= _layer_lists(default_config, list(defaults))
    if "kv_lora_rank" in defaults and "num_key_value_heads" in defaults:  # latent attention: each head has its own keys
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    return {**small, **OWN.get(config_class.model_type, {})}


def _layer_lists(config: Any, names: list[str]) -> dict[str, list[Any]]:
    """Return lists with an item for each layer, such as `layer_types`, for a few layers that show every kind."""
    num_layers = _value(config, "num_hidden_layers")
    found = {name: _value(config, name) for name in names}
    lists = {name: list(items) for name, items in found.items() if _is_per_layer(items, num_layers)}
    rows = list(zip(*lists.values(), strict=True))
    chosen = sorted({repr(row): index for index, row in reversed(list(enumerate(rows)))}.values())[:NUM_LAYERS]
    chosen = sorted((chosen * NUM_LAYERS)[:NUM_LAYERS])
    return {name: [items[index] for index in chosen] for name, items in lists.items()}


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # it differs among the layers
        return None


def _is_per_layer(items: Any, num_layers: Any) -> bool:
    return isinstance(items, list | tuple) and len(items) == num_layers and not isinstance(items[0], list | dict)


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_IS_TOKEN = re.compile(r"(_token_id|_token_index|_id)$")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _small(name: str, own: str, default: Any) -> Any:
    """Return the small value of a field; None if it keeps its default."""
    value = SMALL.get(name, SMALL.get(own))
    if own == "head_dim":
        return value  # also of those that would compute it, because some do not
    is_number = isinstance(default, int) and not isinstance(default, bool)
    return value if is_number and value is not None and default > value else None
