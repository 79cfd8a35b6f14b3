"""The tensors of a GGUF file, mapped: those of a parameter's format by suffix, or the parameter itself."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from servekit.protocol.gguf_index import WEIGHTS, GgufTensor
from workers.loading.gguf_index import read_index
from workers.loading.tensor_files import Lazy
from workers.quantization.formats.gguf import BLOCK_TYPE, BLOCKS, ROWS

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFile:
    """Tensors by name. Each part of the file is read when it is first used."""

    def __init__(self, path: Path) -> None:
        """Map the file in a model's directory. Raises ConfigError if it and its index do not belong together."""
        index = read_index(path)
        file = path / WEIGHTS
        self._bytes = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        self._tensors: dict[str, tuple[GgufTensor, str]] = {}  # and which part of it
        for name, tensor in index.items():
            if not tensor.is_packed:
                self._tensors[name] = tensor, ""
                continue
            prefix = name.removesuffix(".weight")
            for part in (BLOCKS, BLOCK_TYPE, *([ROWS] if tensor.num_interleaved_heads else [])):
                self._tensors[prefix + part] = tensor, part

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU: in memory of its own only if it has to be changed to be transformers'."""
        tensor, part = self._tensors[name]
        if part == BLOCK_TYPE:
            return torch.tensor(list(tensor.type.encode()), dtype=torch.uint8)
        if part == ROWS:
            return rows_of_halves(tensor.shape[0], tensor.num_interleaved_heads)
        stored = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        if part == BLOCKS:
            return stored.view(-1, tensor.row_bytes)
        dtype = _DTYPES[tensor.type]
        if tensor.offset % dtype.itemsize:
            stored = stored.clone()  # to where numbers of this size may begin
        numbers = stored.view(dtype).view(tensor.shape)
        if tensor.num_interleaved_heads:
            numbers = numbers[rows_of_halves(tensor.shape[0], tensor.num_interleaved_heads)]
        return numbers.float() - 1 if tensor.adds_one else numbers

    def lazy(self, name: str) -> Lazy:
        return _LazyTensor(self, name, self._tensors[name][0].shape)


class _LazyTensor:
    """A parameter that is not packed, to be read when it is indexed."""

    def __init__(self, file: GgufFile, name: str, shape: tuple[int, ...]) -> None:
        self._file, self._name, self._shape = file, name, shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._file.tensor(self._name)[index]


def rows_of_halves(num_rows: int, num_heads: int) -> Tensor:
    """Return, for each row of a parameter of transformers, which row of the file it is: int64 [num_rows].

    In the file, the rows of a head's two halves take turns: first row of the first half, first row of the second half.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
