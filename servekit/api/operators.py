"""Check that a request comes from an operator."""

from __future__ import annotations

from starlette.requests import Request

from servekit.api.auth.keys import Key
from servekit.errors import Forbidden


def check_admin(request: Request) -> None:
    """Raise Forbidden for a key that is not an operator's."""
    key: Key | None = request.scope["state"].get("api_key")
    if key is not None and not key.is_admin:
        raise Forbidden(
            "this API key may not manage models; use one whose entry in the file of --api-keys-file has admin = true"
        )
