"""Read pickled weights as transformers' older releases wrote them, and write them as safetensors.

torch's unpickler for weights makes tensors and containers of them, and refuses everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from servekit.errors import ConfigError
from workers.compression.checkpoint_writer import CheckpointWriter
from workers.loading.refusals import in_one_line

WEIGHTS = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
# A tensor may be in a file once and have several names, such as an embedding that is the output head, too.
MAX_BYTES_PER_FILE_BYTE = 4


class _Index(msgspec.Struct):
    """Which tensor is in which file."""

    weight_map: dict[str, str]


def find_pickled_weights(path: Path) -> list[Path]:
    """Return the files of a model's pickled weights. Raises ConfigError if there are none, or not all of them."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if not (path / INDEX).is_file():
        raise ConfigError(f"{path} has neither {WEIGHTS} nor {INDEX}, so there are no pickled weights to convert")
    try:
        names = sorted(set(msgspec.json.decode((path / INDEX).read_bytes(), type=_Index).weight_map.values()))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path / INDEX} is not an index of weights: {error}") from None
    for name in names:
        if "/" in name or not name.endswith(".bin"):
            raise ConfigError(f"{path / INDEX} names {name[:100]!r}, which is not a file of weights in this directory")
        if not (path / name).is_file():
            raise ConfigError(f"{path / INDEX} names {name}, which does not exist; download the model again")
    return [path / name for name in names]


def convert_weights(files: list[Path], directory: Path) -> tuple[int, int, int]:
    """Write the tensors of the files to `directory`, as safetensors.

    Returns the number of tensors, their bytes, and the number of files written. Raises ConfigError, in a sentence, for
    a file that holds anything else than tensors.
    """
    writer, written = CheckpointWriter(directory), set[str]()
    max_bytes = MAX_BYTES_PER_FILE_BYTE * sum(file.stat().st_size for file in files)
    for file in files:
        tensors = _tensors_of(file)
        for name in list(tensors):
            tensor = tensors.pop(name)
            _check(file, name, tensor)
            if writer.num_bytes + tensor.nbytes > max_bytes:
                raise ConfigError(
                    f"{file} describes {name[:200]!r} with {tensor.nbytes:,} bytes, which the files do not hold; "
                    "they are damaged or malicious"
                )
            if name in written:
                raise ConfigError(f"{file} holds {name[:200]!r}, which another file holds, too")
            written.add(name)
            # A copy, because tensors that share memory cannot be written to one file, and because a view of a large
            # tensor would keep all of it.
            writer.add(name, tensor.detach().clone(memory_format=torch.contiguous_format))
    if not written:
        raise ConfigError(f"{files[0]} holds no tensors")
    writer.finish()
    return len(written), writer.num_bytes, writer.num_files


def _tensors_of(file: Path) -> dict[Any, Any]:
    """Return what the file holds, which must be tensors by name."""
    try:
        loaded = _load(file)
    except Exception as error:  # damaged files make torch raise errors of many kinds
        if type(error).__name__ != "UnpicklingError":
            raise ConfigError(
                f"{file} cannot be read, or takes more memory than its size allows: {in_one_line(error)}"
            ) from None
        raise ConfigError(
            f"{file} contains objects other than weights, so it is not read: {_reason_of(error)}. Do not open it with "
            "another program unless you trust its author"
        ) from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}, and not tensors by name")
    return dict(loaded)


def _reason_of(error: Exception) -> str:
    """Return what is not a weight. The rest of the message is advice on how to run it nevertheless."""
    lines = [line.strip() for line in str(error).splitlines()]
    reason = next(
        (line for line in lines if "GLOBAL" in line or "Unsupported" in line), "it is not a pickle of weights"
    )
    return reason.removeprefix("WeightsUnpickler error: ").rstrip(".")[:300]


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
    return torch.load(file, map_location="cpu", weights_only=True)  # of torch before 1.6: it cannot be mapped


def _check(file: Path, name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise ConfigError(
            f"{file} holds {str(name)[:200]!r}, which is a {type(tensor).__name__} and not a tensor; servekit converts "
            "checkpoints of models, as save_pretrained() wrote them, and not those of a training"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ConfigError(
            f"{file} holds {name[:200]!r}, which is a sparse, quantized or empty tensor; it is not converted"
        )
