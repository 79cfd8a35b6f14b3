"""Make a model's directory of a GGUF file, once, in the user's cache folder.

All other code reads directories: the tokenizer, chat templates, workers, workers on other machines, fingerprints. So
a file becomes a directory with the small files that a checkpoint has, an index of its tensors, and a link to itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

import msgspec

from servekit.errors import ConfigError
from servekit.gguf.architectures import index_of
from servekit.gguf.header import Header, read_header
from servekit.gguf.model_config import model_config
from servekit.gguf.tokenizer import tokenizer_config, tokenizer_json
from servekit.protocol.gguf_index import INDEX, WEIGHTS

log = logging.getLogger("servekit")

FORMAT = 1  # to be changed when other files are written for the same GGUF file


def directory_of(file: Path) -> Path:
    """Return the directory of a GGUF file; make it if the file has none, or has changed.

    Raises ConfigError, in a sentence, for a file that cannot be served.
    """
    try:
        file = file.resolve(strict=True)
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    folder = _cache_folder()
    identity = f"{FORMAT} {file} {status.st_size} {status.st_mtime_ns}"
    directory = folder / sha256(os.fsencode(identity)).hexdigest()[:32]
    if (directory / WEIGHTS).exists():
        return directory
    log.info("reading the configuration and the tokenizer of %s", file)
    contents = _small_files(read_header(file))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_others_of(file, directory)
        _write(directory, contents, file)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose a directory that can be written by --cache-dir"
        ) from None
    return directory


def _small_files(header: Header) -> dict[str, bytes]:
    """Return the files of the directory by name."""
    config = model_config(header)
    index = index_of(header, config["num_attention_heads"], config["num_key_value_heads"])
    return {
        "config.json": msgspec.json.format(msgspec.json.encode(config)),
        "tokenizer.json": tokenizer_json(header),
        "tokenizer_config.json": msgspec.json.format(msgspec.json.encode(tokenizer_config(header))),
        INDEX: msgspec.json.encode(index),
    }


def _write(directory: Path, contents: dict[str, bytes], file: Path) -> None:
    """Make the directory as a whole: other servers see it complete or not at all. Raises OSError."""
    incomplete = Path(tempfile.mkdtemp(dir=directory.parent, prefix="incomplete-"))
    try:
        for name, content in contents.items():
            (incomplete / name).write_bytes(content)
        (incomplete / WEIGHTS).symlink_to(file)
        os.rename(incomplete, directory)
    except OSError:
        shutil.rmtree(incomplete, ignore_errors=True)
        if not (directory / WEIGHTS).exists():  # unless another server was faster
            raise


def _remove_others_of(file: Path, directory: Path) -> None:
    """Remove the directories of what the file was before, and of files that are gone: nothing can be read by them."""
    for other in directory.parent.iterdir():
        link = other / WEIGHTS
        with contextlib.suppress(OSError):  # another server may be doing the same
            if other != directory and link.is_symlink() and (not link.exists() or link.readlink() == file):
                shutil.rmtree(other, ignore_errors=True)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "servekit" / "gguf"
    except RuntimeError:  # the user has no home
        raise ConfigError("there is no home directory for what is made of a GGUF file; set --cache-dir") from None
