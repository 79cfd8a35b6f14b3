"""Read the API keys of remote servers from the environment."""

from __future__ import annotations

import os

from servekit.errors import ConfigError
from servekit.remote.settings import ServerSettings

_taken: dict[str, str] = {}  # by variable: the model file may be read again, and models loaded again


def check_api_key(model: str, settings: ServerSettings) -> str | None:
    """Return the API key for a model's server, if it needs one, and remove it from the environment.

    The server's child processes inherit the environment, and the sandboxes run input of clients. Raises ConfigError if
    there is no usable key.
    """
    variable = settings.api_key_env
    if variable is None:
        return None
    if variable in os.environ:
        _taken[variable] = os.environ.pop(variable).strip()
    key = _taken.get(variable, "")
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(
            f"the model {model!r}: the environment variable {variable} (api_key_env) has no API key; set it before the "
            "server starts"
        )
    return key
