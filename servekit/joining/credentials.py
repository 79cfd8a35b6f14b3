"""Read the credentials of workers that join and of their server: the shared key, and certificates for TLS."""

from __future__ import annotations

import logging
import os
import ssl
import stat

from servekit.errors import ConfigError
from servekit.protocol.handshake import MIN_KEY_BYTES

log = logging.getLogger("servekit")

MAX_KEY_FILE_BYTES = 4096


def read_key(path: str, setting: str) -> bytes:
    """Return the key in a file, without white space around it. Raises ConfigError.

    A warning is logged if every user of the machine may read the file. It is not refused, because mounted Secrets of
    Kubernetes often are such files.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(MAX_KEY_FILE_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{setting} = {path!r}: {error.strerror}") from None
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_FILE_BYTES:
        raise ConfigError(
            f"{setting} = {path!r}: the key has {len(key)} bytes, and must have {MIN_KEY_BYTES} to "
            f"{MAX_KEY_FILE_BYTES}; make one with `openssl rand -hex 32`"
        )
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        log.warning("%s: every user of this machine may read this key; `chmod 600` it", path)
    return key


def server_tls(
    certificate: str | None,
    private_key: str | None,
    certificate_setting: str = "worker_tls_cert",
    key_setting: str = "worker_tls_key",
) -> ssl.SSLContext | None:
    """Return the TLS settings of a side that listens; None without a certificate. Raises ConfigError."""
    if certificate is None and private_key is None:
        return None
    if certificate is None or private_key is None:
        raise ConfigError(f"{certificate_setting} and {key_setting} belong together; set both, or none")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(certificate, private_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{certificate_setting} = {certificate!r}, {key_setting} = {private_key!r}: no certificate with its "
            f"private key in PEM format ({error.strerror or error})"
        ) from None
    return context


def worker_tls(authorities: str | None) -> ssl.SSLContext | None:
    """Return TLS settings that trust the certificates in this file only; None without a file. Raises ConfigError."""
    if authorities is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # this context checks the certificate and the host name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(authorities)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls-ca = {authorities!r}: no certificates in PEM format ({error.strerror or error})"
        ) from None
    return context
