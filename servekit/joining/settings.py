"""Check the settings about workers that join."""

from __future__ import annotations

import logging
import secrets

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.joining.address import TcpAddress, UnixAddress, parse_address
from servekit.joining.credentials import read_key, server_tls
from servekit.joining.listener import ListenerSettings

log = logging.getLogger("servekit")

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANY_ADDRESS = "tcp://0.0.0.0:0"  # for workers that the server places on a cluster: any free port


def listener_settings(config: ServeConfig) -> ListenerSettings | None:
    """Return the settings of the listener; None if no workers may join. Raises ConfigError."""
    if not config.lets_workers_join:
        for name in ("worker_key_file", "worker_tls_cert", "worker_tls_key"):
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} has no effect without listen_workers; set both, or none")
        return None
    address = parse_address(config.listen_workers or ANY_ADDRESS, "listen_workers")
    if config.worker_key_file is None and config.placement == "local":
        raise ConfigError(
            "listen_workers needs worker_key_file: without a key, every process that can connect could join; make one "
            "with `openssl rand -hex 32`"
        )
    tls = server_tls(config.worker_tls_cert, config.worker_tls_key)
    if tls is not None and isinstance(address, UnixAddress):
        raise ConfigError(
            "worker_tls_cert has no use with a Unix socket, whose bytes do not leave this machine; leave it out"
        )
    if tls is None and isinstance(address, TcpAddress) and address.host not in LOOPBACK:
        log.warning(
            "workers join at %s without TLS: what they exchange is authenticated, but not encrypted, and prompts and "
            "answers can be read on the network (set --worker-tls-cert)",
            address,
        )
    return ListenerSettings(
        address=address,
        key=_new_key() if config.worker_key_file is None else read_key(config.worker_key_file, "worker_key_file"),
        tls=tls,
        heartbeat_timeout_s=config.heartbeat_timeout,
        load_timeout_s=config.load_timeout,
    )


def _new_key() -> bytes:
    """Return a key for workers that the server places itself: it is used until the server ends."""
    return secrets.token_hex(32).encode()
