"""Report that a request's client has disconnected, by a callback.

In plain ASGI a request awaits `http.disconnect` in a task of its own. With many thousand streams such a task costs two
kilobytes each and almost never has anything to report. Here the protocol calls the request instead.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

_KEY = "servekit.api.disconnect"  # among the ASGI extensions


class Disconnect:
    """The disconnect of one request's client. It happens at most once, and only before the answer is complete."""

    __slots__ = ("_callback", "has_happened")

    def __init__(self) -> None:
        self.has_happened = False
        self._callback: Callable[[], object] | None = None

    def set_callback(self, callback: Callable[[], object] | None) -> None:
        """Call this on disconnect, or now if it has happened. It replaces the callback that was set before."""
        self._callback = callback
        if self.has_happened and callback is not None:
            callback()

    def happen(self) -> None:
        """Note that the client has disconnected. Idempotent."""
        if self.has_happened:
            return
        self.has_happened = True
        if self._callback is not None:
            self._callback()


def disconnect_of(scope: MutableMapping[str, Any]) -> Disconnect:
    """Return the request's Disconnect. With a protocol that reports none, it never happens."""
    disconnect: Disconnect = scope.setdefault("extensions", {}).setdefault(_KEY, Disconnect())
    return disconnect
