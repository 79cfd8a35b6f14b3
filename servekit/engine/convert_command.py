"""`servekit convert`: write a model with pickled weights as safetensors, with its configuration and tokenizer."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servekit.engine.conversion import run_conversion, weights_job
from servekit.engine.hub import PICKLED_WEIGHTS
from servekit.engine.model_files import find_pickled_model
from servekit.engine.tokenizer_directory import needs_tokenizer
from servekit.errors import ConfigError

log = logging.getLogger("servekit")

# What belongs to a model besides its weights: configuration, tokenizer, chat template, generation config.
COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "README.md")
WEIGHT_INDEXES = frozenset({"pytorch_model.bin.index.json", "model.safetensors.index.json"})


def convert_model(model: str, output: Path, revision: str | None = None) -> None:
    """Write the model to the directory `output`, which must not exist, or be empty.

    Raises ConfigError, in a sentence; then there is no output.
    """
    output = output.absolute()
    _check_is_free(output)
    path = find_pickled_model(model, revision)
    files = sorted(path.glob(PICKLED_WEIGHTS))
    if not files:
        has_safetensors = any(path.glob("*.safetensors"))
        raise ConfigError(
            f"model {model!r} has no {PICKLED_WEIGHTS} in {path}"
            + ("; it has safetensors, so serve it as it is" if has_safetensors else "; there is nothing to convert")
        )
    num_bytes = sum(file.stat().st_size for file in files)
    log.info("reading %s (%.2f GB) in a process that may use no network", PICKLED_WEIGHTS, num_bytes / 1e9)
    with _new_directory(output) as directory:
        weights = run_conversion(weights_job(path, directory, files, needs_tokenizer(path)))
        _copy_companions(path, directory)
    log.info(
        "wrote %d tensors of %.2f GB; now run: servekit serve %s", weights.num_tensors, weights.num_bytes / 1e9, output
    )


def _check_is_free(path: Path) -> None:
    is_there = path.exists() or path.is_symlink()
    if is_there and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not empty; give a directory that does not exist yet")


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory next to `path`, which gets this name when the context ends without an error."""
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"{path}: nothing can be written next to it: {error.strerror}") from None
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o777 & ~mask)  # mkdtemp's directories are for their owner alone, and so are safetensors' files
        for file in temporary.iterdir():
            file.chmod(0o666 & ~mask)
        temporary.rename(path)  # over an empty directory, too
    except OSError as error:
        raise ConfigError(f"{path} could not be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_companions(path: Path, directory: Path) -> None:
    for pattern in COPIED:
        for file in sorted(path.glob(pattern)):
            if file.is_file() and file.name not in WEIGHT_INDEXES and not (directory / file.name).exists():
                shutil.copyfile(file, directory / file.name)
