"""Whether a request's client has gone, and what is to be done then.

ASGI has a request ask for it, with a task of its own that waits for the answer. For each of many thousand streams that
is two kilobytes and a task that nearly never has anything to say, so the protocol calls instead.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_KEY = "servekit.departure"  # among the ASGI extensions


class Departure:
    """One request's. It happens at most once, and only while the answer is not whole."""

    __slots__ = ("_on_departure", "has_happened")

    def __init__(self) -> None:
        self.has_happened = False
        self._on_departure: Callable[[], object] | None = None

    def watch(self, on_departure: Callable[[], object] | None) -> None:
        """Call this when the client goes, or now if it has gone; it takes the place of what was to be called before."""
        self._on_departure = on_departure
        if self.has_happened and on_departure is not None:
            on_departure()

    def happen(self) -> None:
        """The client has gone. What is more than once told happens once."""
        if self.has_happened:
            return
        self.has_happened = True
        if self._on_departure is not None:
            self._on_departure()


def departure_of(scope: MutableMapping[str, Any]) -> Departure:
    """The request's; behind a protocol that tells of none there is none that ever happens."""
    departure: Departure = scope.setdefault("extensions", {}).setdefault(_KEY, Departure())
    return departure
