"""Read what a predictor's checkpoint says besides config.json: the files of sentence-transformers, and limits.

A directory may come from an attacker: names of modules are only compared with those that are known, paths stay inside
of the directory, and nothing is imported or unpickled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from servekit.errors import ConfigError
from servekit.protocol.prediction import Activation

# sentence-transformers' own names of pooling, those of its older boolean keys, and in which order these are joined.
POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_MODES = frozenset(POOLING_KEYS.values())
_FOLDER = re.compile(r"[A-Za-z0-9_][\w.-]*")
_HUGE = 10**9  # tokenizers without a limit have 10**30


@dataclass(frozen=True, slots=True)
class ModuleFiles:
    """One module after the transformer: its kind (Pooling, Dense, LayerNorm, Normalize), its folder and its config."""

    kind: str
    folder: Path
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SentenceTransformerFiles:
    """What sentence-transformers' files say. Without any, a text's embedding is the mean of its tokens'."""

    modules: list[ModuleFiles]  # after the transformer
    max_seq_length: int | None
    lowercases: bool
    prompts: dict[str, str]
    default_prompt: str | None
    activation: Activation | None  # of a cross-encoder; None: sigmoid, if it has one label


def read_files(path: Path) -> SentenceTransformerFiles:
    """Read the files in a model's directory. Raises ConfigError for what is not supported."""
    transformer = _read_object(path / "sentence_bert_config.json")
    own = _read_object(path / "config_sentence_transformers.json")
    config = _read_object(path / "config.json")
    prompts = own.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{path / 'config_sentence_transformers.json'}: prompts is not an object of texts")
    prompts = {str(name): text for name, text in prompts.items() if text}
    default = own.get("default_prompt_name")
    if default is not None and default not in prompts:
        default = None  # an empty prompt, as sentence-transformers writes for `document`
    described = config.get("sentence_transformers")
    activation = own.get("activation_fn")
    if activation is None and isinstance(described, dict):
        activation = described.get("activation_fn")
    if activation is None:
        activation = config.get("sbert_ce_default_activation_function")
    length = transformer.get("max_seq_length")
    has_modules = (path / "modules.json").exists()
    return SentenceTransformerFiles(
        modules=_modules(path) if has_modules else [ModuleFiles("Pooling", path, {})],
        max_seq_length=length if isinstance(length, int) and 0 < length < _HUGE else None,
        lowercases=transformer.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default,
        activation=None if activation is None else _activation(str(activation)),
    )


def tokenizer_limit(path: Path) -> int | None:
    """Return the longest text of the tokenizer's own configuration, in tokens; None if it gives none."""
    length = _read_object(path / "tokenizer_config.json").get("model_max_length")
    return length if isinstance(length, int) and 0 < length < _HUGE else None


def pooling_modes(config: dict[str, Any]) -> list[str]:
    """Return the modes of a Pooling module, whose vectors are joined. Raises ConfigError for unknown ones."""
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in POOLING_KEYS.items() if config.get(key) is True] or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    unknown = [mode for mode in modes if mode not in POOLING_MODES]
    if unknown or not modes:
        raise ConfigError(
            f"pooling mode {str(unknown)[:60]} is not known; known are {', '.join(sorted(POOLING_MODES))}"
        )
    return modes


def _modules(path: Path) -> list[ModuleFiles]:
    try:
        described = msgspec.json.decode((path / "modules.json").read_bytes())
        named = [(str(each["type"]), str(each["path"])) for each in described]
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError) as error:
        raise ConfigError(f"{path / 'modules.json'} is not a list of modules: {error}") from None
    if not named or named[0][0].rpartition(".")[2] != "Transformer" or named[0][1] not in ("", "0_Transformer"):
        first = named[0][0] if named else "nothing"
        raise ConfigError(f"{path / 'modules.json'} begins with {first[:80]}; servekit needs a Transformer at the top")
    modules = []
    for kind, folder in named[1:]:
        name = kind.rpartition(".")[2]
        if name not in ("Pooling", "Dense", "LayerNorm", "Normalize", "Dropout"):
            raise ConfigError(
                f"{path / 'modules.json'} has a module {kind[:80]}; servekit knows Transformer, Pooling, Dense, "
                "LayerNorm and Normalize"
            )
        if _FOLDER.fullmatch(folder) is None:
            raise ConfigError(f"{path / 'modules.json'} names the folder {folder[:80]!r}, which is not in the model's")
        if name != "Dropout":  # it does nothing outside of training
            modules.append(ModuleFiles(name, path / folder, _read_object(path / folder / "config.json")))
    return modules


def _activation(name: str) -> Activation:
    known = {"Sigmoid": Activation.SIGMOID, "Identity": Activation.NONE, "Softmax": Activation.SOFTMAX}
    activation = known.get(name.rpartition(".")[2])
    if activation is None:
        raise ConfigError(f"the checkpoint's activation {name[:80]!r} is not known; known are {', '.join(known)}")
    return activation


def _read_object(file: Path) -> dict[str, Any]:
    """Return a file's JSON object; an empty one if there is no such file. Raises ConfigError if it holds no object."""
    if not file.exists():
        return {}
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content
