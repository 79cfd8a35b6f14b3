"""Make tokenizer.json of a tokenizer's other files: sentencepiece, tiktoken, vocabulary and merges.

Sentencepiece models say themselves how they treat a text. For the others, transformers knows for each family of models
which steps belong around the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from servekit.errors import ConfigError
from workers.conversion.sentencepiece_model import is_sentencepiece, tokenizer_json
from workers.loading.refusals import in_one_line

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.model", "sentencepiece.bpe.model", "spm.model")
MAX_BYTES = 2**27  # of a file; the largest vocabularies have 20 MB


def convert_tokenizer(path: Path, directory: Path) -> None:
    """Write the tokenizer of the model in `path` to `directory`. No code of the model's directory is run.

    Raises ConfigError, in a sentence, for files that cannot be converted.
    """
    config = _read_json(path / "tokenizer_config.json")
    if "AutoTokenizer" in (config.get("auto_map") or {}):
        raise _refusal(path, "it is made by Python code in the model's repository, which servekit never runs")
    model = next((path / name for name in SENTENCEPIECE if (path / name).exists()), None)
    if model is not None and is_sentencepiece(model):
        model_type = str(_read_json(path / "config.json").get("model_type"))
        try:
            content = tokenizer_json(model, _with_older_files(path, config), model_type)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _refusal(path, f"tokenizer_config.json is damaged: {in_one_line(error)}") from None
        (directory / TOKENIZER).write_bytes(content)
        return
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises various errors for a file that is not valid
        raise _refusal(path, in_one_line(error)) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal(path, f"its class {type(tokenizer).__name__} runs in Python and has no form as {TOKENIZER}")
    if backend.get_vocab_size() == 0:
        raise _refusal(path, "transformers found no vocabulary in them")
    (directory / TOKENIZER).write_text(backend.to_str(pretty=True), encoding="utf-8")


def _with_older_files(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's configuration with what older releases of transformers wrote to files of their own."""
    added = _read_json(path / "added_tokens.json")
    special = {
        name: token
        for name, token in _read_json(path / "special_tokens_map.json").items()
        if name in ("bos_token", "eos_token", "unk_token", "pad_token")
    }
    return {**special, "added_tokens": added, **config}


def _read_json(file: Path) -> dict[str, Any]:
    """Return the file's JSON object; an empty one if there is no such file. Raises ConfigError."""
    if not file.exists():
        return {}
    if file.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{file} has more than {MAX_BYTES} bytes, which is the limit")
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content


def _refusal(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} has no {TOKENIZER}, and none can be made of the tokenizer's other files: {reason}. Look for the "
        f"{TOKENIZER} of the same model, and copy it there"
    )
