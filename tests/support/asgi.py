"""Call the whole HTTP application without a socket, and read what it logs."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Scope

import servekit
from servekit.api.app import create_app
from servekit.api.auth.keys import parse_keys_file
from servekit.config import ServeConfig
from servekit.engine.llm_engine import LLMEngine

CONSOLE = Path(servekit.__file__).parent / "console"
KEY = "canary-key"
FILE = f"""
[[key]]
key = "{KEY}"
tenant = "search"
[[key]]
key = "narrow"
tenant = "batch"
max_concurrent_requests = 2
min_priority = 7
[[key]]
key = "slow"
tenant = "batch"
requests_per_minute = 3
[[key]]
key = "scraper"
tenant = "prometheus"
only = "metrics"
"""
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY", "PROPFIND", "get"]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        told: dict[str, Any] | str = json.loads(self.body)["error"]
        return {"message": told, "code": ""} if isinstance(told, str) else told  # Ollama's form is a text


def make_app(**settings: Any) -> Starlette:
    """Return an application whose engine has not started: admitted requests are refused as not ready."""
    return create_app(LLMEngine(ServeConfig(**settings)))


def guarded(**settings: Any) -> Starlette:
    keys = parse_keys_file(FILE.encode(), "keys.toml")
    return create_app(LLMEngine(ServeConfig(api_keys_file="keys.toml", **settings)), keys)


@cache
def shared() -> Starlette:
    """Return an application for tests that do not change it."""
    return guarded()


def make_scope(method: str, path: str, *headers: tuple[str, str]) -> Scope:
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode("utf-8", "replace"),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 1),
    }


async def ask(app: Starlette, method: str, path: str, *headers: tuple[str, str], body: bytes = b"") -> Answer:
    sent: list[Message] = []

    to_receive: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if to_receive:
            return to_receive.pop()
        await asyncio.Event().wait()  # the client waits for its answer
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    await app(make_scope(method, path, *headers), receive, send)
    start = sent[0]
    told = {name.decode(): value.decode() for name, value in start["headers"]}
    assert len(told) == len(start["headers"]), "a header came twice"
    return Answer(start["status"], told, b"".join(message.get("body", b"") for message in sent[1:]))


def bearer(key: str) -> tuple[str, str]:
    return "authorization", f"Bearer {key}"


def paths_of(app: Starlette) -> set[str]:
    return {re.sub(r"\{.*?\}", "x", route.path) for route in app.routes if isinstance(route, Route)}


def files_of(app: Starlette) -> set[tuple[str, str]]:
    """Return (method, path) of the console's page and files, by their names in the source."""
    names = {path.name for path in CONSOLE.iterdir()} - {"index.html"}
    found = {"/ui", *(f"/ui/{name}" for name in names)}
    assert {"/ui/app.js", "/ui/style.css"} <= found <= paths_of(app)
    return {(method, path) for method in ("GET", "HEAD") for path in found}


class Log:
    """All log entries, as a formatter writes them."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._stream = StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(formatter)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


def logging_to(formatter: logging.Formatter) -> Iterator[Log]:
    log, root = Log(formatter), logging.getLogger()
    level = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.DEBUG)
    yield log
    root.removeHandler(log.handler)
    root.setLevel(level)
