"""Send a request to the server's own application, below the authentication layer and without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Send


async def answer_inner_request(
    app: ASGIApp, app_scope: dict[str, Any], path: str, body: bytes, state: dict[str, Any], send: Send
) -> None:
    """Answer a POST with a JSON body. `app_scope` is what all scopes of the application contain.

    `state` has the caller, and what the application notes of the request. The answer's messages go to `send`. Raises
    what the application raises: then it has answered as far as it could.
    """
    scope = {
        **app_scope,
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "server": None,
        "client": None,
        "state": state,
    }
    to_receive: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if to_receive:
            return to_receive.pop()
        await asyncio.Event().wait()  # the client of such a request never leaves
        raise AssertionError

    await app(scope, receive, send)
