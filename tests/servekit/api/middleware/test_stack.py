"""CORS, and settings that are refused at the start."""

from __future__ import annotations

import pytest

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.server.keys_file import read_keys
from tests.support.asgi import (
    KEY,
    Log,
    ask,
    bearer,
    guarded,
    make_app,
    shared,
)

PREFLIGHT = (
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,x-stainless-os"),
)


async def test_other_origins_are_refused_by_default() -> None:
    app = shared()
    answer = await ask(app, "GET", "/version", bearer(KEY), ("origin", "https://a.example"))
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (await ask(app, "OPTIONS", "/generate", ("origin", "https://a.example"), *PREFLIGHT)).status == 401


async def test_allowed_origin_can_send_preflights_and_read_errors() -> None:
    app = guarded(cors_origins="https://a.example, http://localhost:3000")
    origin = ("origin", "http://localhost:3000")
    answer = await ask(app, "OPTIONS", "/generate", origin, *PREFLIGHT)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    for _ in range(4):
        refused = await ask(app, "GET", "/version", bearer("slow"), origin)
    denied = await ask(app, "GET", "/version", origin)
    assert (refused.status, denied.status) == (429, 401)
    for answer in (refused, denied):
        assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert answer.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After, X-Should-Retry"
    stranger = ("origin", "https://b.example")
    assert (await ask(app, "OPTIONS", "/generate", stranger, *PREFLIGHT)).status == 400
    answer = await ask(app, "GET", "/version", bearer(KEY), stranger)
    assert "access-control-allow-origin" not in answer.headers
    assert (await ask(app, "OPTIONS", "/generate", origin)).status == 401, "no preflight: a request like any other"


async def test_all_origins_can_be_allowed_but_never_with_cookies() -> None:
    answer = await ask(guarded(cors_origins="*"), "GET", "/version", bearer(KEY), ("origin", "null"))
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("setting", ["", "example.org", "https://a.example/", "https://a.example,", "https://a b"])
def test_invalid_origin_is_refused_at_the_start(setting: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins: "):
        make_app(cors_origins=setting)


def test_empty_or_missing_keys_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="api_key: key 1 of 1 is empty"):
        make_app(api_key="")
    with pytest.raises(ConfigError, match=r"'/nowhere/keys.toml': No such file"):
        read_keys(ServeConfig(api_keys_file="/nowhere/keys.toml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "a.example", ""])  # noqa: S104
def test_reachable_server_without_keys_logs_a_warning(log: Log, host: str) -> None:
    read_keys(ServeConfig(host=host))
    (warning,) = log.lines
    assert warning["level"] == "warning" and "--api-key" in warning["message"]
    read_keys(ServeConfig(host=host, api_key="a"))
    for loopback in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        read_keys(ServeConfig(host=loopback))
    assert len(log.lines) == 1
