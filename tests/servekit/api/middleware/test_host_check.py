"""The Host header: a web page may point its own domain name at this machine (DNS rebinding)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message

from servekit.errors import ConfigError
from tests.support.asgi import Answer, ask, bearer, guarded, make_app, make_scope

EVIL = ("host", "evil.example:8000")


async def version(app: Starlette, host: str) -> Answer:
    return await ask(app, "GET", "/version", ("host", host))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LocalHost:1",
        "localhost.",
        "a.localhost:8000",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.9.9.9:65535",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:8000",
    ],
)
async def test_loopback_server_accepts_its_own_names(host: str) -> None:
    assert (await version(make_app(), host)).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "0.0.0.0:8000",
        "192.0.2.7:8000",
        "[::2]:8000",
        "evil.example:80:80",
        "[]",
        "[",
        "]:1",
        "",
        ":8000",
        "127.0.0.1:8000@evil.example",
        "localhost:8000, evil.example",
        "localhost:x",
        "lo\xe9calhost",
        "*",
    ],
)
async def test_loopback_server_refuses_other_names(host: str) -> None:
    app = make_app()
    answer = await version(app, host)
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in answer.error["message"]
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]


async def test_host_check_covers_every_route_and_method() -> None:
    app = make_app(cors_origins="*")
    paths = {re.sub(r"\{.*?\}", "x", route.path) for route in app.routes if isinstance(route, Route)}
    for path in paths | {"/nowhere", "", "*", "/health/../generate"}:
        for method in ("GET", "HEAD", "POST", "OPTIONS", "TRACE"):
            answer = await ask(app, method, path, EVIL, ("content-type", "text/plain"), body=b'{"prompt": "a"}')
            if path in ("/health", "/ready") and method in ("GET", "HEAD"):
                assert answer.status in (200, 503), "probes ask by any address"
            else:
                assert answer.status == 403, (method, path)
                assert not [name for name in answer.headers if name.startswith("access-control")]
    both = await ask(app, "GET", "/version", ("host", "localhost"), EVIL)
    assert both.status == 403, "two names, one of them wrong"
    closed: list[Message] = []

    async def send(message: Message) -> None:
        closed.append(message)

    scope = {**make_scope("GET", "/generate", EVIL), "type": "websocket"}
    await app(scope, send, send)
    assert closed == [{"type": "websocket.close", "code": 1008}]


async def test_request_without_a_host_header_is_accepted() -> None:
    assert (await ask(make_app(), "GET", "/version")).status == 200


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"host": "192.0.2.1"}, {"allowed_hosts": "*"}])  # noqa: S104
async def test_any_name_is_accepted_where_other_machines_can_connect(settings: dict[str, Any]) -> None:
    assert (await version(make_app(**settings), "evil.example:8000")).status == 200


async def test_any_name_is_accepted_with_keys_unless_names_are_set() -> None:
    assert (await ask(guarded(), "GET", "/version", EVIL, bearer("canary-key"))).status == 200
    named = guarded(allowed_hosts="llm.example.org")
    assert (await ask(named, "GET", "/version", EVIL, bearer("canary-key"))).status == 403, "unless names are given"


@pytest.mark.parametrize("bind", ["127.0.0.1", "Here.example"])
async def test_allowed_hosts_are_accepted_beside_its_own_names(bind: str) -> None:
    app = make_app(host=bind, allowed_hosts="LLM.example.org, *.a.example,2001:db8::1")
    for host in ("llm.example.org:443", "x.a.example", "x.y.a.example", "[2001:db8::1]:8000", "localhost", bind):
        assert (await version(app, host)).status == 200, host
    for host in ("evil.example", "a.example", "xa.example", "llm.example.org.evil.example"):
        assert (await version(app, host)).status == 403, host


@pytest.mark.parametrize("setting", ["", "a,", "https://a.example", "a.example:80", "a b", "*a", "a.*", "[::1]"])
def test_invalid_host_name_is_refused_at_the_start(setting: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts: "):
        make_app(allowed_hosts=setting)
