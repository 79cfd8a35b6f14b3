"""Read a file of JSON lines: one object on each line; empty lines do not count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from servekit.errors import ConfigError

T = TypeVar("T")


def decode_lines(content: bytes, kind: type[T], name: str) -> Iterator[tuple[str, T]]:
    """Yield the place (`NAME, line 3`) and the object of each line. Raises ConfigError for lines that are not valid."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            yield place, msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place}: {error}") from None
