"""Find a model's files: the embedded demo model, a local directory or GGUF file, or a download from Hugging Face."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from servekit.config import DEMO_MODEL
from servekit.errors import ConfigError
from servekit.gguf.directory import directory_of
from servekit.protocol.gguf_index import INDEX
from servekit.simulation.model import is_simulated, parse_simulated

log = logging.getLogger("servekit")

DEMO_MODEL_PATH = Path(__file__).parents[1] / "assets" / "demo_model"
SIMULATED_MODEL_PATH = Path(__file__).parents[1] / "assets" / "simulated_tokenizer"  # a tokenizer is its only file
# Weights as safetensors, configuration and tokenizer as JSON or plain text; no Python files and no pickles.
DOWNLOADED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


class ChatTemplate(msgspec.Struct, frozen=True):
    """A Jinja template that turns a conversation into text, and the special tokens that it may use."""

    source: str | None  # None if the model has no template; a request may bring one if the operator allows it
    special_tokens: dict[str, str]
    tool_use: str | None = None  # another one for conversations with tools, which some models have

    @property
    def text(self) -> str:
        """All of it, in which markers may be looked for."""
        return (self.source or "") + (self.tool_use or "")


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


class ModelNotHere(ConfigError):
    """The model is named by an id of Hugging Face, and has not been downloaded to this machine."""


def find_model(model: str, *, may_download: bool = True) -> Path:
    """Return the directory of a model; download it if necessary. Raises ConfigError.

    Raises ModelNotHere for a model that would have to be downloaded, and must not be.
    """
    if model == DEMO_MODEL:
        return DEMO_MODEL_PATH
    if is_simulated(model):
        parse_simulated(model)  # raises ConfigError for an invalid name
        return SIMULATED_MODEL_PATH
    if Path(model).is_dir():
        return _model_in(Path(model).resolve())
    if model.endswith(".gguf"):
        return directory_of(_find_gguf(model, may_download))
    if Path(model).is_file():
        raise ConfigError(
            f"model {model!r} is a file; give a GGUF file, or the directory with config.json and *.safetensors"
        )
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"model {model!r}: there is no such directory")
    return _download(
        model,
        lambda: snapshot_download(model, allow_patterns=DOWNLOADED, local_files_only=not may_download),
        may_download,
    )


def _model_in(path: Path) -> Path:
    """Return a local directory; if a GGUF file is all that it holds of weights, the directory that is made of it."""
    files = sorted(path.glob("*.gguf"))
    if not files or (path / INDEX).exists() or next(path.glob("*.safetensors"), None) is not None:
        return path
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ConfigError(f"{path} holds {len(files)} GGUF files, among them {names}; give the path of one of them")
    return directory_of(files[0])


def _find_gguf(model: str, may_download: bool) -> Path:
    """Return the path of a GGUF file; download it if the name is that of a file in a repository of Hugging Face."""
    parts = model.split("/")
    if Path(model).is_file():
        return Path(model)
    if len(parts) < 3 or parts[0] in ("", ".", "..", "~"):
        raise ConfigError(f"model {model!r}: there is no such file")
    repository, name = "/".join(parts[:2]), "/".join(parts[2:])
    return _download(model, lambda: hf_hub_download(repository, name, local_files_only=not may_download), may_download)


def _download(model: str, download: Callable[[], str], may_download: bool) -> Path:
    """Download what `model` names, or find what was downloaded before, and return the path. Raises ConfigError."""
    if may_download:
        log.info("downloading %s from Hugging Face", model)
    try:
        return Path(download())
    except HFValidationError as error:
        raise ConfigError(f"model {model!r} is neither a directory nor a Hugging Face id: {error}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if not may_download:
            raise ModelNotHere(f"model {model!r} is not a local directory, and has not been downloaded") from None
        raise ConfigError(f"model {model!r} is not a local directory, and could not be downloaded: {error}") from None


def find_chat_template(path: Path, override: str | None = None) -> ChatTemplate:
    """Return the model's chat template, or the one in the file `override`. Raises ConfigError."""
    file = path / "tokenizer_config.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_TokenizerConfig) if file.exists() else _TokenizerConfig()
        named = {"default": Path(override).read_text()} if override else _own_templates(path, found)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the chat template in {override or file}: {error}") from None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {
        name: token if isinstance(token, str) else token.content for name in names if (token := getattr(found, name))
    }
    return ChatTemplate(named.get("default"), tokens, named.get("tool_use"))


def _own_templates(path: Path, config: _TokenizerConfig) -> dict[str, str]:
    """Return the model's templates by name. A separate file comes first, as in transformers."""
    if (file := path / "chat_template.jinja").exists():
        return {"default": file.read_text()}
    if isinstance(config.chat_template, list):
        return {template.name: template.template for template in config.chat_template}
    return {} if config.chat_template is None else {"default": config.chat_template}
