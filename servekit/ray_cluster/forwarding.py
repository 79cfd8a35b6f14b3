"""Carry a client's request from Ray Serve's proxy to a server as a value. Does not import Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from servekit.errors import RequestTooLarge, ServekitError

Headers = list[tuple[str, str]]
Message = MutableMapping[str, Any]

# Of one connection, and so not to be passed on.
HOP_HEADERS = frozenset(
    {"host", "connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect", "content-length"}
)


class ForwardedRequest(Struct, frozen=True):
    """One request of a client, as it was received."""

    method: str
    path: str  # with the query, as it was written
    headers: Headers
    body: bytes


def forwarded(scope: Message, body: bytes) -> ForwardedRequest:
    """Return a request that came in an ASGI scope, without the route prefix of the application."""
    written = scope.get("raw_path") or quote(scope["path"]).encode()
    path = written[len(scope.get("root_path", "")) :].decode("latin-1")
    if not path.startswith("/"):  # `*` or `http://…` in the request line: it must not become a part of the address
        path = f"/{path}"
    query = scope.get("query_string", b"").decode("latin-1")
    headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
    return ForwardedRequest(scope["method"], f"{path}?{query}" if query else path, end_to_end(headers), body)


def end_to_end(headers: Iterable[tuple[str, str]]) -> Headers:
    """Return the headers that are passed on."""
    return [(name, value) for name, value in headers if name.lower() not in HOP_HEADERS]


async def read_body(receive: Callable[[], Awaitable[Message]], max_bytes: int) -> bytes | None:
    """Return the body of a request; None if the client went before its end. Raises RequestTooLarge."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise RequestTooLarge(f"the request body has more than {max_bytes} bytes, the limit (max_body_bytes)")
        if not message.get("more_body", False):
            return bytes(body)


def error_body(error: ServekitError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.type, "param": None, "code": error.answer_code}}
