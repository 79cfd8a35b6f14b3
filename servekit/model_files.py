"""Where a model's files are: the embedded demo model, a local directory, or a download from Hugging Face."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from servekit.config import DEMO_MODEL
from servekit.errors import ConfigError

log = logging.getLogger("servekit")

DEMO_MODEL_PATH = Path(__file__).parent / "demo_model"
# Weights as safetensors, configuration and tokenizer as JSON or plain text. No Python, no pickles.
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


def find_model(model: str) -> Path:
    """The directory that holds `model`; downloads it where it must. Raises ConfigError."""
    if model == DEMO_MODEL:
        return DEMO_MODEL_PATH
    if Path(model).is_dir():
        return Path(model).resolve()
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"model {model!r}: there is no such directory")
    log.info("fetching %s from Hugging Face", model)
    try:
        return Path(snapshot_download(model, allow_patterns=DOWNLOADED))
    except HFValidationError as error:
        raise ConfigError(f"model {model!r} is neither a directory nor a Hugging Face id: {error}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"model {model!r} is no directory here and could not be fetched: {error}") from None
