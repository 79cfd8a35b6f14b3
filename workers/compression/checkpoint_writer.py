"""Write a checkpoint as a stream of tensors, one file after the other, in a directory that appears when it is whole."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from servekit.errors import ConfigError
from workers.loading.checkpoint import INDEX, WEIGHTS

SHARD_BYTES = 2**30  # which are kept in memory until the file is written
# What belongs to a model besides its weights and its config.json: tokenizer, chat template, generation config.
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")


class CheckpointWriter:
    """The safetensors of a directory, in files of about a gigabyte, and their index."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory, self._shard_bytes = directory, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._num_waiting_bytes = 0
        self._files: list[list[str]] = []  # the names of the tensors in each
        self.num_bytes = 0  # of all tensors

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor to be written. Each name may be given once."""
        if self._waiting and self._num_waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._num_waiting_bytes += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, and the index if there are several files."""
        self._write()
        if len(self._files) == 1:
            self._temporary(0).rename(self._directory / WEIGHTS)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05}-of-{len(self._files):05}.safetensors"
            self._temporary(number).rename(self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        (self._directory / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index)))

    @property
    def num_files(self) -> int:
        return len(self._files)

    def _write(self) -> None:
        save_file(self._waiting, self._temporary(len(self._files)), {"format": "pt"})
        self._files.append(list(self._waiting))
        self._waiting, self._num_waiting_bytes = {}, 0

    def _temporary(self, number: int) -> Path:
        return self._directory / f"part-{number}.safetensors"  # the number of files is part of their final names


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `path`, which takes its name when the context ends without an error.

    After an error, or an interrupt, nothing is left of it. So a directory of this name is always a whole one. Raises
    ConfigError if there is something at `path` other than an empty directory, or if nothing can be written there.
    """
    check_is_free(path)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"{path}: nothing can be written next to it: {error.strerror}") from None
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)  # mkdtemp's directories are for their owner alone
        temporary.rename(path)  # over an empty directory, too
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise ConfigError(f"{path} could not be written: {error}") from error
        raise


def check_is_free(path: Path) -> None:
    """Raise ConfigError unless there is nothing at `path`, or an empty directory."""
    is_there = path.exists() or path.is_symlink()
    if is_there and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty; give a directory that does not exist yet")


def copy_companions(model: Path, directory: Path) -> None:
    """Copy the files that belong to a model besides its weights and its config.json."""
    for pattern in COPIED:
        for file in sorted(model.glob(pattern)):
            if file.is_file() and file.name not in ("config.json", INDEX):
                shutil.copyfile(file, directory / file.name)
