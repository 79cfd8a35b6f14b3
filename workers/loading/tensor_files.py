"""The tensors of a model's safetensors, by name. They are mapped from the files: what is not used is not read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import Tensor

from servekit.errors import ConfigError

NUMBERS = ("F64", "F32", "F16", "BF16")  # as safetensors names data types


class Lazy(Protocol):
    """A tensor that is read when it is indexed, as transformers takes it in place of a tensor."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class TensorSource(Protocol):
    """Where tensors come from."""

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor on the CPU. It takes no memory of its own if the files hold it as it is."""

    def lazy(self, name: str) -> Lazy:
        """Return the tensor to be read later."""


class TensorFiles:
    """The tensors of one or several safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files' headers. Raises SafetensorError for a file that is damaged."""
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def names(self) -> Collection[str]:
        return self._files.keys()

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def lazy(self, name: str) -> Lazy:
        """Return the tensor to be read later.

        Raises ConfigError for a matrix of codes: without the scales that belong to it, they would be taken for numbers.
        """
        found: Any = self._files[name].get_slice(name)
        if name.endswith(".weight") and found.get_dtype() not in NUMBERS:
            raise ConfigError(
                f"{name[:200]} is {found.get_dtype()}, and the files have no scales for it; they do not belong together"
            )
        lazy: Lazy = found
        return lazy
