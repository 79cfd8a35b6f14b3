"""Decide from a checkpoint's files what its model does: generate text, embed, rerank or classify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from servekit.config import DEMO_MODEL, ServeConfig
from servekit.engine.hub import FileNotInRepository, download_file, split_revision
from servekit.errors import ConfigError
from servekit.protocol.prediction import PredictorKind
from servekit.simulation.model import is_simulated

GENERATE = "generate"  # the kind of models that generate text
FILES = ("config.json", "config_sentence_transformers.json", "modules.json")

_KINDS: dict[tuple[str, str | None], str] = {}  # of models of Hugging Face, by id and revision


def choose_kind(config: ServeConfig) -> str:
    """Return the kind of the model that the settings name: that of --kind, or what its files say.

    Of a model that is not on this machine, the small files are downloaded, once for this process. If that fails, the
    kind is `generate`, and loading the model reports why.
    """
    if config.kind != "auto":
        return config.kind
    model = config.model
    if model == DEMO_MODEL or is_simulated(model) or model.endswith(".gguf") or Path(model).is_file():
        return GENERATE
    if Path(model).is_dir():
        return kind_of({name: _read_json(Path(model) / name) for name in FILES})
    if model.startswith((".", "/", "~")):
        return GENERATE
    return _kind_of_repository(config)


def _kind_of_repository(config: ServeConfig) -> str:
    """Return the kind of a model of Hugging Face. Its files are asked for once: the models file may be read often."""
    name = (config.model, config.revision)
    known = _KINDS.get(name)
    if known is not None:
        return known
    files = dict[str, Any]()
    is_known = True
    for file in FILES:
        try:
            files[file] = _download_json(config, file)
        except FileNotInRepository:
            files[file] = None
        except ConfigError:  # no network, or no such repository: loading the model reports it
            files[file], is_known = None, False
    kind = kind_of(files)
    if is_known and files["config.json"] is not None:
        _KINDS[name] = kind
    return kind


def kind_of(files: dict[str, Any]) -> str:
    """Return the kind of a checkpoint with these decoded files; None stands for a missing file."""
    config = files["config.json"] or {}
    names = config.get("architectures") or [""]
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    is_cross_encoder = "sbert_ce_default_activation_function" in config or isinstance(
        config.get("sentence_transformers"), dict
    )
    own = files["config_sentence_transformers.json"]
    model_type = own.get("model_type") if isinstance(own, dict) else None
    if architecture.endswith("ForImageClassification"):
        return PredictorKind.CLASSIFY
    if architecture.endswith("ForSequenceClassification"):
        has_one_label = model_type == "CrossEncoder" or is_cross_encoder or _num_labels(config) == 1
        return PredictorKind.RERANK if has_one_label else PredictorKind.CLASSIFY
    if model_type == "SentenceTransformer" or files["modules.json"] is not None:
        return PredictorKind.EMBED
    is_encoder = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    return PredictorKind.EMBED if is_encoder else GENERATE


def _num_labels(config: dict[str, Any]) -> int:
    """Return the number of labels; transformers takes 2 where config.json gives none."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)


def _read_json(file: Path) -> Any:
    try:
        content = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return content if file.name == "modules.json" or isinstance(content, dict) else None


def _download_json(config: ServeConfig, name: str) -> Any:
    """Return the decoded file. Raises FileNotInRepository, or another ConfigError."""
    repository, revision = split_revision(config.model, config.revision)
    return _read_json(download_file(repository, name, revision))
