"""Choose the drafter of speculative decoding, before a worker starts."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine.model_files import find_model
from servekit.errors import ConfigError
from servekit.protocol.speculative_config import DEFAULT_MAX_DRAFTS, SpeculativeConfig, parse_speculative
from servekit.simulation.model import is_simulated

log = logging.getLogger("servekit")

# Drafters that may use the model's own embedding or output head. If these are divided, all ranks compute together.
_SHARES_MODEL_PARTS = ("medusa", "eagle", "mtp")


class _ModelConfig(msgspec.Struct):
    """The part of config.json that says whether the model has layers for multi-token prediction that can be read."""

    num_nextn_predict_layers: int | None = None
    num_mtp_layers: int | None = None
    quantization_config: msgspec.Raw | None = None


def choose_drafter(config: ServeConfig, model_path: Path) -> SpeculativeConfig:
    """Return the drafter that `--speculative` asks for, with its files on this machine. Raises ConfigError.

    A model's own drafter has no path: a worker that joins from another machine has the model somewhere else.
    """
    wanted = parse_speculative(config.speculative)
    if wanted.method == "auto":
        chosen = _own_drafter(config, model_path)
        log.info("--speculative auto: %s", chosen.name)
        return chosen
    if wanted.is_on and config.pipeline_parallel_size > 1:
        raise ConfigError(
            f"speculative = {config.speculative!r} (--speculative) does not work with pipeline parallelism, and "
            f"--pipeline-parallel-size is {config.pipeline_parallel_size}: a stage cannot begin before it is known how "
            "many drafts were accepted; choose --speculative off, or divide the model by --tensor-parallel-size"
        )
    if wanted.lookup_first and wanted.method in _SHARES_MODEL_PARTS and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative = {config.speculative!r} (--speculative) does not work with tensor parallelism, and "
            f"--tensor-parallel-size is {config.tensor_parallel_size}: all ranks must ask {wanted.method} for drafts "
            "in the same steps, and after prompt lookup each rank decides alone; choose --speculative "
            f"{config.speculative.removeprefix('ngram+')}, or ngram"
        )
    if is_simulated(config.model):
        return wanted
    if wanted.path:
        try:
            return replace(wanted, path=str(find_model(wanted.path)))
        except ConfigError as error:
            raise ConfigError(f"speculative = {config.speculative!r} (--speculative): {error}") from None
    if wanted.method in ("draft", "medusa") and not Path(wanted.directory(str(model_path))).is_dir():
        raise ConfigError(
            f"speculative = {config.speculative!r} (--speculative): no {wanted.method} folder comes with the model in "
            f"{model_path}; give a path, as in --speculative {wanted.method}:PATH, or choose ngram"
        )
    return wanted


def _own_drafter(config: ServeConfig, model_path: Path) -> SpeculativeConfig:
    """Return prompt lookup with the drafter that comes with a model after it; or else lookup alone.

    In a pipeline there are no drafts.
    """
    if config.pipeline_parallel_size > 1:
        return SpeculativeConfig()
    method = "ngram"
    if not is_simulated(config.model):
        if Path(SpeculativeConfig("draft").directory(str(model_path))).is_dir():
            method = "draft"
        elif config.tensor_parallel_size == 1 and _has_mtp_layers(model_path):
            method = "mtp"
    return SpeculativeConfig(method, max_drafts=DEFAULT_MAX_DRAFTS["ngram"], lookup_first=method != "ngram")


def _has_mtp_layers(model_path: Path) -> bool:
    """Whether config.json names MTP layers, and weights that are not quantized: the worker reads no others."""
    try:
        found = msgspec.json.decode((model_path / "config.json").read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.DecodeError):
        return False  # the worker says what is wrong with the file
    return bool(found.num_nextn_predict_layers or found.num_mtp_layers) and found.quantization_config is None
