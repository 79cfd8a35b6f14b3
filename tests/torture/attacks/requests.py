"""Send one request of a tenant and read its answer, for scenarios."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from msgspec import Struct


class Answer(Struct, frozen=True):
    """An answer: its status (0 if there is none), its error's code if it has one, and how long it took."""

    status: int
    code: str
    seconds: float
    size: int  # of the body, in bytes

    @property
    def summary(self) -> str:
        return f"{self.status} {self.code}".strip()


async def post_json(port: int, api_key: str, path: str, body: dict[str, Any], *headers: str) -> Answer:
    """Send a request on a new connection and read the whole answer."""
    data, started_s = msgspec.json.encode(body), time.monotonic()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {api_key}", f"Content-Length: {len(data)}"]
    if not any(header.startswith("Connection:") for header in headers):
        lines.append("Connection: close")
    received = b""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write("\r\n".join([*lines, *headers, "\r\n"]).encode() + data)
            received = await reader.read()
        finally:
            writer.close()
    except OSError:
        pass
    head, _, answered = received.partition(b"\r\n\r\n")
    status = int(head.split()[1]) if head else 0
    code = ""
    if status >= 400:
        code = msgspec.json.decode(answered)["error"]["code"]
    return Answer(status, code, time.monotonic() - started_s, len(answered))
