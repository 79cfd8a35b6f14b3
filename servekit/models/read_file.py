"""Read the model file, or make one of the models on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from servekit.config import CPU_KV_CACHE_BYTES, ServeConfig
from servekit.engine.adapter_registry import adapters_at_start
from servekit.engine.model_files import find_model
from servekit.engine.model_kind import GENERATE, choose_kind
from servekit.engine.model_names import ANY_MODEL
from servekit.engine.predictor_engine import check_settings
from servekit.errors import ConfigError
from servekit.executor.placement import auto_device
from servekit.models.model_file import (
    ModelEntry,
    ModelFile,
    ModelSpec,
    check_kinds,
    make_model_file,
    make_spec,
    parse_model_file,
)
from servekit.models.weight_memory import NUMBER_BYTES, weight_bytes
from servekit.protocol.cpu_dtype import read_stored_numbers
from servekit.protocol.prediction import PredictorKind
from servekit.remote.api_keys import check_api_key
from servekit.simulation.model import is_simulated

PROCESS_BYTES = 400_000_000  # of a worker without a model: Python, torch and transformers

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
    file = with_kinds(parse_model_file(toml, path, config, auto_device(), estimated_bytes), path)
    for spec in file.models:
        if spec.server is not None:
            check_api_key(spec.id, spec.server)  # before any process is started, which would inherit it
    return file


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
    return with_kinds(make_model_file(specs, where), where)


def estimated_bytes(config: ServeConfig) -> int | None:
    """Return about how many bytes a worker of a model takes, from the model's files and its settings.

    It is None where these do not say it: the files are not on this machine, or the KV cache fills a GPU.
    """
    on_cpu = config.device == "cpu" or (config.device == "auto" and auto_device() == "cpu")
    try:
        kind = choose_kind(config)
        path = find_model(config.model, config.revision, may_download=False)
    except ConfigError:  # loading the model reports it
        return None
    cache_bytes = config.kv_cache_memory_bytes or (CPU_KV_CACHE_BYTES if on_cpu else 0)
    dtype: str = config.dtype
    if dtype == "auto" and on_cpu:  # predictors, and all but the codes of quantized weights, are float32
        is_plain = kind == GENERATE and config.quantization is None
        dtype = read_stored_numbers(path).cpu_dtype if is_plain else "float32"
    number_bytes = NUMBER_BYTES.get(dtype)
    num_weight_bytes = weight_bytes(path, number_bytes, config.quantization, config.quantization_group_size)
    if not num_weight_bytes or is_simulated(config.model) or (kind == GENERATE and not cache_bytes):
        return None
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    return PROCESS_BYTES + num_weight_bytes // num_ranks + (cache_bytes if kind == GENERATE else 0)


def with_kinds(file: ModelFile, where: str) -> ModelFile:
    """Return the file with the kind of each model: what the model's own files say, if its entry does not.

    Raises ConfigError for a setting that a model of the kind cannot have, and for an alias of models of several kinds.
    """
    models = [_with_kind(spec, where) for spec in file.models]
    _check_names(models, file, where)
    kinds = {spec.id: spec.kind for spec in models}
    for alias, split in file.splits.items():
        check_kinds(f"{where}: the alias {alias!r}", split, kinds)
    return replace(file, models=models)


def _check_names(models: Sequence[ModelSpec], file: ModelFile, where: str) -> None:
    """Raise ConfigError for a name that stands for two things: models, aliases, adapters, and any model."""
    taken = {**{spec.id: "a model" for spec in models}, **dict.fromkeys((*file.aliases, *file.splits), "an alias")}
    for name, what in taken.items():
        if name in ANY_MODEL:
            raise ConfigError(f"{where}: {name!r} cannot be the name of {what}, because it stands for any model")
    for spec in models:
        for name in adapters_at_start(spec.config):
            if name in taken:
                raise ConfigError(
                    f"{where}: the model {spec.id!r}: the adapter {name!r} (lora) has the name of {taken[name]}; names "
                    "must differ"
                )
            taken[name] = f"an adapter of {spec.id!r}"


def _with_kind(spec: ModelSpec, where: str) -> ModelSpec:
    kind = choose_kind(spec.config)
    try:
        adapters_at_start(spec.config)
    except ConfigError as error:
        raise ConfigError(f"{where}: the model {spec.id!r}: {error.message}") from None
    if kind != GENERATE and spec.server is None:
        try:
            check_settings(spec.config, PredictorKind(kind))
        except ConfigError as error:
            raise ConfigError(f"{where}: the model {spec.id!r}: {error.message}") from None
    return replace(spec, config=replace(spec.config, kind=kind))


def _check_server(config: ServeConfig, where: str) -> None:
    """Raise ConfigError for a setting that several models cannot share."""
    if config.api_processes > 1:
        raise ConfigError(
            f"{where}: a server with several models has one process for HTTP and engines; leave out api_processes "
            f"(--api-processes {config.api_processes})"
        )
    if config.lets_workers_join:
        name = "listen_workers" if config.listen_workers is not None else "placement"
        raise ConfigError(
            f"{where}: workers that join serve one model; leave out {name} (--{name.replace('_', '-')}), or run one "
            "server for each model"
        )
    for name in ("journal", "profile", "served_model_name", "lora"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{where}: {name} belongs to one model; set {'id' if name == 'served_model_name' else name} in a "
                "[[model]] entry of the file in --models"
            )
