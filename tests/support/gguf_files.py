"""Write GGUF files of small models, with llama.cpp's own Python package.

Names come from its tables, blocks from its quantization. What it cannot quantize itself gets random blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

ARCHITECTURES = {"gemma3_text": "gemma3"}  # where transformers has another name
# Where blocks have numbers of float16. All other bytes may be anything.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
# What makes the numbers of random blocks about as large as those of a tiny model's weights.
SCALES = {"Q2_K": 4e-3, "Q3_K": 2e-3, "Q4_K": 3e-4, "Q5_K": 2e-4, "Q6_K": 5e-5, "IQ4_NL": 1e-3, "IQ4_XS": 5e-5}
# And what makes them zero in the mean: the mean of the codes from which a minimum is subtracted.
MEANS = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}


def random_blocks(type_name: str, num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Return blocks, uint8 [num_rows, bytes of a row], of any codes and of scales that are small and finite."""
    rng = np.random.default_rng(seed)
    numbers, num_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = rng.integers(0, 256, (num_rows * num_columns // numbers, num_bytes), dtype=np.uint8)
    for offset, factor in zip(HALVES[type_name], (1, MEANS.get(type_name, 1)), strict=False):
        scales = factor * SCALES.get(type_name, 0.05) * rng.uniform(0.5, 1.5, len(blocks))
        blocks[:, offset : offset + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def interleaved(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Order rows as llama.cpp does (`permute` of its convert_hf_to_gguf.py)."""
    shape = (num_heads, 2, len(matrix) // num_heads // 2, *matrix.shape[1:])
    return matrix.reshape(shape).swapaxes(1, 2).reshape(matrix.shape)


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return the keys that llama.cpp's converter writes for a model's configuration."""
    config = model.config
    kind = ARCHITECTURES.get(config.model_type, config.model_type)
    rope = config.rope_parameters
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float((rope.get("full_attention") or rope)["rope_theta"]),
        "rope.dimension_count": head_size,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
    }
    if kind in ("gemma2", "gemma3", "phi3") and config.sliding_window:
        values["attention.sliding_window"] = config.sliding_window
    if kind == "gemma2":
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
        values["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
    return {"general.architecture": kind} | {f"{kind}.{key}": value for key, value in values.items()}


def tokenizer_metadata(vocab_size: int) -> dict[str, Any]:
    """Return a byte-level tokenizer of `vocab_size` tokens, most of which no text has."""
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ"]
    special = ["<pad>", "<bos>", "<eos>"]
    words = [f"{a}{b}" for a in characters for b in characters][: vocab_size - len(characters) - len(special)]
    tokens = [*special, *characters, *words]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(special) + [1] * (len(tokens) - len(special)),
        "tokenizer.ggml.merges": [f"{word[0]} {word[1]}" for word in words],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }


def write_gguf(
    path: Path, model: PreTrainedModel, type_name: str, metadata: Mapping[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Write the model with its matrices in blocks of a type. Returns what they mean, by transformers' names.

    `metadata` is added to that of the configuration; None as a value removes a key.
    """
    config = model.config
    fields = metadata_of(model) | tokenizer_metadata(config.vocab_size) | dict(metadata or {})
    kind = fields["general.architecture"]
    names = gguf.get_tensor_name_map(_number_of(kind), config.num_hidden_layers)
    tensors: dict[str, tuple[np.ndarray, str]] = {}
    meaning: dict[str, torch.Tensor] = {}
    tied = config.tie_word_embeddings
    for number, (name, parameter) in enumerate(model.state_dict().items()):
        if tied and name == "lm_head.weight":
            continue
        array = parameter.float().numpy().copy()
        heads = 0
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        if heads:
            array = interleaved(array, heads)
        stored_type = type_name if array.ndim == 2 else "F32"
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            array += 1
        stored = _stored(array, stored_type, number)
        dense = dequantize(stored, GGMLQuantizationType[stored_type]).reshape(array.shape).copy()  # not what is stored
        if heads:
            order = interleaved(np.arange(len(array)), heads)
            dense[order] = dense.copy()
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            dense = dense - 1
        meaning[name] = torch.from_numpy(np.array(dense, dtype=np.float32))
        prefix, _, suffix = name.rpartition(".")
        found = names.get_name(prefix)
        assert found is not None, name
        tensors[f"{found}.{suffix}"] = stored, stored_type
    if tied:
        meaning["lm_head.weight"] = meaning["model.embed_tokens.weight"]
    write_file(path, fields, tensors)
    return meaning


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]) -> Path:
    """Write a file of any metadata and tensors."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture" or value is None:
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, (stored, type_name) in tensors.items():
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _number_of(kind: str) -> gguf.MODEL_ARCH:
    return next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)


def _stored(array: np.ndarray, type_name: str, seed: int) -> np.ndarray:
    if type_name in SCALES:
        return random_blocks(type_name, *array.shape, seed)
    return quantize(np.ascontiguousarray(array), GGMLQuantizationType[type_name])
