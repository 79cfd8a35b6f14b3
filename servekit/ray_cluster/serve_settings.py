"""Read the arguments of the Ray Serve application. Does not import Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from servekit.config import ENVIRONMENT_PREFIX, ServeConfig, advice, load_config
from servekit.errors import ConfigError
from servekit.joining.worker_placer import check_placement
from servekit.protocol.speculative_config import parse_speculative
from servekit.simulation.model import is_simulated

Count = Annotated[int, Meta(ge=1, le=1024)]

# Settings that are a path, besides the model. Paths are also in `lora` and `speculative`.
PATHS = (
    "models",
    "kv_offload_dir",
    "api_keys_file",
    "worker_key_file",
    "worker_tls_cert",
    "worker_tls_key",
    "chat_template",
    "cache_dir",
    "batch_dir",
    "journal",
    "profile",
)
# Settings by which Ray Serve scales, and not the servers.
SCALING = ("scale_target_wait", "scale_up_delay", "scale_down_delay")
# Settings without which a server takes requests from everyone.
KEYS = ("api_key", "api_keys_file")


class AppSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments that are not settings of `servekit serve`."""

    min_replicas: Count = 1
    max_replicas: Count | None = None  # as many as min_replicas
    look_back_period: Annotated[float, Meta(gt=0.0, le=3600.0)] = 10.0  # seconds over which the wait is averaged
    num_cpus: Annotated[float, Meta(ge=0.0, le=1024.0)] = 1.0  # of Ray, for each server
    num_gpus: Annotated[float, Meta(ge=0.0, le=1024.0)] = 0.0
    prefix_aware: bool = True  # otherwise Ray Serve's own router
    num_ingress_replicas: Count = 1
    max_surge_percent: Annotated[int, Meta(ge=0, le=100)] = 0  # further servers during an upgrade
    metrics_key: str | None = None  # an API key for GET /metrics, if the servers ask for keys

    @property
    def most_replicas(self) -> int:
        return self.min_replicas if self.max_replicas is None else self.max_replicas


class Application(Struct, frozen=True):
    """The arguments, read and checked."""

    settings: AppSettings
    config: ServeConfig  # that each server has
    environment: dict[str, str]  # of each server: its settings

    @property
    def metrics_key(self) -> str | None:
        """The API key with which a replica reads its server's metrics; None if there are no keys."""
        if self.settings.metrics_key is not None or self.config.api_key is None:
            return self.settings.metrics_key
        return self.config.api_key.partition(",")[0].strip()

    @property
    def max_body_bytes(self) -> int:
        """The longest body that a server takes on any of its routes."""
        return max(self.config.max_body_bytes, self.config.batch_max_file_bytes if self.config.batch_dir else 0)


def read_arguments(arguments: Mapping[str, Any]) -> Application:
    """Read arguments: strings from the command line of `serve run`, or values from a config file of `serve deploy`.

    Raises ConfigError.
    """
    given = {name.replace("-", "_"): value for name, value in arguments.items() if value is not None}
    own = {name: given.pop(name) for name in list(given) if name in AppSettings.__struct_fields__}
    for name in given:
        if name not in ServeConfig.__struct_fields__:
            known = [*AppSettings.__struct_fields__, *ServeConfig.__struct_fields__]
            raise ConfigError(f"the Ray Serve application has no argument {name!r}; {advice(name, known)}")
    config = load_config(given, {})
    settings = _app_settings(own)
    application = Application(settings, config, _environment(given, config))
    _check(application)
    return application


def _app_settings(given: Mapping[str, Any]) -> AppSettings:
    try:
        settings = msgspec.convert(given, AppSettings, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        raise ConfigError(f"{name} = {given[name]!r} is not accepted by the Ray Serve application: {what}") from None
    if settings.most_replicas < settings.min_replicas:
        raise ConfigError(
            f"max_replicas = {settings.max_replicas} is less than min_replicas = {settings.min_replicas}; raise the "
            "first, or lower the second"
        )
    return settings


def _environment(given: Mapping[str, Any], config: ServeConfig) -> dict[str, str]:
    """Return the settings as variables. Paths must not depend on the folder in which a replica runs."""
    found = {name: str(value) for name, value in given.items() if name not in SCALING}
    if not is_simulated(config.model) and Path(config.model).exists():
        found["model"] = str(Path(config.model).resolve())
    found |= {name: _absolute(found[name]) for name in PATHS if name in found}
    if config.lora is not None:
        adapters = (entry.partition("=") for entry in config.lora.split(","))
        found["lora"] = ",".join(f"{name}{sign}{_absolute(path)}" for name, sign, path in adapters)
    drafter = parse_speculative(config.speculative).path
    if drafter and Path(drafter).exists():  # else it is the name of a repository
        found["speculative"] = config.speculative.replace(f":{drafter}", f":{_absolute(drafter)}", 1)
    return {_variable(name): value for name, value in found.items()}


def server_environment(node: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server: those of its node, with the settings of the application only.

    Settings that only a node has were not checked, and differ from those of other servers. Raises ConfigError if the
    node has API keys and the application has none: without them, the server would take requests from everyone.
    """
    if not any(_variable(name) in settings for name in KEYS):
        for name in KEYS:
            if node.get(_variable(name)):
                raise ConfigError(
                    f"the variable {_variable(name)} of this node has no effect with Ray Serve, and the application "
                    f"has no API keys; give {name} as an argument of the application, or unset the variable"
                )
    return {name: value for name, value in node.items() if not name.startswith(ENVIRONMENT_PREFIX)} | {**settings}


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def _absolute(path: str) -> str:
    """Return a path from the root. Links stay, because they may lead elsewhere later; `~` is the server's home."""
    return os.path.abspath(path) if path and not path.startswith("~") else path


def _check(application: Application) -> None:
    """Raise ConfigError for settings that Ray Serve decides, or that the replicas need."""
    config, default = application.config, ServeConfig()
    for name in ("placement", "listen_workers", "max_data_parallel_size"):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name} = {getattr(config, name)!r}: with Ray Serve each server has workers on its own node, and "
                "max_replicas is the most servers; leave it out"
            )
    check_placement(config)
    for name in ("host", "port", "reuse_port"):
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name} = {getattr(config, name)!r}: with Ray Serve its proxy listens, and not the servers; leave it "
                "out, and set the proxy's host and port with `serve start`, or with http_options in a config file"
            )
    if config.api_keys_file is not None and application.metrics_key is None:
        raise ConfigError(
            "with api_keys_file, Ray Serve's replicas need a key for GET /metrics, by which they scale; give one with "
            "metrics_key (an entry with only = 'metrics' is enough)"
        )
