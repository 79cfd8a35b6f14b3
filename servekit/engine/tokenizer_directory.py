"""Make a directory with tokenizer.json for a model whose tokenizer has another form, in the cache folder.

All other code reads tokenizer.json: the server, grammars, workers, fingerprints. The directory consists of links to the
model's files, and of what was made.
"""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from servekit.cached_directory import cache_folder, made, note_use, remove_others
from servekit.engine.conversion import run_conversion, tokenizer_job
from servekit.errors import ConfigError

log = logging.getLogger("servekit")

FORMAT = 1  # change it when the same files give another result
TOKENIZER = "tokenizer.json"
# What transformers makes tokenizers of: sentencepiece, tiktoken, and vocabularies with their merges.
SOURCES = (
    "tokenizer.model",
    "tiktoken.model",
    "spiece.model",
    "sentencepiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_SOURCE_LINK = ".made-of"  # name of the link to the model's directory


def with_tokenizer(path: Path) -> Path:
    """Return a directory of the model in `path` that has tokenizer.json: `path` itself if it has one.

    If there is nothing that one could be made of, `path` is returned, too. Raises ConfigError, in a sentence, for files
    that cannot be converted.
    """
    if not needs_tokenizer(path):
        return path
    path = path.resolve()
    directory = cache_folder("tokenizers") / _identity(path)
    if (directory / TOKENIZER).exists():
        note_use(directory)
        return directory
    log.info("making %s of the tokenizer's files in %s", TOKENIZER, path)
    remove_others(directory, _SOURCE_LINK, path)
    with made(directory) as incomplete:
        run_conversion(tokenizer_job(path, incomplete))
        for file in path.iterdir():
            if not (incomplete / file.name).exists():
                (incomplete / file.name).symlink_to(file)
        (incomplete / _SOURCE_LINK).symlink_to(path)
    return directory


def needs_tokenizer(path: Path) -> bool:
    """Whether the model lacks tokenizer.json, and has files that one can be made of."""
    return not (path / TOKENIZER).exists() and any((path / name).exists() for name in SOURCES)


def _identity(path: Path) -> str:
    """The name of the directory, which changes when a file of the model does, or transformers.

    Raises ConfigError for a link to a file that does not exist.
    """
    parts = [str(FORMAT), version("transformers"), version("tokenizers"), os.fspath(path)]
    for file in sorted(path.iterdir()):
        try:
            status = file.stat()
        except OSError as error:
            raise ConfigError(
                f"cannot read {file}: {error.strerror}; if it is a link to nothing, download the model again"
            ) from None
        parts += [file.name, str(status.st_size), str(status.st_mtime_ns)]
    return sha256(os.fsencode("\0".join(parts))).hexdigest()[:32]
