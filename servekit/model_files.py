"""Where a model's files are: the embedded demo model, a local directory, or a download from Hugging Face."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from servekit.config import DEMO_MODEL
from servekit.errors import ConfigError
from servekit.simulated_model import is_simulated, parse_simulated

log = logging.getLogger("servekit")

DEMO_MODEL_PATH = Path(__file__).parent / "demo_model"
SIMULATED_MODEL_PATH = Path(__file__).parent / "simulated_tokenizer"  # all that there is of it
# Weights as safetensors, configuration and tokenizer as JSON or plain text. No Python, no pickles.
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


class ChatTemplate(msgspec.Struct, frozen=True):
    """How a conversation becomes text: a Jinja template, and the tokens that it may name."""

    source: str | None  # None: the model has none, and a request may bring its own if the operator lets it
    special_tokens: dict[str, str]


class _AddedToken(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The parts of tokenizer_config.json that a template needs."""

    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None


def find_model(model: str) -> Path:
    """The directory that holds `model`; downloads it where it must. Raises ConfigError."""
    if model == DEMO_MODEL:
        return DEMO_MODEL_PATH
    if is_simulated(model):
        parse_simulated(model)  # it may be refused
        return SIMULATED_MODEL_PATH
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


def find_chat_template(path: Path, override: str | None = None) -> ChatTemplate:
    """The model's chat template, or that of the file `override`. Raises ConfigError."""
    file = path / "tokenizer_config.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_TokenizerConfig) if file.exists() else _TokenizerConfig()
        source = Path(override).read_text() if override else _own_template(path, found)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"the chat template cannot be read: {error} ({override or file})") from None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {
        name: token if isinstance(token, str) else token.content for name in names if (token := getattr(found, name))
    }
    return ChatTemplate(source, tokens)


def _own_template(path: Path, config: _TokenizerConfig) -> str | None:
    """A file of its own comes first, as transformers has it; of several in the configuration, the default one."""
    if (file := path / "chat_template.jinja").exists():
        return file.read_text()
    if isinstance(config.chat_template, list):
        named = {template.name: template.template for template in config.chat_template}
        return named.get("default")
    return config.chat_template
