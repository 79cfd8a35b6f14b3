"""Read the file of API keys at the start, and again at SIGHUP; then the file of models, too."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.api.auth.keys import Key, parse_keys_file
from servekit.api.middleware.host_check import is_loopback
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS
from servekit.errors import ConfigError
from servekit.models.model_file import ModelFile
from servekit.models.read_file import read_model_file

log = logging.getLogger("servekit")

Content = TypeVar("Content")

# What a models file may wait for, besides its file system.
_NETWORK = " and the network, from which the kinds of new models are read (or set their kind in the file)"

RELOAD_TIMEOUT_S = 10.0  # a network file system may not answer, nor Hugging Face for a new model of the models file


class KeysReload:
    """Replaces the keys, and the models, by those that their files have at a later time.

    The old ones stay if a file is wrong.
    """

    def __init__(
        self,
        replace: Callable[[Sequence[Key]], None],
        config: ServeConfig,
        replace_models: Callable[[ModelFile], None] | None = None,
    ) -> None:
        """`replace` is called with the new keys, and `replace_models` with what the file of --models has."""
        self._replace = replace
        self._config = config
        self._replace_models = replace_models
        self._is_requested = asyncio.Event()

    @property
    def has_file(self) -> bool:
        return self._config.api_keys_file is not None or self._config.models is not None

    def request(self) -> None:
        """Make `run` read the file. Several requests during one read cause one more read."""
        self._is_requested.set()

    async def run(self) -> None:
        """Read the file at each request, until cancelled."""
        while True:
            await self._is_requested.wait()
            self._is_requested.clear()
            config = self._config
            if config.api_keys_file is not None:
                keys = await self._read("the API keys", "api_keys_file", config.api_keys_file, read_keys)
                if keys is not None:
                    self._replace(keys)
                    log.info("read %s again: it has %d API keys", config.api_keys_file, len(keys))
            if config.models is not None and self._replace_models is not None:
                file = await self._read("the models", "models", config.models, read_model_file)
                if file is not None:
                    self._replace_models(file)
                    log.info("read %s again: it has %d models", config.models, len(file.models))

    async def _read(self, what: str, setting: str, path: str, read: Callable[[ServeConfig], Content]) -> Content | None:
        """Return what a file has now; None if it is wrong or cannot be read."""

        def read_again(config: ServeConfig) -> Content:
            _check_regular(setting, path)
            return read(config)

        try:
            # In a thread, because a file may be slow to read, and the event loop must not wait for it.
            async with asyncio.timeout(RELOAD_TIMEOUT_S):
                return await run_in_daemon_thread(read_again, self._config)
        except ConfigError as error:
            log.error("%s were not changed: %s", what, error.message)
        except TimeoutError:
            log.error(
                "%s were not changed: the file could not be read within %g s; check its file system%s, and send SIGHUP "
                "again",
                what,
                RELOAD_TIMEOUT_S,
                _NETWORK if setting == "models" else "",
            )
        return None


def _check_regular(setting: str, path: str) -> None:
    """Raise ConfigError for other files: one such as a pipe may have no end, or other content at each read."""
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        raise ConfigError(f"{setting} = {path!r}: {error.strerror}") from None
    if not is_regular:
        raise ConfigError(
            f"{setting} = {path!r} is not a regular file, and can be read at the start only; restart the server"
        )


def read_keys(config: ServeConfig) -> list[Key]:
    """Return the keys in --api-keys-file. Raises ConfigError."""
    path = config.api_keys_file
    if path is None:
        if config.api_key is None and not is_loopback(config.host):
            log.warning(
                "no API key is needed: any client that can connect to %s may use this server (set --api-key or "
                "--api-keys-file)",
                config.host,
            )
        return []
    try:
        keys = parse_keys_file(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"api_keys_file = {path!r}: {error.strerror}") from None
    if config.scheduling_policy != "priority" and any(key.min_priority != ANONYMOUS.min_priority for key in keys):
        log.warning(
            "%s: min_priority has no effect with --scheduling-policy %r; it needs priority",
            path,
            config.scheduling_policy,
        )
    return keys
