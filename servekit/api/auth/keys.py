"""Parse API keys with their tenants and limits, and look up the key that a client sends.

Only the SHA-256 digest of a key is kept. No message contains a key, or a value from the file that could be a key in the
wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from servekit.api.auth.rate_limits import Limit, Limits
from servekit.engine.caller import ANONYMOUS
from servekit.errors import ConfigError

DEFAULT_TENANT = "default"  # of the keys in --api-key

# What can follow `Bearer` in a header: visible ASCII.
_KEY = re.compile(r"[!-~]+")
# An unknown field is named in the error only if it looks like a field name. Keys have digits, or are longer.
_UNKNOWN_FIELD = re.compile(r"unknown field `([a-z_]{1,40})`")
# What some fields accept. msgspec would show a pattern, or the value, which may be a key in the wrong place.
_TAKES = {
    "`$.admin`": "admin must be true or false",
    "`$.only`": "only must be 'metrics' or absent",
    "`$.tenant`": "tenant must be 1 to 64 letters, digits, '.', '_' and '-'",
    "`$.sha256`": "sha256 must be 64 hex digits, as `printf %s KEY | sha256sum` prints them",
}


class Key(Struct, frozen=True):
    """One key, by its digest."""

    digest: bytes
    tenant: str = DEFAULT_TENANT
    limits: Limits = Limits()
    min_priority: int = ANONYMOUS.min_priority
    only: Literal["metrics"] | None = None  # the only route that it may call; None: all of them
    is_admin: bool = False  # may load and unload models, and divide aliases


class Keyring:
    """All keys. The list may be replaced while the server runs. If it is empty, clients need no key."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = list(keys)

    def find(self, shown: bytes) -> Key | None:
        """Return the key that a client sent, if it is known.

        All keys are compared, each in constant time. So the duration does not depend on how close a guess is, or on
        which key matches.
        """
        digest = sha256(shown).digest()
        found = None
        for key in self.keys:
            if compare_digest(key.digest, digest):
                found = key
        return found


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[key]]` entry of the file."""

    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    key: str | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")] | None = None
    max_concurrent_requests: Limit | None = None
    max_concurrent_sequences: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    min_priority: Annotated[int, Meta(ge=ANONYMOUS.min_priority, le=1000)] = ANONYMOUS.min_priority
    only: Literal["metrics"] | None = None
    admin: bool = False


def parse_api_key(setting: str) -> list[Key]:
    """Parse --api-key. Raises ConfigError if it is empty: an empty list would let every client in."""
    keys = [text.strip() for text in setting.split(",")]
    for number, text in enumerate(keys, 1):
        if not _KEY.fullmatch(text):
            raise ConfigError(f"api_key: key {number} of {len(keys)} is empty or not visible ASCII")
    return _without_duplicates([Key(_digest(text)) for text in keys], "api_key: keys")


def parse_keys_file(toml: bytes, path: str) -> list[Key]:
    """Parse the keys file that was read from `path`. Raises ConfigError that names the file and the entry."""
    try:
        table = msgspec.toml.decode(toml)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # The error's own text may quote the file, so only its position is shown.
        place = re.search(r"line \d+, column \d+", str(error))
        raise ConfigError(f"{path}: not a valid TOML file" + (f" ({place[0]})" if place else "")) from None
    except (ValueError, RecursionError):  # by int(), and by the parser, which calls itself
        raise ConfigError(f"{path}: a number has too many digits, or values are nested too deeply") from None
    entries = table.get("key")
    if set(table) != {"key"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: the file must have one or more [[key]] entries and nothing else")
    return _without_duplicates(
        [_parse_entry(entry, f"{path}: [[key]] {n}") for n, entry in enumerate(entries, 1)], f"{path}: [[key]]"
    )


def _parse_entry(value: object, where: str) -> Key:
    try:
        entry = msgspec.convert(value, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error))}") from None
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{where}: it needs either key or sha256, not both")
    if entry.key is not None and not _KEY.fullmatch(entry.key):
        raise ConfigError(f"{where}: key is empty or not visible ASCII")
    digest = bytes.fromhex(entry.sha256) if entry.sha256 else _digest(entry.key or "")
    limits = Limits(
        entry.max_concurrent_requests,
        entry.requests_per_minute,
        entry.tokens_per_minute,
        entry.max_concurrent_sequences,
    )
    return Key(digest, entry.tenant, limits, entry.min_priority, entry.only, entry.admin)


def _explain(message: str) -> str:
    if "unknown field" in message:
        name = _UNKNOWN_FIELD.search(message)
        shown = f" {name[1]!r}" if name else ""
        return f"unknown field{shown}; the known fields are {', '.join(_Entry.__struct_fields__)}"
    return _TAKES.get(message.rpartition(" - at ")[2], message)


def _without_duplicates(keys: list[Key], where: str) -> list[Key]:
    first: dict[bytes, int] = {}
    for number, key in enumerate(keys, 1):
        if (other := first.setdefault(key.digest, number)) < number:
            raise ConfigError(f"{where} {other} and {number} are the same key")
    return keys


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
