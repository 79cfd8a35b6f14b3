"""Read a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

The files may come from an attacker. Their sizes are checked before they are read, and nothing in them is a pattern that
is matched: PEFT takes the keys of `rank_pattern` for regular expressions, here they are names.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from servekit.errors import ConfigError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 2**23  # of a safetensors file: a hundred bytes for each of some ten thousand tensors
MAX_TENSORS = 2**16
Value = TypeVar("Value")

NUMBERS = ("F32", "F16", "BF16")

# Initialisations that change the model's own weights. An adapter without these changes would not be the trained one.
CHANGE_THE_MODEL = ("pissa", "corda", "olora", "loftq", "lora_ga")

# Fields that change what an adapter computes, the values of them that change nothing, and what they are called.
UNSUPPORTED: dict[str, str] = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save (whole layers of its own)",
    "lora_bias": "a bias of its own (lora_bias)",
    "fan_in_fan_out": "transposed layers (fan_in_fan_out)",
    "layer_replication": "layer_replication",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "target_parameters": "target_parameters (matrices of experts)",
    "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
}


class AdapterConfig(msgspec.Struct):
    """The fields of adapter_config.json that are read; the others are about training."""

    peft_type: str = "LORA"
    r: int = 8
    lora_alpha: float = 8.0
    use_rslora: bool = False
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None

    def scale(self, module: str) -> float:
        """The factor of a module's product."""
        rank = _of_module(self.rank_pattern or {}, module, self.r)
        alpha = _of_module(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _of_module(self.rank_pattern or {}, module, self.r)


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear layer of the model that an adapter may change."""

    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """The matrices of one linear layer: y += (x A') B'."""

    a: Tensor  # [rank, num_inputs] in the data type that was asked for
    b: Tensor  # [num_outputs, rank] of that type, with the adapter's scale


def read_adapter(
    path: Path, modules: Mapping[str, ModuleShape], max_rank: int, dtype: torch.dtype = torch.float32
) -> dict[str, LowRank]:
    """Return the matrices of an adapter by the names of the layers. Raises ConfigError for what cannot be served."""
    config = _read_config(path)
    file = path / WEIGHTS
    num_bytes = _num_bytes(
        file,
        f"the adapter {str(path)!r} has no {WEIGHTS}; save it with PEFT's save_pretrained, which writes safetensors",
    )
    try:
        _check_header(file, num_bytes)
        with safe_open(file, framework="pt") as opened:
            return _read_matrices(opened, path, config, modules, max_rank, dtype)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; copy the adapter again") from None


def fingerprint(matrices: Mapping[str, LowRank]) -> str:
    """Identify what was read of an adapter. It is the same on every machine that has the same adapter."""
    digest = blake2b(digest_size=16)
    for name, each in sorted(matrices.items()):
        digest.update(f"{name} {tuple(each.a.shape)} {tuple(each.b.shape)}\n".encode())
        for matrix in (each.a, each.b):
            digest.update(matrix.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_state(path: Path) -> str:
    """Return what changes when an adapter's files are written, which is their sizes and times here.

    Raises ConfigError where they are missing.
    """
    digest = blake2b(digest_size=16)
    for name in (CONFIG, WEIGHTS):
        try:
            status = (path / name).stat()
        except OSError as error:
            raise ConfigError(f"{str(path)!r} holds no adapter: {name}: {error.strerror}") from None
        digest.update(repr((status.st_size, status.st_mtime_ns, status.st_ino)).encode())
    return digest.hexdigest()


def _read_config(path: Path) -> AdapterConfig:
    file = path / CONFIG
    num_bytes = _num_bytes(
        file,
        f"{str(path)!r} holds no adapter: there is no file {CONFIG}; name a directory that PEFT's save_pretrained "
        "wrote",
    )
    if num_bytes > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} has {num_bytes:,} bytes, and {MAX_CONFIG_BYTES:,} are allowed")
    try:
        content = file.read_bytes()
        fields = msgspec.json.decode(content)
        config = msgspec.json.decode(content, type=AdapterConfig)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not an adapter's configuration: {str(error)[:200]}") from None
    if config.peft_type != "LORA":
        raise ConfigError(f"{file}: the adapter is of type {config.peft_type[:100]!r}; only LORA is served")
    for name, what in UNSUPPORTED.items():
        if fields.get(name):
            raise ConfigError(f"{file}: the adapter has {what}, which is not served; merge it into its model")
    if str(config.init_lora_weights).lower().startswith(CHANGE_THE_MODEL):
        raise ConfigError(
            f"{file}: the adapter began with init_lora_weights = {str(config.init_lora_weights)[:100]!r}, which "
            "changes the model's own weights; convert it: call PEFT's save_pretrained with "
            "path_initial_model_for_weight_conversion"
        )
    if config.bias != "none":
        raise ConfigError(f"{file}: the adapter has biases (bias = {config.bias[:100]!r}), which are not served")
    numbers = [config.lora_alpha, *(config.alpha_pattern or {}).values()]
    if not all(math.isfinite(number) and abs(number) < 1e6 for number in numbers):
        raise ConfigError(f"{file}: an alpha of the adapter is not a number below a million")
    for pattern in (config.rank_pattern or {}) | (config.alpha_pattern or {}):
        if not pattern.replace(".", "").replace("_", "").replace("-", "").isalnum():
            raise ConfigError(
                f"{file}: {pattern[:100]!r} in rank_pattern or alpha_pattern is a regular expression; only names of "
                "modules are served"
            )
    return config


def _num_bytes(file: Path, missing: str) -> int:
    """Return the size of a file. Raises ConfigError, with the text `missing` where there is none."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigError(missing) from None
    except OSError as error:
        raise ConfigError(f"{str(file)[:300]!r} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe might never end
        raise ConfigError(missing)
    return status.st_size


def _check_header(file: Path, file_bytes: int) -> None:
    """Refuse a header that takes long to parse. Raises ConfigError or OSError."""
    with file.open("rb") as opened:
        start = opened.read(8)
    num_bytes = int.from_bytes(start, "little")
    if len(start) < 8 or num_bytes > min(MAX_HEADER_BYTES, file_bytes):
        raise ConfigError(f"{file} is not a safetensors file, or its header has more than {MAX_HEADER_BYTES:,} bytes")


def _read_matrices(
    opened: Any,
    path: Path,
    config: AdapterConfig,
    modules: Mapping[str, ModuleShape],
    max_rank: int,
    dtype: torch.dtype,
) -> dict[str, LowRank]:
    found: dict[str, dict[str, str]] = {}
    names = list(opened.keys())
    if len(names) > MAX_TENSORS:
        raise ConfigError(f"the adapter {str(path)!r} has {len(names):,} tensors, and {MAX_TENSORS:,} are allowed")
    for name in names:
        module, matrix = _parse(name)
        if matrix is None:
            raise ConfigError(
                f"the adapter {str(path)!r} has the tensor {name[:200]!r}; only lora_A and lora_B of linear layers are "
                "served (no embeddings, no magnitudes, no biases)"
            )
        if module not in modules:
            raise ConfigError(
                f"the adapter {str(path)!r} changes {module[:200]!r}, and the model has no linear layer of that name "
                f"that an adapter may change; it has, for example, {next(iter(modules), 'none')!r}"
            )
        found.setdefault(module, {})[matrix] = name
    if not found:
        raise ConfigError(f"the adapter {str(path)!r} has no tensors")
    # Shapes are checked first: they are in the header, so a refusal does not read the numbers.
    for module, pair in found.items():
        _check_shapes(opened, path, module, pair, modules[module], config.rank(module), max_rank)
    matrices = {}
    for module, pair in found.items():
        a = opened.get_tensor(pair["A"]).to(dtype)
        b = (opened.get_tensor(pair["B"]).float() * config.scale(module)).to(dtype)
        # One such number would also change the rows of others, because infinity times zero is NaN.
        if not (a.isfinite().all() and b.isfinite().all()):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"the adapter {str(path)!r} has numbers in {module!r} that are not finite in {name}")
        matrices[module] = LowRank(a, b)
    return matrices


def _parse(name: str) -> tuple[str, str | None]:
    """Return the module of a tensor, and A or B; None for any other tensor."""
    module, _, end = name.removeprefix(PREFIX).rpartition(".lora_")
    matrix = {"A.weight": "A", "B.weight": "B"}.get(end)
    return (module, matrix) if name.startswith(PREFIX) else ("", None)


def _check_shapes(
    opened: Any, path: Path, module: str, pair: dict[str, str], shape: ModuleShape, rank: int, max_rank: int
) -> None:
    if len(pair) < 2:
        raise ConfigError(f"the adapter {str(path)!r} has only one of lora_A and lora_B for {module!r}")
    if not 1 <= rank <= max_rank:
        raise ConfigError(
            f"the adapter {str(path)!r} has rank {rank} for {module!r}; the server takes 1 to {max_rank} "
            "(--max-lora-rank)"
        )
    for matrix, expected in (("A", [rank, shape.num_inputs]), ("B", [shape.num_outputs, rank])):
        given = opened.get_slice(pair[matrix])
        if given.get_shape() != expected:
            raise ConfigError(
                f"the adapter {str(path)!r}: lora_{matrix} of {module!r} has the shape {given.get_shape()}, and "
                f"{expected} is expected; it is of another model, or its configuration has another rank"
            )
        if given.get_dtype() not in NUMBERS:
            raise ConfigError(
                f"the adapter {str(path)!r}: {module!r} is stored as {given.get_dtype()}; {', '.join(NUMBERS)} are read"
            )


def _of_module(pattern: Mapping[str, Value], module: str, default: Value) -> Value:
    """Return the value of the first key that names a module, or the end of its name."""
    for key, value in pattern.items():
        if module == key or module.endswith("." + key):
            return value
    return default
