"""API keys: whose they are, what they may be used for, and how a key that is shown is found among them.

Of a key only its SHA-256 digest is kept. No message here has a key in it, nor anything else out of the file that
could be one in the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from hmac import compare_digest
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from servekit.caller import ANYBODY
from servekit.errors import ConfigError
from servekit.rate_limits import Limit, Limits

DEFAULT_TENANT = "default"  # whose the keys of --api-key are

# What fits behind `Bearer` in a header: visible ASCII.
_KEY = re.compile(r"[!-~]+")
# A field that there is not is named if it looks like one; keys have digits, or are longer.
_UNKNOWN_FIELD = re.compile(r"unknown field `([a-z_]{1,40})`")
# What some fields take: a pattern is nothing for people, and what was given may be a key in the wrong place.
_TAKES = {
    "`$.only`": "only takes 'metrics', or is left out",
    "`$.tenant`": "tenant takes 1 to 64 letters, digits, '.', '_' and '-'",
    "`$.sha256`": "sha256 takes 64 hex digits, as `printf %s KEY | sha256sum` tells them",
}


class Key(Struct, frozen=True):
    """One key, as far as the server remembers it."""

    digest: bytes
    tenant: str = DEFAULT_TENANT
    limits: Limits = Limits()
    min_priority: int = ANYBODY.min_priority
    only: Literal["metrics"] | None = None  # what it opens; None is everything


class Keyring:
    """All keys, which its owner may replace by others. Without any, nobody needs one."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self.keys = list(keys)

    def find(self, shown: bytes) -> Key | None:
        """The key that somebody shows, if it is one of them.

        All are compared, each in constant time, so that the time taken tells nothing of how near a guess is, or whose
        key it was.
        """
        digest = sha256(shown).digest()
        found = None
        for key in self.keys:
            if compare_digest(key.digest, digest):
                found = key
        return found


class _Entry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `[[key]]` of the file."""

    tenant: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    key: str | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")] | None = None
    max_concurrent_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    min_priority: Annotated[int, Meta(ge=ANYBODY.min_priority, le=1000)] = ANYBODY.min_priority
    only: Literal["metrics"] | None = None


def parse_api_key(setting: str) -> list[Key]:
    """The keys in --api-key. Raises ConfigError if there is none, rather than let everybody in."""
    keys = [text.strip() for text in setting.split(",")]
    for number, text in enumerate(keys, 1):
        if not _KEY.fullmatch(text):
            raise ConfigError(f"api_key: key {number} of {len(keys)} is empty, or not of visible ASCII characters")
    return _without_doubles([Key(_digest(text)) for text in keys], "api_key: keys")


def parse_keys_file(toml: bytes, path: str) -> list[Key]:
    """The keys in the file at `path`. Raises ConfigError that names the file and the entry."""
    try:
        table = msgspec.toml.decode(toml)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # The error may quote what stands there.
        place = re.search(r"line \d+, column \d+", str(error))
        raise ConfigError(f"{path}: it is not TOML" + (f" ({place[0]})" if place else "")) from None
    entries = table.get("key")
    if set(table) != {"key"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: it takes [[key]] entries and nothing else, and at least one of them")
    return _without_doubles(
        [_read(entry, f"{path}: [[key]] {n}") for n, entry in enumerate(entries, 1)], f"{path}: [[key]]"
    )


def _read(told: object, where: str) -> Key:
    try:
        entry = msgspec.convert(told, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error))}") from None
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"{where}: it takes either key or sha256")
    if entry.key is not None and not _KEY.fullmatch(entry.key):
        raise ConfigError(f"{where}: key is empty, or not of visible ASCII characters")
    digest = bytes.fromhex(entry.sha256) if entry.sha256 else _digest(entry.key or "")
    limits = Limits(entry.max_concurrent_requests, entry.requests_per_minute, entry.tokens_per_minute)
    return Key(digest, entry.tenant, limits, entry.min_priority, entry.only)


def _explain(message: str) -> str:
    if "unknown field" in message:
        name = _UNKNOWN_FIELD.search(message)
        told = f" {name[1]!r}" if name else ""
        return f"it has an unknown field{told}; it takes {', '.join(_Entry.__struct_fields__)}"
    return _TAKES.get(message.rpartition(" - at ")[2], message)


def _without_doubles(keys: list[Key], where: str) -> list[Key]:
    first: dict[bytes, int] = {}
    for number, key in enumerate(keys, 1):
        if (other := first.setdefault(key.digest, number)) < number:
            raise ConfigError(f"{where} {other} and {number} are the same key")
    return keys


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
