"""The settings of an engine inside a Python program: those of `servekit serve` that are not about a server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from servekit.config import ServeConfig, check_host_memory, load_config
from servekit.errors import ConfigError
from servekit.simulation.model import is_simulated

# Settings that mean nothing without HTTP.
SERVER_SETTINGS = frozenset(
    {
        *("host", "port", "reuse_port", "api_processes", "ui", "allowed_hosts", "cors_origins"),
        *("api_key", "api_keys_file", "max_connections", "max_header_bytes", "max_body_bytes", "max_total_body_bytes"),
        *("header_timeout", "body_timeout", "send_timeout", "keep_alive_timeout", "sse_keep_alive_interval"),
        *("shutdown_timeout", "otlp_endpoint", "profile", "log_format"),
        *("batch_dir", "batch_concurrency", "batch_max_file_bytes", "batch_max_total_bytes", "batch_retention"),
    }
)
# The workers write to the standard error of the program. Their messages at level info are for operators of a server.
# Nor is there a reason to refuse what the program itself wants to wait for.
DEFAULTS = {"log_level": "warning", "max_predicted_wait": 0.0}


def embedded_config(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> ServeConfig:
    """Return the configuration of an engine. Raises ConfigError for a wrong name, with the nearest right one.

    SERVEKIT_* variables and configuration files are for servers, and are not read: a program says what it wants.
    """
    for name in settings:
        if name in SERVER_SETTINGS:
            raise ConfigError(f"{name} is a setting of the HTTP server, and there is none here; leave it out")
    if settings.get("cache_dir") is not None:
        raise ConfigError(
            "cache_dir would change the environment of this whole program; set the variables XDG_CACHE_HOME and TMPDIR "
            "before Python starts, and leave it out"
        )
    config = load_config({**DEFAULTS, **settings, "model": os.fspath(model)}, {})
    if not is_simulated(config.model):
        check_host_memory(config, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return config
