"""Convert a GGUF file to a model's directory, once, in the user's cache folder.

All other code reads directories: the tokenizer, chat templates, workers, workers on other machines, fingerprints. So
a file becomes a directory with the small files that a checkpoint has, an index of its tensors, and a link to itself.
"""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

import msgspec

from servekit.cached_directory import cache_folder, made, note_use, remove_others
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
    identity = f"{FORMAT} {file} {status.st_size} {status.st_mtime_ns}"
    directory = cache_folder("gguf") / sha256(os.fsencode(identity)).hexdigest()[:32]
    if (directory / WEIGHTS).exists():
        note_use(directory)
        return directory
    log.info("reading the configuration and the tokenizer of %s", file)
    contents = _small_files(read_header(file))
    with made(directory) as incomplete:
        remove_others(directory, WEIGHTS, file)
        for name, content in contents.items():
            (incomplete / name).write_bytes(content)
        (incomplete / WEIGHTS).symlink_to(file)
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
