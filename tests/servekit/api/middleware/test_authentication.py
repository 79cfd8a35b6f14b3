"""API keys: which requests need one, whose tenant they get, and the limits of keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from servekit.api.app import create_app, replace_keys
from servekit.api.auth.keys import parse_keys_file
from servekit.api.endpoint import caller_of
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.engine.llm_engine import LLMEngine
from servekit.errors import QueueFull
from servekit.requests.generation import GenerationRequest
from servekit.server.keys_file import read_keys
from tests.support.asgi import (
    CONSOLE,
    FILE,
    KEY,
    METHODS,
    Log,
    ask,
    bearer,
    files_of,
    guarded,
    make_app,
    make_scope,
    paths_of,
    shared,
)

# -- without a key -----------------------------------------------------------------------------------------------------


async def test_only_health_ready_and_the_console_files_need_no_key() -> None:
    app = shared()
    assert all(type(route) is Route for route in app.routes), "a mounted application has routes that are not asked here"
    paths, files = paths_of(app), files_of(app)
    assert len(paths) >= 17
    open_to_all = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("HEAD", "/ready")}
    for path in paths | {"/nowhere", "", "*", "/admin/../info", "/ui/nowhere.js", "/ui/index.html"}:
        for method in METHODS:
            answer = await ask(app, method, path)
            if (method, path) in open_to_all | files:
                assert answer.status == 200 or (answer.status == 503 and path == "/ready"), (method, path)
                continue
            assert answer.status == 401, (method, path)
            assert answer.error["code"] == ("" if path.startswith("/api/") else "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]


async def test_root_without_a_key_serves_the_page_to_browsers_only() -> None:
    app, browser = shared(), ("accept", "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8")
    for path in ("/", "/ui"):
        page = await ask(app, "GET", path, browser)
        assert page.status == 200 and page.body == (CONSOLE / "index.html").read_bytes()
        assert page.headers["vary"] == "Accept" if path == "/" else True
    for method in METHODS:
        answer = await ask(app, method, "/", browser)
        assert answer.status == (200 if method in ("GET", "HEAD") else 401), method
    for accept in ("*/*", "application/json", ""):
        assert (await ask(app, "GET", "/", ("accept", accept))).status == 401
    answer = await ask(app, "GET", "/", bearer(KEY))
    assert json.loads(answer.body).keys() == {"name", "version"} and answer.headers["vary"] == "Accept"
    for path in paths_of(app) - {"/", "/health", "/ready"} - {path for _, path in files_of(app)}:
        assert (await ask(app, "GET", path, browser)).status == 401, f"{path} takes a browser for somebody with a key"


async def test_viewers_do_not_count_as_concurrent_requests() -> None:
    app, narrow = guarded(), bearer("narrow")
    async with asyncio.timeout(30):
        watching = [asyncio.create_task(ask(app, "GET", "/ui/events", narrow)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(viewer.done() for viewer in watching)
        assert (await ask(app, "GET", "/version", narrow)).status == 200
        app.state.models.drain()
        assert [(await viewer).status for viewer in watching] == [200] * 3
    slow = bearer("slow")
    statuses = [(await ask(app, "GET", "/ui/events", slow)).status for _ in range(4)]
    assert statuses == [503, 503, 503, 429], "it is one of the minute's"


@pytest.mark.parametrize(
    "path",
    [
        "//health",
        "/health/",
        "/HEALTH",
        "/health//",
        "/health/.",
        "/health/../generate",
        "/generate/../health",
        "//generate",
        "/./health",
        "/health;x",
        "/health?",
        "/health#",
        "/health\x00",
        "/health\n",
        "/health ",
        " ",
        "health",
        "http://127.0.0.1/health",
        "/ready/../info",
        "/\u2028health",
        "/health%2f..%2finfo",
        "/\\health",
        "/ui/",
        "//ui",
        "/ui/.",
        "/ui/../info",
        "/ui/app.js/",
        "/UI",
        "/ui/%2e%2e/app.js",
        "/ui/../../keys.py",
        "/ui\x00",
    ],
)
async def test_path_similar_to_a_public_one_needs_a_key(path: str) -> None:
    assert (await ask(shared(), "GET", path)).status == 401


async def test_routes_that_are_added_later_need_a_key() -> None:
    app = guarded()
    reached: list[str] = []

    async def anything(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    app.mount("/health", anything)
    app.mount("/console", anything)
    for path in ("/health/x", "/console", "/console/health"):
        assert (await ask(app, "GET", path)).status == 401
    assert reached == []


async def test_websocket_is_closed_before_it_is_open() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    for path in ("/generate_stream", "/health"):
        await shared()({**make_scope("GET", path), "type": "websocket"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}] * 2


async def test_without_keys_no_key_is_needed() -> None:
    assert (await ask(make_app(), "GET", "/version")).status == 200


def test_keys_file_that_was_not_read_stops_the_start() -> None:
    with pytest.raises(AssertionError, match="no key would be needed"):
        make_app(api_keys_file="keys.toml")


# -- with one ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        ("authorization", f"Bearer {KEY}"),
        ("authorization", f"bearer {KEY}"),
        ("authorization", f"BEARER  {KEY} "),
        ("x-api-key", KEY),
    ],
)
async def test_key_is_accepted_in_either_header(header: tuple[str, str]) -> None:
    app = shared()
    assert (await ask(app, "GET", "/version", header)).status == 200
    assert (await ask(app, "GET", "/nowhere", header)).status == 404
    beside_a_proxys = await ask(app, "GET", "/version", ("authorization", "Basic eDp5"), ("x-api-key", KEY))
    assert beside_a_proxys.status == 200


async def test_only_a_few_keys_are_tried_in_one_request() -> None:
    guesses = [("x-api-key", f"guess-{number}") for number in range(250)]
    assert (await ask(shared(), "GET", "/version", *guesses[:3], bearer(KEY))).status == 200
    for shown in ([*guesses, bearer(KEY)], [bearer(KEY), *guesses[:4]]):
        answer = await ask(shared(), "GET", "/version", *shown)
        assert answer.status == 401 and f"has {len(shown)} API keys; at most 4 are tried" in answer.error["message"]


@pytest.mark.parametrize(
    "header",
    [
        *(("authorization", value) for value in ("", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer{KEY}")),
        *(("authorization", value) for value in (f"Bearer {KEY}x", f"Bearer {KEY.upper()}", f"Bearer x, Bearer {KEY}")),
        *(("x-api-key", value) for value in ("", f"Bearer {KEY}", "\xff" * 50, f"{KEY},{KEY}")),
        ("cookie", f"key={KEY}"),
        ("api-key", KEY),
        ("proxy-authorization", f"Bearer {KEY}"),
    ],
)
async def test_anything_else_is_refused(header: tuple[str, str]) -> None:
    answer = await ask(shared(), "GET", "/version", header)
    assert answer.status == 401
    assert KEY not in answer.body.decode()


async def test_keys_of_the_setting_and_the_file_are_accepted() -> None:
    app = create_app(
        LLMEngine(ServeConfig(api_key="one,two", api_keys_file="keys.toml")),
        parse_keys_file(FILE.encode(), "keys.toml"),
    )
    for key in ("one", "two", KEY):
        assert (await ask(app, "GET", "/version", bearer(key))).status == 200
    assert (await ask(app, "GET", "/version", bearer("one,two"))).status == 401


async def test_tenant_comes_from_the_key_not_from_the_request() -> None:
    app, callers = guarded(), []

    async def whoami(request: Request) -> Response:
        callers.append(caller_of(request))
        return Response()

    app.add_route("/whoami", whoami)
    claims = (("x-tenant", "root"), ("x-request-id", "trace-1"))
    for key in (KEY, "narrow"):
        await ask(app, "GET", "/whoami", bearer(key), *claims)
    assert callers == [Caller("search", "trace-1"), Caller("batch", "trace-1", 7)]


async def test_priority_is_raised_to_the_keys_min_priority() -> None:
    app, priorities = guarded(scheduling_policy="priority"), []

    def reserve(wanted: GenerationRequest, caller: Caller) -> None:
        priorities.append((caller.tenant, wanted.priority))
        raise QueueFull("enough was seen")

    app.state.models.reserve = reserve
    for key in ("narrow", KEY):
        for priority in (-1000, 0, 9):
            body = json.dumps({"prompt": "a", "priority": priority}).encode()
            assert (await ask(app, "POST", "/generate", bearer(key), body=body)).status == 503
    assert priorities == [("batch", 7), ("batch", 7), ("batch", 9), ("search", -1000), ("search", 0), ("search", 9)]


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "fair"])
async def test_min_priority_is_ignored_with_other_policies(policy: str) -> None:
    """Otherwise each request would be refused for a priority that its client never sent."""
    app, priorities = guarded(scheduling_policy=policy), []

    def reserve(wanted: GenerationRequest, *_: Any) -> None:
        priorities.append(wanted.priority)
        raise QueueFull("enough was seen")

    app.state.models.reserve = reserve
    await ask(app, "POST", "/generate", bearer("narrow"), body=b'{"prompt": "a"}')
    assert priorities == [0]


def test_min_priority_without_effect_is_logged_at_the_start(log: Log, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    read_keys(ServeConfig(api_keys_file=str(path)))
    (warning,) = log.lines
    assert warning["level"] == "warning" and "min_priority has no effect" in warning["message"]
    assert "'shortest'" in warning["message"]
    read_keys(ServeConfig(api_keys_file=str(path), scheduling_policy="priority"))
    path.write_text(FILE.replace("min_priority = 7", ""))
    read_keys(ServeConfig(api_keys_file=str(path)))
    assert len(log.lines) == 1


async def test_metrics_key_may_call_metrics_only(log: Log) -> None:
    app = shared()
    scraper = bearer("scraper")
    for method in ("GET", "HEAD"):
        assert (await ask(app, method, "/metrics", scraper)).status == 200
        assert (await ask(app, method, "/health", scraper)).status in (200, 503), "public is public"
    open_to_all = {(m, p) for m in ("GET", "HEAD") for p in ("/health", "/ready", "/metrics")} | files_of(app)
    for path in paths_of(app) | {"/nowhere", "/metrics/", "//metrics", "/metrics/../info"}:
        for method in METHODS:
            if (method, path.rstrip("/")) in open_to_all:
                continue
            answer = await ask(app, method, path, scraper)
            assert answer.status == 403 and "may only call GET /metrics" in answer.error["message"], (method, path)
    denied = [line for line in log.lines if line.get("code") == "permission_denied"]
    assert denied[-1]["tenant"] == "prometheus"


# -- other keys while it runs ------------------------------------------------------------------------------------------


async def test_replaced_keys_apply_at_once_and_unchanged_keys_keep_their_account() -> None:
    app = guarded(api_key="setting")
    slow, new = bearer("slow"), bearer("new")
    for _ in range(3):
        assert (await ask(app, "GET", "/version", slow)).status == 200
    assert (await ask(app, "GET", "/version", new)).status == 401
    changed = FILE.replace(KEY, "new").replace('"batch"\nrequests', '"nightly"\nrequests')
    replace_keys(app, parse_keys_file(changed.encode(), "keys.toml"))
    assert (await ask(app, "GET", "/version", bearer(KEY))).status == 401, "revoked"
    assert (await ask(app, "GET", "/version", new)).status == 200
    assert (await ask(app, "GET", "/version", bearer("setting"))).status == 200, "not of the file"
    assert (await ask(app, "GET", "/version", slow)).status == 429, "reading the file again is no way round its limits"
    replace_keys(app, parse_keys_file(FILE.replace("minute = 3", "minute = 4").encode(), "keys.toml"))
    assert [(await ask(app, "GET", "/version", slow)).status for _ in range(5)] == [200] * 4 + [429]


async def test_request_ends_in_the_account_that_it_began_in() -> None:
    app = guarded()
    let_go = asyncio.Event()

    async def wait(_: Request) -> Response:
        await let_go.wait()
        return Response()

    app.add_route("/wait", wait)
    running = asyncio.create_task(ask(app, "GET", "/wait", bearer("narrow")))
    await asyncio.sleep(0)
    replace_keys(app, parse_keys_file(FILE.replace("requests = 2", "requests = 1").encode(), "keys.toml"))
    assert (await ask(app, "GET", "/version", bearer("narrow"))).status == 200
    replace_keys(app, parse_keys_file(b"[[key]]\nkey = 'other'\ntenant = 'a'", "keys.toml"))
    let_go.set()
    assert (await running).status == 200, "a key that is gone ends nothing"


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_request_over_a_limit_gets_429_with_retry_after() -> None:
    app = guarded()
    for _ in range(3):
        assert (await ask(app, "GET", "/version", bearer("slow"))).status == 200
    answer = await ask(app, "GET", "/version", bearer("slow"))
    assert answer.status == 429
    assert answer.headers["retry-after"] == "20"
    assert answer.error["code"] == "rate_limit_exceeded" and answer.error["type"] == "rate_limit_error"
    assert "3 requests per minute (requests_per_minute)" in answer.error["message"]
    assert (await ask(app, "GET", "/version", bearer("narrow"))).status == 200, "another key of the same tenant"
    assert (await ask(app, "GET", "/health", bearer("slow"))).status == 200, "public is public"


async def test_request_counts_until_its_response_ends_in_any_way() -> None:
    app = guarded()
    let_go = asyncio.Event()

    async def wait(_: Request) -> Response:
        await let_go.wait()
        return Response()

    async def fail(_: Request) -> Response:
        raise RuntimeError("a bug")

    app.add_route("/wait", wait)
    app.add_route("/fail", fail)
    narrow = bearer("narrow")
    waiting = [asyncio.create_task(ask(app, "GET", "/wait", narrow)) for _ in range(2)]
    await asyncio.sleep(0)
    assert (await ask(app, "GET", "/version", narrow)).status == 429
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    for _ in range(5):
        assert (await ask(app, "GET", "/fail", narrow)).status == 500
        assert (await ask(app, "GET", "/nowhere", narrow)).status == 404
        assert (await ask(app, "DELETE", "/version", narrow)).status == 405
        assert (await ask(app, "POST", "/generate", narrow)).status in (400, 503)
    another = asyncio.create_task(ask(app, "GET", "/wait", narrow))
    await asyncio.sleep(0)
    assert (await ask(app, "GET", "/version", narrow)).status == 429, "of all those that ended, none did so twice"
    let_go.set()
    assert [answer.status for answer in await asyncio.gather(waiting[1], another)] == [200, 200]
