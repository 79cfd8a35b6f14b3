"""Bound the retries of a tenant's requests together, so that a server that fails does not get a multiple of its load.

This is the retry budget of Finagle and of gRPC (proposal A6): each request adds a part of a retry, and each retry takes
a whole one. While the server works, a few retries are saved for a short failure. While it fails, retries add at most
`ratio` to its load.
"""

from __future__ import annotations

MAX_SAVED = 10.0  # retries


class RetryBudget:
    """How many retries are left."""

    def __init__(self, ratio: float) -> None:
        """`ratio` is how many retries each request adds."""
        self._ratio = ratio
        self._left = MAX_SAVED if ratio else 0.0

    def request_began(self) -> None:
        """Count a request; its retries do not count."""
        self._left = min(MAX_SAVED, self._left + self._ratio)

    def take(self) -> bool:
        """Take a retry. Returns False if there is none left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
