"""Directories in the user's cache folder that are made of a model's files: complete, or not there at all."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from servekit.errors import ConfigError

# Servers that run, or that are making a directory, are left what they use. Each start notes the use.
UNUSED_S = 24 * 3600
INCOMPLETE = "incomplete-"


def cache_folder(kind: str) -> Path:
    """Return the folder for directories of one kind. Raises ConfigError if the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "servekit" / kind
    except RuntimeError:
        raise ConfigError("there is no home directory for converted files of the model; set --cache-dir") from None


@contextmanager
def made(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that is `directory` when the context ends without an error.

    Other servers see it complete or not at all. Raises ConfigError if nothing can be written there.
    """
    folder = directory.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        incomplete = Path(tempfile.mkdtemp(dir=folder, prefix=INCOMPLETE))
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
    """Remove the directories next to it that no server has used for a day, and that are not needed.

    Their `link` leads to the same source, or to one that is gone; or they were never completed.
    """
    if not directory.parent.exists():
        return
    newest_s = time.time() - UNUSED_S
    for other in directory.parent.iterdir():
        other_link = other / link
        with suppress(OSError):  # another server may be doing the same
            if other == directory or other.stat().st_mtime > newest_s:
                continue
            is_replaced = other_link.is_symlink() and (not other_link.exists() or other_link.readlink() == source)
            if is_replaced or other.name.startswith(INCOMPLETE):
                shutil.rmtree(other, ignore_errors=True)


def note_use(directory: Path) -> None:
    """Note that a server starts with the directory, so that others do not remove it."""
    with suppress(OSError):  # it may be another user's, who keeps it
        os.utime(directory)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to {folder}: {error.strerror}; choose a directory that can be written by --cache-dir"
    )
