"""Make the config.json that transformers would have, from a GGUF file's metadata.

A file that lacks a value which changes answers is refused. The defaults of transformers' classes are not used, because
they are the values of one checkpoint.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from servekit.errors import ConfigError
from servekit.gguf.architectures import architecture_of
from servekit.gguf.header import Header
from servekit.protocol.gguf_index import BLOCK_SIZES

# Llama 3.1 and later slow down low frequencies. The file has the factors themselves, and transformers the parameters
# that they follow from. All of these models have the same parameters but for the factor.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FACTOR_TOLERANCE = 1e-4  # relative; the file's factors are float32

# Tokens that end a turn, as llama.cpp recognises them by their text: the file names only one of them as its end.
END_OF_TURN = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>"}
)
CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type


def model_config(header: Header) -> dict[str, Any]:
    """Return the fields of config.json. Raises ConfigError, by key, for what is missing or not read."""
    architecture = architecture_of(header)
    values = _Values(header)
    values.refuse("expert_count", "experts")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{header.path} is one of several parts; put them together with llama-gguf-split --merge")
    hidden_size, num_heads = values.count("embedding_length"), values.count("attention.head_count")
    head_size = values.count("attention.key_length", hidden_size // num_heads)
    if head_size < 2 or head_size % 2:
        raise values.error("attention.head_count", f"RoPE needs heads of an even size, and not of {head_size}")
    num_layers = values.count("block_count")
    if num_layers > len(header.tensors):
        raise values.error("block_count", f"the file has {len(header.tensors)} tensors; it is damaged")
    if values.count("attention.value_length", head_size) != head_size:
        raise values.error("attention.value_length", "keys and values of different sizes are not read")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{header.path} holds no matrix token_embd.weight; the file is no language model")
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": values.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.count("attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": values.count("context_length"),
        "rope_parameters": _rope_parameters(values, head_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        **_token_ids(header),
    }
    if any(BLOCK_SIZES[tensor.type][0] > 1 for tensor in header.tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}
    match architecture.model_type:
        case "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
            config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
        case "phi3":
            if window := values.count("attention.sliding_window", 0):
                config["sliding_window"] = window
        case "gemma":
            config["hidden_act"] = "gelu_pytorch_tanh"
        case "gemma2":
            config["final_logit_softcapping"] = values.number("final_logit_softcapping")
            config["attn_logit_softcapping"] = values.number("attn_logit_softcapping")
    if architecture.model_type in ("gemma2", "gemma3_text"):
        config["sliding_window"] = values.count("attention.sliding_window")
        # The file lacks it. llama.cpp recognises the two models that divide by something else by their layers.
        is_27b = (architecture.model_type, num_layers) in (("gemma2", 46), ("gemma3_text", 62))
        config["query_pre_attn_scalar"] = hidden_size // num_heads if is_27b else head_size
    return config


class _Values:
    """The metadata of the file's architecture, checked."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._prefix = header.metadata["general.architecture"]

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self._prefix}.{key}")

    def error(self, key: str, reason: str) -> ConfigError:
        value = self.get(key)
        return ConfigError(f"{self.header.path} has {self._prefix}.{key} = {str(value)[:60]}: {reason}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 to 2**31 - 1; `default` if the key is missing."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(element == value[0] for element in value):
            value = value[0]  # a number for each layer, and all are the same
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, "servekit needs one positive number for all layers")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "servekit needs a positive number")
        return float(value)

    def refuse(self, key: str, what: str) -> None:
        if self.get(key):
            raise self.error(key, f"models with {what} are not read from GGUF files; serve the safetensors checkpoint")


def _rope_parameters(values: _Values, head_size: int) -> dict[str, Any]:
    """Return transformers' `rope_parameters`: the parameters of RoPE, for each kind of layer where kinds differ."""
    header = values.header
    model_type = architecture_of(header).model_type
    theta = values.number("rope.freq_base", 1_000_000.0 if model_type == "gemma3_text" else 10_000.0)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    size = values.count("rope.dimension_count", head_size)
    if model_type == "phi3":
        parameters["partial_rotary_factor"] = size / head_size
    elif size != head_size:
        raise values.error("rope.dimension_count", f"servekit needs RoPE for all {head_size} numbers of a head")
    kind = values.get("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors:
        parameters |= _llama3_parameters(header, theta, head_size)
    elif "rope_factors_long.weight" in header.tensors:
        parameters |= {
            "rope_type": "longrope",
            "long_factor": _factors(header, "rope_factors_long.weight", size // 2),
            "short_factor": _factors(header, "rope_factors_short.weight", size // 2),
            "original_max_position_embeddings": values.count("rope.scaling.original_context_length"),
            "attention_factor": values.number("rope.scaling.attn_factor", 1.0),
        }
    elif kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
        if kind == "yarn":
            original = values.count("rope.scaling.original_context_length")
            parameters["original_max_position_embeddings"] = original
    elif kind not in (None, "none"):
        raise values.error("rope.scaling.type", "servekit reads none, linear, yarn, and factors of Llama 3 and Phi 3")
    if model_type == "gemma3_text":
        local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 10_000.0)}
        return {"full_attention": parameters, "sliding_attention": local}
    return parameters


def _llama3_parameters(header: Header, theta: float, head_size: int) -> dict[str, Any]:
    """Return the parameters that give the file's factors. Raises ConfigError if none do."""
    found = _factors(header, "rope_freqs.weight", head_size // 2)
    factor = max(found)
    expected = llama3_factors(theta, head_size, factor)
    if not all(abs(a - b) <= FACTOR_TOLERANCE * b for a, b in zip(found, expected, strict=True)):
        raise ConfigError(
            f"{header.path}: rope_freqs.weight holds other factors than Llama 3's with factor {factor}; serve the "
            "safetensors checkpoint of the same model"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def llama3_factors(theta: float, head_size: int, factor: float) -> list[float]:
    """Return what Llama 3's scaling divides each frequency by.

    Long wavelengths are divided by `factor`, short ones by 1, and those between by what changes steadily.
    """
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    context = LLAMA3_ROPE["original_max_position_embeddings"]
    factors = []
    for k in range(0, head_size, 2):
        wavelength = 2 * math.pi * theta ** (k / head_size)
        smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _factors(header: Header, name: str, count: int) -> list[float]:
    """Return the numbers of a small tensor, which must be `count` positive ones of float32."""
    tensor = header.tensors.get(name)
    if tensor is None or tensor.type != "F32" or tensor.shape != (count,):
        raise ConfigError(f"{header.path}: {name} is not {count} numbers of float32; download the file again")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        factors = list(struct.unpack(f"<{count}f", file.read(4 * count)))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ConfigError(f"{header.path}: {name} holds numbers that are not positive; download the file again")
    return factors


def _dtype(header: Header) -> str:
    """Return the type that the model computes in where the operator does not choose: that of the file's 16-bit numbers.

    Blocks do not show the type; bfloat16 has the range of any model's activations.
    """
    types = {tensor.type for tensor in header.tensors.values()}
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _token_ids(header: Header) -> dict[str, Any]:
    """Return the ids of special tokens. They are all given: a class's defaults may exceed the vocabulary."""
    metadata = header.metadata
    ids = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        ids[f"{name}_token_id"] = _token_id(header, f"tokenizer.ggml.{key}_token_id")
    ends = [ids["eos_token_id"], *(_token_id(header, f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        ends += [index for index, (token, kind) in pairs if kind == CONTROL_TOKEN and token in END_OF_TURN]
    return {**ids, "eos_token_id": sorted({end for end in ends if end is not None}) or None}


def _token_id(header: Header, key: str) -> int | None:
    """Return a token id that is in the vocabulary; None if the file gives none."""
    value = header.metadata.get(key)
    if value is None:
        return None
    num_rows = header.tensors["token_embd.weight"].shape[0]
    if type(value) is not int or not 0 <= value < num_rows:
        raise ConfigError(f"{header.path} has {key} = {str(value)[:40]}, and its vocabulary has {num_rows} tokens")
    return value
