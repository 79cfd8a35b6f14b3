"""Read the model file, or make one of the models on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.executor.placement import auto_device
from servekit.models.model_file import ModelEntry, ModelFile, make_model_file, make_spec, parse_model_file

# NAME=MODEL. A simulated model has a colon before its first equals sign, as in sim:step=5ms.
_NAMED = re.compile(r"([A-Za-z0-9._-]+)=(.+)")


def read_model_file(config: ServeConfig) -> ModelFile:
    """Return the models of --models. Raises ConfigError."""
    path = config.models
    assert path is not None
    _check_server(config, f"models = {path!r} (--models)")
    try:
        toml = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"models = {path!r}: {error.strerror}") from None
    return parse_model_file(toml, path, config, auto_device())


def from_command_line(config: ServeConfig, models: Sequence[str]) -> ModelFile:
    """Return the models that `servekit serve` was given, as MODEL or NAME=MODEL. All stay loaded.

    Raises ConfigError.
    """
    where = "servekit serve " + " ".join(models)
    _check_server(config, where)
    specs = []
    for model in models:
        named = _NAMED.fullmatch(model)
        name, path = (model, model) if named is None else (named[1], named[2])
        entry = ModelEntry(id=name)
        specs.append(make_spec(entry, replace(config, model=path, served_model_name=name), auto_device()))
    return make_model_file(specs, where)


def _check_server(config: ServeConfig, where: str) -> None:
    """Raise ConfigError for a setting that several models cannot share."""
    if config.api_processes > 1:
        raise ConfigError(
            f"{where}: a server with several models has one process for HTTP and engines; leave out api_processes "
            f"(--api-processes {config.api_processes})"
        )
    if config.listen_workers is not None:
        raise ConfigError(
            f"{where}: workers that join serve one model; leave out listen_workers (--listen-workers), or run one "
            "server for each model"
        )
    for name in ("journal", "profile", "served_model_name"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{where}: {name} is of one model; set {'id' if name == 'served_model_name' else name} in a [[model]] "
                "entry of the file in --models"
            )
