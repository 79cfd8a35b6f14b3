"""Look at a model's weights before anything is built of them: which files they are, and how much they can hold.

A model's directory may come from anybody. Only safetensors are opened, only in the directory itself, and a
configuration that describes more than the files can hold is refused before memory is taken for it.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from safetensors import safe_open

from servekit.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[\w.-]+\.safetensors")
# Weights of less than two bits, a few times over.
MAX_PARAMETERS_PER_BYTE = 16


class _Index(msgspec.Struct):
    """Which tensor is in which file."""

    weight_map: dict[str, str]


def find_weights(path: Path) -> list[Path]:
    """The files that hold the model's weights. Raises ConfigError for any other than safetensors."""
    if (path / "adapter_config.json").exists():
        raise ConfigError(f"{path} holds an adapter (adapter_config.json); merge it into its model first")
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise ConfigError(f"{path} holds no {WEIGHTS} and no {INDEX}; servekit loads no other format")
    try:
        names = sorted(set(msgspec.json.decode((path / INDEX).read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path / INDEX} is no index of weights: {error}") from None
    for name in names:
        if not _SHARD.fullmatch(name):
            raise ConfigError(f"{path / INDEX} names {name[:100]!r}, which is no safetensors file of this directory")
        if not (path / name).is_file():
            raise ConfigError(f"{path / INDEX} names {name}, which is not there; fetch the model again")
    return [path / name for name in names]


def check_num_layers(files: list[Path], num_layers: int) -> None:
    """Each layer has a tensor at least. Raises ConfigError, and SafetensorError for a file that is damaged."""
    num_tensors = 0
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            num_tensors += len(opened.keys())
    if not 1 <= num_layers <= num_tensors:
        raise ConfigError(
            f"the model's configuration tells of {num_layers} layers, its weights are {num_tensors} tensors"
        )


def check_num_parameters(files: list[Path], num_parameters: int) -> None:
    """Raises ConfigError for more parameters than the files can have bits for."""
    num_bytes = sum(file.stat().st_size for file in files)
    if num_parameters > MAX_PARAMETERS_PER_BYTE * num_bytes:
        raise ConfigError(
            f"the model's configuration describes {num_parameters:,} parameters; its weights are {num_bytes:,} bytes"
        )
