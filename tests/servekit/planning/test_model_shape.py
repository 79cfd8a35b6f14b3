"""Claims about what is read from config.json, beside the models that transformers makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from servekit.errors import ConfigError
from servekit.planning.model_shape import read_shape
from servekit.planning.roofline import Layout
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import ARCHITECTURES, make_model

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
LLAMA_2_7B = {**LLAMA_8B, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
}
UNUSUAL = ("phi", "stablelm", "falcon", "gpt_neo")  # their biases, norms or settings count here, and not at real size
SHAPES = [name for name in ARCHITECTURES if name not in UNUSUAL]


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    """At a size at which norms and biases, which are not all counted, are below a hundredth."""
    model_type, configuration = ARCHITECTURES[name]
    sizes = {"hidden_size": 768, "n_embd": 768, "head_dim": 128, "intermediate_size": 2048, "ffn_dim": 2048}
    larger = {key: sizes.get(key, value) for key, value in configuration.items()} | {"vocab_size": 4096}
    if "word_embed_proj_dim" in larger:
        larger["word_embed_proj_dim"] = 768
    config = AutoConfig.for_model(model_type, **larger, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    actual = sum(parameter.numel() for parameter in model.parameters())
    assert read_shape(config.to_dict()).num_parameters == pytest.approx(actual, rel=0.01)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mixtral", "gemma2", "gpt2", "opt", "gpt_neox", "phi3", "gpt_oss", "olmo2"]
)
def test_bytes_of_a_token_and_the_number_of_blocks_are_what_a_worker_reports(name: str, tmp_path: Path) -> None:
    model_type, configuration = ARCHITECTURES[name]
    # Heads of 16, as in models of real size: smaller ones are padded.
    wide = {"hidden_size": 96, "n_embd": 96, "head_dim": 16, "word_embed_proj_dim": 96}
    make_model(tmp_path, model_type, {key: wide.get(key, value) for key, value in configuration.items()})
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    layout = Layout(shape=shape, kv_format="float32")
    runner = InProcessEngine(load(tmp_path), block_size=16, kv_cache_memory_bytes=1_000_000).runner
    assert layout.kv_bytes_per_token == runner.kv_bytes_per_token
    assert layout.num_kv_blocks(1_000_000, block_size=16) == runner.cache.num_blocks


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA_8B, 8.03), (LLAMA_2_7B, 6.74), (DEEPSEEK_V3, 671)], ids=["8B", "7B", "V3"]
)
def test_known_models_have_their_known_size(config: dict[str, object], billions: float) -> None:
    assert read_shape(config).num_parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_token_of_a_mixture_uses_a_part_of_it() -> None:
    """DeepSeek-V3's report (arXiv 2412.19437): 671 billion parameters, 37 of them for a token."""
    assert read_shape(DEEPSEEK_V3).num_active_parameters / 1e9 == pytest.approx(37, rel=0.02)


def test_layers_that_are_listed_as_dense_have_no_experts() -> None:
    fields = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    every, two = read_shape({**LLAMA_8B, **fields}), read_shape({**LLAMA_8B, **fields, "mlp_only_layers": [0, 5]})
    assert two.num_expert_parameters == every.num_expert_parameters * 30 // 32


def test_falcon_has_one_head_for_keys_only_in_its_first_form() -> None:
    falcon = {
        "model_type": "falcon",
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_kv_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "multi_query": True,
    }
    assert read_shape(falcon).num_kv_heads == 1
    assert read_shape({**falcon, "new_decoder_architecture": True}).num_kv_heads == 4


def test_the_language_part_of_a_model_of_text_and_images_is_read() -> None:
    assert read_shape({"model_type": "llava", "text_config": LLAMA_8B}) == read_shape(LLAMA_8B)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers = 'many'"),
        ({"vocab_size": -1}, "vocab_size = -1"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_hidden_layers": 2**60}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
    ],
)
def test_a_configuration_without_its_numbers_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_shape({**LLAMA_8B, **change})


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("cohere2", {}),
        ("gpt_oss", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 5}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}),
        ("llama", {}),
    ],
)
@pytest.mark.parametrize("is_listed", [True, False])
def test_layers_with_a_window_are_those_of_transformers(
    model_type: str, fields: dict[str, Any], is_listed: bool
) -> None:
    config = AutoConfig.for_model(model_type, num_hidden_layers=12, **fields)
    expected = sum(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ())
    written = {key: value for key, value in config.to_dict().items() if is_listed or key != "layer_types"} | fields
    assert read_shape(written).num_window_layers == expected


def test_all_layers_of_an_old_mistral_have_a_window() -> None:
    assert read_shape({**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}).num_window_layers == 32
