"""Tests of configurations from GGUF metadata: they are those that the model was made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from servekit.errors import ConfigError
from servekit.gguf.architectures import ARCHITECTURES, index_of
from servekit.gguf.header import read_header
from servekit.gguf.model_config import llama3_factors, model_config
from tests.support.gguf_files import metadata_of, tokenizer_metadata, write_file, write_gguf

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "qwen2": {"rms_norm_eps": 1e-6, "head_dim": 8},
    "qwen3": {"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    "gemma": {"rms_norm_eps": 1e-6},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "phi3": {"head_dim": 8, "sliding_window": 24},
}
# What a GGUF file does not say, and what has no part in answers.
IGNORED = {"dtype", "torch_dtype", "initializer_range", "transformers_version", "quantization_config", "_name_or_path"}
IGNORED |= {"use_cache", "attention_dropout", "architectures", "use_sliding_window", "max_window_layers"}
IGNORED |= {"original_max_position_embeddings", "resid_pdrop", "embd_pdrop"}


def make(model_type: str) -> Any:
    config = AutoConfig.for_model(model_type, **{**SHAPE, **MODELS[model_type]})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def read_back(file: Path, directory: Path) -> Any:
    (directory / "config.json").write_text(json.dumps(model_config(read_header(file))))
    return AutoConfig.from_pretrained(directory)


def alike(found: Any, expected: Any) -> bool:
    """Compare configurations. The file has numbers as float32, and may say more than the model's own config.json."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return all(alike(found.get(key), expected[key]) for key in expected)
    if isinstance(expected, float) and found is not None:
        return bool(found == pytest.approx(expected, rel=1e-6))
    return bool(found == expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_the_configuration_of_a_file_is_the_one_of_its_model(model_type: str, tmp_path: Path) -> None:
    model = make(model_type)
    write_gguf(tmp_path / "model.gguf", model, "F16")
    found, expected = (
        {key: value for key, value in config.to_dict().items() if key not in IGNORED}
        for config in (read_back(tmp_path / "model.gguf", tmp_path), model.config)
    )
    assert alike(found, expected), (found, expected)


@pytest.mark.parametrize("model_type", MODELS)
def test_every_tensor_of_a_file_has_the_name_of_a_parameter(model_type: str, tmp_path: Path) -> None:
    model = make(model_type)
    write_gguf(tmp_path / "model.gguf", model, "F16")
    index = index_of(read_header(tmp_path / "model.gguf"), 4, 2)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: tensor.shape for name, tensor in index.tensors.items()} == expected
    assert set(ARCHITECTURES) == {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"}


def written(path: Path, changes: dict[str, Any], **tensors: np.ndarray) -> Path:
    model = make("llama")
    fields = metadata_of(model) | tokenizer_metadata(160) | changes
    arrays = {"token_embd.weight": np.zeros((160, 32), np.float32), **tensors}
    arrays |= {f"blk.{layer}.attn_norm.weight": np.ones(32, np.float32) for layer in range(7)}
    return write_file(path / "model.gguf", fields, {name: (array, "F32") for name, array in arrays.items()})


def test_llama_3_scaling_is_found_by_the_factors_that_it_gives(tmp_path: Path) -> None:
    factors = np.array(llama3_factors(10000.0, 16, 32.0), np.float32)
    base = {"llama.rope.freq_base": 10000.0}
    file = written(tmp_path, base, **{"rope_freqs.weight": factors})
    config = read_back(file, tmp_path)
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["factor"] == 32.0
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(frequencies, plain / torch.from_numpy(factors), rtol=1e-5)
    factors[3] *= 1.01
    with pytest.raises(ConfigError, match="other factors than Llama 3's"):
        model_config(read_header(written(tmp_path, base, **{"rope_freqs.weight": factors})))
    with pytest.raises(ConfigError, match="not 8 numbers"):
        model_config(read_header(written(tmp_path, {}, **{"rope_freqs.weight": factors[:5]})))


def test_positions_that_are_scaled_are_scaled_by_transformers(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    parameters = model_config(read_header(written(tmp_path, linear)))["rope_parameters"]
    assert parameters == {"rope_type": "linear", "rope_theta": 500000.0, "factor": 4.0}
    yarn = {**linear, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 24}
    parameters = model_config(read_header(written(tmp_path, yarn)))["rope_parameters"]
    assert parameters["rope_type"] == "yarn" and parameters["original_max_position_embeddings"] == 24


def test_all_tokens_that_end_a_turn_end_an_answer(tmp_path: Path) -> None:
    tokens = tokenizer_metadata(160)["tokenizer.ggml.tokens"]
    changes: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*tokens[:3], "<|eot_id|>", "<|im_end|>", *tokens[5:]],
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1] + [1] * 155,
        "tokenizer.ggml.eot_token_id": 7,
    }
    config = model_config(read_header(written(tmp_path, changes)))
    assert config["eos_token_id"] == [2, 3, 7], "<|im_end|> is a common token of this file"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "architecture 'mamba', which servekit does not read from GGUF files"),
    ({"llama.expert_count": 8}, "models with experts are not read"),
    ({"llama.block_count": 2**31 - 1}, "the file has .* tensors"),
    ({"llama.block_count": None}, "block_count = None: servekit needs one positive number"),
    ({"llama.embedding_length": "many"}, "embedding_length = many"),
    ({"llama.attention.head_count_kv": [2, 4, 2]}, "one positive number for all layers"),
    ({"llama.attention.key_length": 15}, "heads of an even size"),
    ({"llama.attention.value_length": 8}, "different sizes"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "positive number"),
    ({"llama.rope.dimension_count": 8}, "RoPE for all .* numbers of a head"),
    ({"llama.rope.scaling.type": "dynamic"}, "reads none, linear, yarn"),
    ({"split.count": 3}, "one of several parts; put them together with llama-gguf-split"),
    ({"tokenizer.ggml.eos_token_id": 160}, "its vocabulary has 160 tokens"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_is_missing_or_not_read_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        model_config(read_header(written(tmp_path, changes)))


def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, {}, **{"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ConfigError, match=r"'blk\.0\.attn_sinks\.weight', which servekit does not know"):
        index_of(read_header(file), 4, 2)
