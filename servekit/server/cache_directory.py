"""Direct everything that libraries write to disk into one directory, so that the rest may be read-only."""

from __future__ import annotations

import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from servekit.errors import ConfigError

# Where the libraries write, by the variable that says so. In the folder of XDG_CACHE_HOME, servekit's kernels, Hugging
# Face's models and torch's extensions have subfolders of their own.
SUBDIRECTORIES = {
    "XDG_CACHE_HOME": "",
    "TMPDIR": "tmp",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "CUDA_CACHE_PATH": "cuda",
}


def use_cache_directory(directory: str, environment: MutableMapping[str, str]) -> None:
    """Set the variables of `environment` that direct libraries, and the child processes, into `directory`.

    Must be called before these libraries are imported. Variables that are set already stay. Raises ConfigError if the
    directory cannot be written.
    """
    path = Path(directory).absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / SUBDIRECTORIES["TMPDIR"]).mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"cache_dir = {directory!r}: {error.strerror}; choose a directory that can be written"
        ) from None
    for variable, name in SUBDIRECTORIES.items():
        environment.setdefault(variable, str(path / name))


def check_temporary_directory() -> None:
    """Raise ConfigError if there is no directory for temporary files, which torch needs to be imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no directory for temporary files can be written; set --cache-dir to a directory that can be"
        ) from None
