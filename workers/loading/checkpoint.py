"""Check a model's files before anything is built of them: which files, in which format, and how much they can hold.

A model's directory may come from an attacker. Only safetensors are opened, only in the directory itself, and a
configuration that describes more than the files can hold is refused before memory is taken for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
from safetensors import safe_open

from servekit.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors")
# Weights of less than two bits, a few times over.
MAX_PARAMETERS_PER_BYTE = 16

# Formats by their `quant_method` in config.json, as transformers' quantizers/auto.py lists them, and as people call
# them. A method that is not here is named as config.json names it.
QUANTIZATION_FORMATS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "torchao": "torchao",
}
# Where tools wrote the same before there was `quantization_config` in config.json, and what they are called.
QUANTIZATION_FILES = {"quantize_config.json": "GPTQ", "quant_config.json": "AWQ", "hf_quant_config.json": "ModelOpt"}


class _Index(msgspec.Struct):
    """Which tensor is in which file."""

    weight_map: dict[str, str]


def quantization_format(path: Path) -> str | None:
    """Return the name of the format that the model's weights are quantized in; None if they are not.

    Reads config.json itself: transformers looks for the format's libraries first, and its error is about those. Files
    that are no JSON are left for transformers to refuse.
    """
    config = _read_json(path / "config.json")
    described = [config, config.get("text_config")]  # models of images and text describe their decoder apart
    for part in described:
        if isinstance(part, dict):
            # `compression_config` is what compressed-tensors wrote before transformers knew the format.
            for key, default in (("quantization_config", "unknown"), ("compression_config", "compressed-tensors")):
                if part.get(key) is not None:
                    return _name_of_format(part[key], default)
    return next((name for file, name in QUANTIZATION_FILES.items() if (path / file).exists()), None)


def check_not_quantized(path: Path) -> None:
    """Raise ConfigError if the model's weights are quantized: servekit reads none of those formats yet."""
    name = quantization_format(path)
    if name is not None:
        raise ConfigError(
            f"the weights in {path} are quantized in the format {name}, which servekit does not support yet; serve the "
            "unquantized checkpoint of the same model (bfloat16, float16 or float32 safetensors)"
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; an empty one if it has none."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _name_of_format(config: Any, default: str) -> str:
    """Return the format's name and, if given, the number of bits; bounded in length, because files may be hostile."""
    if not isinstance(config, dict):
        return default
    method = config.get("quant_method", default)
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        method = "bitsandbytes"
    name = QUANTIZATION_FORMATS.get(method, method) if isinstance(method, str) else default
    bits = config.get("bits", config.get("w_bit"))
    return f"{name[:40]}, {bits} bits" if type(bits) is int and 0 < bits <= 16 else name[:40]


def find_weights(path: Path) -> list[Path]:
    """Return the files that hold the model's weights. Raises ConfigError for any other format than safetensors."""
    if (path / "adapter_config.json").exists():
        raise ConfigError(f"{path} holds an adapter (adapter_config.json); merge it into its model first")
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise ConfigError(f"{path} holds no {WEIGHTS} and no {INDEX}; servekit loads no other format")
    try:
        names = sorted(set(msgspec.json.decode((path / INDEX).read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path / INDEX} is not an index of weights: {error}") from None
    for name in names:
        if not _SHARD.fullmatch(name):
            raise ConfigError(f"{path / INDEX} names {name[:100]!r}, which is not a safetensors file of this directory")
        if not (path / name).is_file():
            raise ConfigError(f"{path / INDEX} names {name}, which does not exist; download the model again")
    return [path / name for name in names]


def check_num_layers(files: list[Path], num_layers: int) -> None:
    """Check that there is at least one tensor a layer.

    Raises ConfigError, and SafetensorError for a file that is damaged.
    """
    num_tensors = 0
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            num_tensors += len(opened.keys())
    if not 1 <= num_layers <= num_tensors:
        raise ConfigError(
            f"config.json describes {num_layers} layers, and the weights are {num_tensors} tensors; "
            "the files do not belong together"
        )


def check_num_parameters(files: list[Path], num_parameters: int) -> None:
    """Raise ConfigError for more parameters than the files can have bits for."""
    num_bytes = sum(file.stat().st_size for file in files)
    if num_parameters > MAX_PARAMETERS_PER_BYTE * num_bytes:
        raise ConfigError(
            f"config.json describes {num_parameters:,} parameters, and the weights are {num_bytes:,} bytes; "
            "the files do not belong together"
        )
