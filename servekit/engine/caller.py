"""The identity of a client: its tenant, its request id, and its limits."""

from __future__ import annotations

from msgspec import Struct


class Caller(Struct, frozen=True):
    """What the API knows about the sender of a request. The tenant comes from the API key, never from the request."""

    tenant: str = ""
    request_id: str = ""
    min_priority: int = -1000  # the most urgent priority that its requests may have; by default any
    max_answers: int | None = None  # maximum answers of a request; None: --max-client-batch-size


ANONYMOUS = Caller()
