"""Find a model's files: the embedded demo model, a local directory or GGUF file, or a download from Hugging Face."""

from __future__ import annotations

import shlex
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from servekit.config import DEMO_MODEL, ServeConfig
from servekit.engine.hub import PICKLED_WEIGHTS, download_file, download_snapshot, list_files, split_revision
from servekit.engine.tokenizer_directory import with_tokenizer
from servekit.errors import ConfigError
from servekit.gguf.directory import directory_of
from servekit.protocol.gguf_index import INDEX
from servekit.simulation.model import is_simulated, parse_simulated

DEMO_MODEL_PATH = Path(__file__).parents[1] / "assets" / "demo_model"
SIMULATED_MODEL_PATH = Path(__file__).parents[1] / "assets" / "simulated_tokenizer"  # a tokenizer is its only file
# Files of weights that are not read, and what they are.
OTHER_WEIGHTS = {
    "consolidated*.pth": "pickles under the names of the makers' own code",
    "*.pth": "pickles under names that transformers does not know",
    "*.pt": "pickles under names that transformers does not know",
    "*.ckpt": "pickles of a training",
    "tf_model*.h5": "TensorFlow's",
    "flax_model*.msgpack": "Flax's",
    "*.onnx": "ONNX's",
}


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


def find_model(model: str, revision: str | None = None, *, may_download: bool = True) -> Path:
    """Return the directory of a model; download it if necessary.

    A repository's name may end with its revision: org/name@revision. Raises ConfigError, and ModelNotDownloaded for
    a model that would have to be downloaded, and must not be.
    """
    if revision is not None and (model == DEMO_MODEL or is_simulated(model) or Path(model).exists()):
        raise ConfigError(
            f"model {model!r} is not a Hugging Face repository and has no revisions; leave out --revision"
        )
    if model == DEMO_MODEL:
        return DEMO_MODEL_PATH
    if is_simulated(model):
        parse_simulated(model)  # raises ConfigError for an invalid name
        return SIMULATED_MODEL_PATH
    if Path(model).is_dir():
        return _model_in(Path(model).resolve())
    if model.endswith(".gguf") and Path(model).is_file():
        return directory_of(Path(model))
    if Path(model).is_file():
        raise ConfigError(
            f"model {model!r} is a file; give a GGUF file, or the directory with config.json and *.safetensors"
        )
    name, revision = split_revision(model, revision)
    if name.endswith(".gguf"):
        return directory_of(_download_gguf(name, revision, may_download))
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"model {model!r}: there is no such directory")
    return download_snapshot(name, revision, may_download=may_download)


def _model_in(path: Path) -> Path:
    """Return a local directory; if a GGUF file is all that it holds of weights, the directory that is made of it."""
    files = sorted(path.glob("*.gguf"))
    if not files or (path / INDEX).exists() or next(path.glob("*.safetensors"), None) is not None:
        return path
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise ConfigError(f"{path} holds {len(files)} GGUF files, among them {names}; give the path of one of them")
    return directory_of(files[0])


def _download_gguf(model: str, revision: str | None, may_download: bool) -> Path:
    """Return the path of a GGUF file of a repository, `org/name/file.gguf`. Raises ConfigError."""
    parts = model.split("/")
    if len(parts) < 3 or parts[0] in ("", ".", "..", "~"):
        raise ConfigError(f"model {model!r}: there is no such file")
    return download_file("/".join(parts[:2]), "/".join(parts[2:]), revision, may_download=may_download)


def find_served_model(config: ServeConfig) -> Path:
    """Return the directory of the model to be served, with tokenizer.json. Raises ConfigError."""
    path = find_model(config.model, config.revision)
    if path in (DEMO_MODEL_PATH, SIMULATED_MODEL_PATH):
        return path
    if config.load_format == "auto":
        check_weights(path, config.model, config.revision)
    return with_tokenizer(path)


def find_pickled_model(model: str, revision: str | None = None) -> Path:
    """Return the directory of a model whose weights are pickled, for `servekit convert`. Raises ConfigError."""
    if Path(model).is_dir():
        path = find_model(model, revision)
    elif Path(model).exists() or model.startswith((".", "/", "~")) or model == DEMO_MODEL or is_simulated(model):
        raise ConfigError(f"model {model!r} is neither a directory with {PICKLED_WEIGHTS} nor a Hugging Face id")
    else:
        path = download_snapshot(*split_revision(model, revision), with_pickled_weights=True)
    return path


def check_weights(path: Path, model: str, revision: str | None = None) -> None:
    """Raise ConfigError, with what to do, if the directory of `model` holds weights in other formats only."""
    if (path / INDEX).exists() or next(path.glob("*.safetensors"), None) is not None:
        return
    is_local = Path(model).exists()
    name, revision = (model, None) if is_local else split_revision(model, revision)
    names = [file.name for file in path.iterdir()] if is_local else list_files(name, revision)
    if any(fnmatch(file, PICKLED_WEIGHTS) for file in names):
        source = name if revision is None else f"{name}@{revision}"
        raise ConfigError(
            f"the weights of {model!r} are pickled ({PICKLED_WEIGHTS}), and servekit serves safetensors: run `servekit "
            f"convert {shlex.quote(source)} OUT`, which reads them in an unprivileged process, and then serve OUT"
        )
    for pattern, kind in OTHER_WEIGHTS.items():
        if found := [file for file in names if fnmatch(file, pattern)]:
            raise ConfigError(
                f"the weights of {model!r} are {kind} ({found[0]}), which servekit does not read; look for the same "
                "model as safetensors, or save it with save_pretrained() of transformers"
            )
    raise ConfigError(
        f"{model!r} has no weights that servekit reads: {path} has no *.safetensors and no *.gguf; --load-format dummy "
        "serves random weights"
    )


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
