"""Read the file of API keys at the start, and again at SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from servekit.aio.daemon_thread import run_in_daemon_thread
from servekit.api.auth.keys import Key, parse_keys_file
from servekit.api.middleware.host_check import is_loopback
from servekit.config import ServeConfig
from servekit.engine.caller import ANONYMOUS
from servekit.errors import ConfigError

log = logging.getLogger("servekit")

RELOAD_TIMEOUT_S = 10.0  # a network file system may not answer


class KeysReload:
    """Replaces the keys by those that the file has at a later time. The old ones stay if it is wrong."""

    def __init__(self, replace: Callable[[Sequence[Key]], None], config: ServeConfig) -> None:
        """`replace` is called with the new keys."""
        self._replace = replace
        self._config = config
        self._is_requested = asyncio.Event()

    @property
    def has_file(self) -> bool:
        return self._config.api_keys_file is not None

    def request(self) -> None:
        """Make `run` read the file. Several requests during one read cause one more read."""
        self._is_requested.set()

    async def run(self) -> None:
        """Read the file at each request, until cancelled."""
        while True:
            await self._is_requested.wait()
            self._is_requested.clear()
            try:
                # In a thread, because a file may be slow to read, and the event loop must not wait for it.
                async with asyncio.timeout(RELOAD_TIMEOUT_S):
                    keys = await run_in_daemon_thread(_read_again, self._config)
                self._replace(keys)
            except ConfigError as error:
                log.error("the API keys were not changed: %s", error.message)
            except TimeoutError:
                log.error(
                    "the API keys were not changed: the file could not be read within %g s; check its file system, and "
                    "send SIGHUP again",
                    RELOAD_TIMEOUT_S,
                )
            else:
                log.info("read %s again: it has %d API keys", self._config.api_keys_file, len(keys))


def _read_again(config: ServeConfig) -> list[Key]:
    """Read the file if it is a regular one. Other files (a pipe) may have no end, or other content at each read."""
    path = config.api_keys_file
    assert path is not None
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        raise ConfigError(f"api_keys_file = {path!r}: {error.strerror}") from None
    if not is_regular:
        raise ConfigError(
            f"api_keys_file = {path!r} is not a regular file, and can be read at the start only; restart the server"
        )
    return read_keys(config)


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
