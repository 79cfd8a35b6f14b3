"""Check a model's files before they are used: which files there are, in which format, and how much they can hold.

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

# Files of older tools, from the time before `quantization_config` in config.json, and the method that they mean.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# Keys of config.json, and the method where the value names none. The second is what compressed-tensors wrote first.
QUANTIZATION_KEYS = {"quantization_config": None, "compression_config": "compressed-tensors"}


class _Index(msgspec.Struct):
    """Which tensor is in which file."""

    weight_map: dict[str, str]


def quantization_config(path: Path) -> dict[str, Any] | None:
    """Return the description of the format that the model's weights are quantized in; None if they are not.

    Reads config.json itself: transformers looks for the format's libraries first, and its error is about those. Files
    that are no JSON are left for transformers to refuse.
    """
    config = _read_json(path / "config.json")
    for part in (config, config.get("text_config")):  # models of images and text describe their decoder apart
        if isinstance(part, dict):
            for key, method in QUANTIZATION_KEYS.items():
                if part.get(key) is not None:
                    return _with_method(part[key], method)
    for file, method in QUANTIZATION_FILES.items():
        if (path / file).exists():
            return _with_method(_read_json(path / file), method)
    return None


def _with_method(described: Any, method: str | None) -> dict[str, Any]:
    """Return the description with its `quant_method`."""
    if not isinstance(described, dict):
        return {"quant_method": described}
    known = described.get("quant_method", method)
    if described.get("load_in_4bit") or described.get("load_in_8bit"):
        known = "bitsandbytes"  # it did not always write its name
    return {**described, "quant_method": known}


def _read_json(path: Path) -> dict[str, Any]:
    """Return the file's JSON object; an empty one if it has none."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def find_weights(path: Path) -> list[Path]:
    """Return the files that hold the model's weights. Raises ConfigError for any other format than safetensors."""
    if (path / "adapter_config.json").exists():
        raise ConfigError(f"{path} holds an adapter (adapter_config.json); serve its model, with --lora NAME={path}")
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


def count_tensors(files: list[Path]) -> int:
    """Return how many tensors the files hold. Raises SafetensorError for a file that is damaged."""
    num_tensors = 0
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            num_tensors += len(opened.keys())
    return num_tensors


def check_num_layers(num_tensors: int, num_layers: int) -> None:
    """Raise ConfigError unless there is at least one tensor a layer."""
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
