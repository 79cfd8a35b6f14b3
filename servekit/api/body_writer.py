"""Write a part of an answer's body at once, past the layers of the application.

In plain ASGI each part passes through the `send` of every layer, and for each part the request's task is resumed
through the calls of all of them. No layer looks at parts of a body, so the protocol offers to write them itself. For a
stream of small events this is a fifth of the server's work.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

_KEY = "servekit.api.body_writer"  # among the ASGI extensions


class BodyWriter(Protocol):
    """Writes parts of the body of one request's answer."""

    @property
    def is_ready(self) -> bool:
        """Whether a part may be written now: the head is sent, and the client reads what it gets."""

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty and not the last one, if the writer `is_ready`."""


def offer_body_writer(scope: MutableMapping[str, Any], writer: BodyWriter) -> None:
    """Let the application write parts of the answer's body with this."""
    scope.setdefault("extensions", {})[_KEY] = writer


def body_writer_of(scope: MutableMapping[str, Any]) -> BodyWriter | None:
    """Return the request's BodyWriter; None with a protocol that offers none."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(_KEY)
    return writer
