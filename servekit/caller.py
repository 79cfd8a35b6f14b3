"""Who asks: the tenant whose account it goes to, and the name that logs and traces have for the request."""

from __future__ import annotations

from msgspec import Struct


class Caller(Struct, frozen=True):
    """What the door knows of whoever sent a request. The tenant comes from the key, never from the request itself."""

    tenant: str = ""
    request_id: str = ""
    min_priority: int = -1000  # as soon as its requests may ask to be served; this is as soon as any may


ANYBODY = Caller()
