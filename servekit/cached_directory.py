"""Directories in the user's cache folder that are made of a model's files: complete, or not there at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from servekit.errors import ConfigError


def cache_folder(kind: str) -> Path:
    """Return the folder for directories of one kind. Raises ConfigError if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "servekit" / kind
    except RuntimeError:
        raise ConfigError("there is no home directory for what is made of the model's files; set --cache-dir") from None


@contextmanager
def made(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that is `directory` when the context ends without an error.

    Other servers see it complete or not at all. Raises ConfigError if nothing can be written there.
    """
    folder = directory.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        incomplete = Path(tempfile.mkdtemp(dir=folder, prefix="incomplete-"))
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        yield incomplete
        with suppress(FileExistsError):  # another server was faster
            os.rename(incomplete, directory)
    except OSError as error:
        if not directory.exists():
            raise _unwritable(folder, error) from None
    finally:
        shutil.rmtree(incomplete, ignore_errors=True)


def remove_others(directory: Path, link: str, source: Path) -> None:
    """Remove the directories beside it whose `link` leads to the same source, or to one that is gone."""
    if not directory.parent.exists():
        return
    for other in directory.parent.iterdir():
        other_link = other / link
        with suppress(OSError):  # another server may be doing the same
            if (
                other != directory
                and other_link.is_symlink()
                and (not other_link.exists() or other_link.readlink() == source)
            ):
                shutil.rmtree(other, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to {folder}: {error.strerror}; choose a directory that can be written by --cache-dir"
    )
