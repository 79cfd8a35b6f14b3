"""Claims about who may come in and what the log says of it: the whole application, asked without a socket between."""

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

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

import servekit
from servekit.api import create_app, renew_keys
from servekit.api.event_stream import EventStream
from servekit.api.http import caller_of
from servekit.caller import Caller
from servekit.client_queue import ClientQueue, TokenDelta
from servekit.config import ServeConfig
from servekit.engine import LLMEngine
from servekit.errors import ConfigError, QueueFull, WorkerLost
from servekit.generation_request import GenerationRequest
from servekit.keys import parse_keys_file
from servekit.logs import JsonFormatter, TextFormatter
from servekit.server import read_keys
from servekit.submission import Submission

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
        told: dict[str, Any] = json.loads(self.body)["error"]
        return told


def make_app(**settings: Any) -> Starlette:
    """Its engine is not started: whatever is let in is told that the model is not ready."""
    return create_app(LLMEngine(ServeConfig(**settings)))


def guarded(**settings: Any) -> Starlette:
    keys = parse_keys_file(FILE.encode(), "keys.toml")
    return create_app(LLMEngine(ServeConfig(api_keys_file="keys.toml", **settings)), keys)


@cache
def shared() -> Starlette:
    """For those who leave it as it was: making one takes a tenth of a second."""
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


# -- without a key -----------------------------------------------------------------------------------------------------


def paths_of(app: Starlette) -> set[str]:
    return {re.sub(r"\{.*?\}", "x", route.path) for route in app.routes if isinstance(route, Route)}


def files_of(app: Starlette) -> set[tuple[str, str]]:
    """(method, path) of the console's page and files, by their names in the source."""
    names = {path.name for path in CONSOLE.iterdir()} - {"index.html"}
    found = {"/ui", *(f"/ui/{name}" for name in names)}
    assert {"/ui/app.js", "/ui/style.css"} <= found <= paths_of(app)
    return {(method, path) for method in ("GET", "HEAD") for path in found}


async def test_no_route_answers_without_a_key_but_health_and_ready_and_the_consoles_files() -> None:
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
            assert answer.error["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"]


async def test_a_browser_gets_the_page_without_a_key_and_nobody_anything_else_at_the_root() -> None:
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
    told = await ask(app, "GET", "/", bearer(KEY))
    assert json.loads(told.body).keys() == {"name", "version"} and told.headers["vary"] == "Accept"
    for path in paths_of(app) - {"/", "/health", "/ready"} - {path for _, path in files_of(app)}:
        assert (await ask(app, "GET", path, browser)).status == 401, f"{path} takes a browser for somebody with a key"


async def test_who_watches_takes_none_of_the_requests_that_a_key_may_have_at_a_time() -> None:
    app, narrow = guarded(), bearer("narrow")
    async with asyncio.timeout(30):
        watching = [asyncio.create_task(ask(app, "GET", "/ui/events", narrow)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(viewer.done() for viewer in watching)
        assert (await ask(app, "GET", "/version", narrow)).status == 200
        app.state.engine.drain()
        assert [(await viewer).status for viewer in watching] == [200] * 3
    slow = bearer("slow")
    statuses = [(await ask(app, "GET", "/ui/events", slow)).status for _ in range(4)]
    assert statuses == [503, 503, 503, 429], "it is one of the minute's"


@pytest.mark.parametrize(
    "path",
    [
        *("//health", "/health/", "/HEALTH", "/health//", "/health/.", "/health/../generate", "/generate/../health"),
        *("//generate", "/./health", "/health;x", "/health?", "/health#", "/health\x00", "/health\n", "/health ", " "),
        *("health", "http://127.0.0.1/health", "/ready/../info", "/\u2028health", "/health%2f..%2finfo", "/\\health"),
        *(
            "/ui/",
            "//ui",
            "/ui/.",
            "/ui/../info",
            "/ui/app.js/",
            "/UI",
            "/ui/%2e%2e/app.js",
            "/ui/../../keys.py",
            "/ui\x00",
        ),
    ],
)
async def test_what_looks_like_a_public_path_is_none(path: str) -> None:
    assert (await ask(shared(), "GET", path)).status == 401


async def test_what_is_mounted_or_added_later_wants_a_key_too() -> None:
    app = guarded()
    reached: list[str] = []

    async def anything(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    app.mount("/health", anything)
    app.mount("/console", anything)
    for path in ("/health/x", "/console", "/console/health"):
        assert (await ask(app, "GET", path)).status == 401
    assert reached == []


async def test_a_websocket_is_closed_before_it_is_open() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    for path in ("/generate_stream", "/health"):
        await shared()({**make_scope("GET", path), "type": "websocket"}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}] * 2


async def test_without_keys_nobody_needs_one() -> None:
    assert (await ask(make_app(), "GET", "/version")).status == 200


def test_a_keys_file_that_nobody_read_stops_the_server_rather_than_opening_it() -> None:
    with pytest.raises(AssertionError, match="nobody would need a key"):
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
async def test_a_key_opens_in_either_header(header: tuple[str, str]) -> None:
    app = shared()
    assert (await ask(app, "GET", "/version", header)).status == 200
    assert (await ask(app, "GET", "/nowhere", header)).status == 404
    beside_a_proxys = await ask(app, "GET", "/version", ("authorization", "Basic eDp5"), ("x-api-key", KEY))
    assert beside_a_proxys.status == 200


@pytest.mark.parametrize(
    "header",
    [
        *(("authorization", value) for value in ("", "Bearer", "Bearer ", KEY, f"Basic {KEY}", f"Bearer{KEY}")),
        *(("authorization", value) for value in (f"Bearer {KEY}x", f"Bearer {KEY.upper()}", f"Bearer x, Bearer {KEY}")),
        *(("x-api-key", value) for value in ("", f"Bearer {KEY}", "\xff" * 50, f"{KEY},{KEY}")),
        *((("cookie", f"key={KEY}"), ("api-key", KEY), ("proxy-authorization", f"Bearer {KEY}"))),
    ],
)
async def test_anything_else_does_not(header: tuple[str, str]) -> None:
    answer = await ask(shared(), "GET", "/version", header)
    assert answer.status == 401
    assert KEY not in answer.body.decode()


async def test_both_the_settings_and_the_files_keys_open() -> None:
    app = create_app(
        LLMEngine(ServeConfig(api_key="one,two", api_keys_file="keys.toml")),
        parse_keys_file(FILE.encode(), "keys.toml"),
    )
    for key in ("one", "two", KEY):
        assert (await ask(app, "GET", "/version", bearer(key))).status == 200
    assert (await ask(app, "GET", "/version", bearer("one,two"))).status == 401


async def test_the_caller_is_the_keys_and_not_the_requests() -> None:
    app, callers = guarded(), []

    async def whoami(request: Request) -> Response:
        callers.append(caller_of(request))
        return Response()

    app.add_route("/whoami", whoami)
    claims = (("x-tenant", "root"), ("x-request-id", "trace-1"))
    for key in (KEY, "narrow"):
        await ask(app, "GET", "/whoami", bearer(key), *claims)
    assert callers == [Caller("search", "trace-1"), Caller("batch", "trace-1", 7)]


async def test_a_request_goes_no_sooner_than_its_key_may() -> None:
    app, priorities = guarded(scheduling_policy="priority"), []

    async def submit(wanted: GenerationRequest, caller: Caller, arrival_s: float | None) -> None:
        priorities.append((caller.tenant, wanted.priority))
        raise QueueFull("enough was seen")

    app.state.engine.submit = submit
    for key in ("narrow", KEY):
        for priority in (-1000, 0, 9):
            body = json.dumps({"prompt": "a", "priority": priority}).encode()
            assert (await ask(app, "POST", "/generate", bearer(key), body=body)).status == 503
    assert priorities == [("batch", 7), ("batch", 7), ("batch", 9), ("search", -1000), ("search", 0), ("search", 9)]


@pytest.mark.parametrize("policy", ["fcfs", "shortest", "fair"])
async def test_where_priorities_mean_nothing_a_keys_floor_touches_no_request(policy: str) -> None:
    """Or each would be refused for a priority that its client never sent."""
    app, priorities = guarded(scheduling_policy=policy), []

    async def submit(wanted: GenerationRequest, *_: Any) -> None:
        priorities.append(wanted.priority)
        raise QueueFull("enough was seen")

    app.state.engine.submit = submit
    await ask(app, "POST", "/generate", bearer("narrow"), body=b'{"prompt": "a"}')
    assert priorities == [0]


def test_a_floor_that_has_no_effect_is_said_at_the_start(log: Log, tmp_path: Path) -> None:
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


async def test_a_key_for_metrics_opens_nothing_else(log: Log) -> None:
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
            assert (answer.status, answer.error["code"]) == (403, "permission_denied"), (method, path)
    denied = [line for line in log.lines if line.get("code") == "permission_denied"]
    assert denied[-1]["tenant"] == "prometheus"


# -- other keys while it runs ------------------------------------------------------------------------------------------


async def test_keys_can_be_replaced_and_those_that_stay_keep_their_account() -> None:
    app = guarded(api_key="setting")
    slow, new = bearer("slow"), bearer("new")
    for _ in range(3):
        assert (await ask(app, "GET", "/version", slow)).status == 200
    assert (await ask(app, "GET", "/version", new)).status == 401
    changed = FILE.replace(KEY, "new").replace('"batch"\nrequests', '"nightly"\nrequests')
    renew_keys(app, parse_keys_file(changed.encode(), "keys.toml"))
    assert (await ask(app, "GET", "/version", bearer(KEY))).status == 401, "revoked"
    assert (await ask(app, "GET", "/version", new)).status == 200
    assert (await ask(app, "GET", "/version", bearer("setting"))).status == 200, "not of the file"
    assert (await ask(app, "GET", "/version", slow)).status == 429, "reading the file again is no way round its limits"
    renew_keys(app, parse_keys_file(FILE.replace("minute = 3", "minute = 4").encode(), "keys.toml"))
    assert [(await ask(app, "GET", "/version", slow)).status for _ in range(5)] == [200] * 4 + [429]


async def test_a_request_ends_in_the_account_that_it_began_in() -> None:
    app = guarded()
    let_go = asyncio.Event()

    async def wait(_: Request) -> Response:
        await let_go.wait()
        return Response()

    app.add_route("/wait", wait)
    running = asyncio.create_task(ask(app, "GET", "/wait", bearer("narrow")))
    await asyncio.sleep(0)
    renew_keys(app, parse_keys_file(FILE.replace("requests = 2", "requests = 1").encode(), "keys.toml"))
    assert (await ask(app, "GET", "/version", bearer("narrow"))).status == 200
    renew_keys(app, parse_keys_file(b"[[key]]\nkey = 'other'\ntenant = 'a'", "keys.toml"))
    let_go.set()
    assert (await running).status == 200, "a key that is gone ends nothing"


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_over_a_limit_is_429_with_the_seconds_to_wait() -> None:
    app = guarded()
    for _ in range(3):
        assert (await ask(app, "GET", "/version", bearer("slow"))).status == 200
    answer = await ask(app, "GET", "/version", bearer("slow"))
    assert answer.status == 429
    assert answer.headers["retry-after"] == "20"
    assert answer.error["code"] == "rate_limit_exceeded" and answer.error["type"] == "rate_limit_error"
    assert "3 a minute (requests_per_minute)" in answer.error["message"]
    assert (await ask(app, "GET", "/version", bearer("narrow"))).status == 200, "another key of the same tenant"
    assert (await ask(app, "GET", "/health", bearer("slow"))).status == 200, "public is public"


async def test_a_request_counts_until_its_response_has_ended_however_it_does() -> None:
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


# -- ids and the log ---------------------------------------------------------------------------------------------------

HOSTILE = [
    "",
    " ",
    "a b",
    "a\tb",
    "x" * 65,
    "x" * 65536,
    "\x1b[31m",
    "id\u0085",
    "\xe9",
    "a/b",
    '"},{"',
    "a\x00",
    "%0a",
]


async def test_a_harmless_request_id_is_kept_and_any_other_replaced() -> None:
    app = shared()
    for request_id in ("a", "A-1_b.c", "x" * 64):
        answer = await ask(app, "GET", "/version", ("x-request-id", request_id))
        assert answer.headers["x-request-id"] == request_id
    made = [await ask(app, "GET", "/version", ("x-request-id", hostile)) for hostile in [*HOSTILE, "two\nlines"]]
    ids = [answer.headers["x-request-id"] for answer in made]
    assert all(re.fullmatch("[0-9a-f]{32}", request_id) for request_id in ids)
    assert len(set(ids)) == len(ids)


async def test_every_answer_has_its_id() -> None:
    app = guarded(cors_origins="*")

    async def fail(_: Request) -> Response:
        raise RuntimeError("a bug")

    app.add_route("/fail", fail)
    named = ("x-request-id", "mine")
    asked = [("GET", "/health"), ("GET", "/version"), ("GET", "/nowhere"), ("PUT", "/version"), ("GET", "/fail")]
    statuses = []
    for method, path in asked:
        answer = await ask(app, method, path, bearer(KEY), named)
        statuses.append(answer.status)
        assert answer.headers["x-request-id"] == "mine"
    assert statuses == [200, 200, 404, 405, 500]
    preflight = await ask(
        app, "OPTIONS", "/generate", named, ("origin", "a:b"), ("access-control-request-method", "GET")
    )
    assert preflight.headers["x-request-id"] == "mine"


class Log:
    """What was logged by everybody, as a formatter writes it."""

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


@pytest.fixture
def log() -> Iterator[Log]:
    yield from logging_to(JsonFormatter())


@pytest.fixture
def text_log() -> Iterator[Log]:
    yield from logging_to(TextFormatter())


async def test_a_request_is_one_line_that_says_who_what_and_how_it_went(log: Log) -> None:
    app = shared()
    await ask(app, "GET", "/version", bearer(KEY), ("x-request-id", "a-1"))
    await ask(app, "POST", "/generate", ("x-request-id", "a-2"))
    await ask(app, "GET", "/metrics", bearer(KEY))
    await ask(app, "GET", "/metrics")
    await ask(app, "GET", "/nowhere", bearer(KEY))
    first, denied, routine, denied_routine, lost = (line for line in log.lines if line["message"] == "request")
    assert first.pop("duration_ms") < 1000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "servekit",
        "message": "request",
        "method": "GET",
        "path": "/version",
        "status": 200,
        "client_left": False,
        "tenant": "search",
        "request_id": "a-1",
        "client": "127.0.0.1",
    }
    assert (denied["request_id"], denied["status"], denied["code"]) == ("a-2", 401, "invalid_api_key")
    assert denied["level"] == "info" and "tenant" not in denied
    assert (lost["status"], lost["code"]) == (404, "not_found")
    assert routine["level"] == "debug" and denied_routine["level"] == "info"


async def test_what_the_server_could_not_do_is_a_warning_with_its_code(log: Log) -> None:
    """Also in a stream, whose status was 200 before it failed."""
    app = guarded(scheduling_policy="priority")

    def fails(error: Exception) -> Any:
        async def stream(request: Request) -> Response:
            queue = ClientQueue()
            queue.put(TokenDelta(0, 1, "a", False))
            queue.fail(error)
            submission = Submission(None, None, [None], queue, 1, lambda *_: None)  # type: ignore[arg-type,list-item]
            return EventStream(request, submission, lambda _: b"data: 1\n\n", end=b"data: end\n\n")

        return stream

    app.add_route("/lost", fails(WorkerLost("no worker")))
    app.add_route("/bug", fails(RuntimeError("a bug")))
    assert (await ask(app, "POST", "/generate", bearer(KEY), body=b'{"prompt": "a"}')).status == 503
    assert (await ask(app, "POST", "/generate", bearer(KEY), body=b"{")).status == 400
    answer = await ask(app, "GET", "/lost", bearer(KEY))
    *_, error, end, nothing = answer.body.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "worker_unavailable"
    assert (end, nothing) == (b"data: end", b"")
    await ask(app, "GET", "/bug", bearer(KEY))
    told = [(line["level"], line["status"], line["code"]) for line in log.lines if line["message"] == "request"]
    assert told == [
        ("warning", 503, "worker_unavailable"),
        ("info", 400, "invalid_json"),
        ("warning", 200, "worker_unavailable"),
        ("warning", 200, "internal_error"),
    ]


async def test_a_bug_is_one_entry_with_its_request_id(log: Log, text_log: Log) -> None:
    app = guarded()

    async def fail(_: Request) -> Response:
        raise RuntimeError("two\n2026-01-01 00:00:00 INFO    servekit  forged\x1b[2J")

    app.add_route("/fail", fail)
    assert (await ask(app, "GET", "/fail", bearer(KEY), ("x-request-id", "a-1"))).status == 500
    (bug,) = [line for line in log.lines if line["level"] == "error"]
    assert bug["request_id"] == "a-1" and "Traceback" in bug["exception"] and "forged" in bug["exception"]
    assert "\x1b" not in text_log.text
    for line in text_log.text.splitlines():
        assert line.startswith("    ") or re.match(r"\d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) ", line), line


async def test_hostile_ids_and_paths_end_no_line_and_forge_no_field(log: Log, text_log: Log) -> None:
    app = shared()
    paths = [
        "/a\r\nb",
        "/\x1b[31m",
        "/\u2028x",
        "/\u0085x",
        "/ status=200 x=",
        '/","level":"x',
        "/" + "x" * 70000,
    ]
    for hostile in HOSTILE:
        await ask(app, "GET", "/version", ("x-request-id", hostile))
    for path in paths:
        await ask(app, "GET", path)
        await ask(app, "G\nX", path, bearer(KEY))
    entries = [line for line in log.lines if line["message"] == "request"]
    assert len(entries) == len(HOSTILE) + 2 * len(paths)
    lines = [line for line in text_log.text.splitlines() if " request " in line]
    assert len(lines) == len(entries)
    for text in (log.text, text_log.text):
        assert text.replace("\n", "").isprintable()
        assert max(map(len, text.splitlines())) < 2500
    for line in lines:
        assert len(re.findall(r"(?:^| )status=(\d+)", re.sub(r'"(?:\\.|[^"\\])*"', "", line))) == 1


async def test_a_key_is_in_no_log_and_no_answer(log: Log, text_log: Log) -> None:
    app = shared()
    for number in range(500):
        shown = bearer(KEY), bearer(f"{KEY}-{number}"), ("x-api-key", f"{number}{KEY}"), ("authorization", KEY)
        answer = await ask(app, "GET", ("/info", "/nowhere")[number % 2], shown[number % 4])
        assert KEY.encode() not in answer.body
        answer = await ask(app, "POST", "/generate", shown[number // 2 % 4], ("x-request-id", f"{number}"))
        assert KEY.encode() not in answer.body
    assert len(log.lines) >= 1000
    assert KEY not in log.text and KEY not in text_log.text


# -- pages of other origins --------------------------------------------------------------------------------------------

PREFLIGHT = (
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,x-stainless-os"),
)


async def test_pages_of_other_origins_may_not_call_unless_told_otherwise() -> None:
    app = shared()
    answer = await ask(app, "GET", "/version", bearer(KEY), ("origin", "https://a.example"))
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert (await ask(app, "OPTIONS", "/generate", ("origin", "https://a.example"), *PREFLIGHT)).status == 401


async def test_a_page_may_ask_before_it_asks_and_reads_its_refusals() -> None:
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
    for told in (refused, denied):
        assert told.headers["access-control-allow-origin"] == "http://localhost:3000"
        assert told.headers["access-control-expose-headers"] == "X-Request-Id, Retry-After, X-Should-Retry"
    stranger = ("origin", "https://b.example")
    assert (await ask(app, "OPTIONS", "/generate", stranger, *PREFLIGHT)).status == 400
    answer = await ask(app, "GET", "/version", bearer(KEY), stranger)
    assert "access-control-allow-origin" not in answer.headers
    assert (await ask(app, "OPTIONS", "/generate", origin)).status == 401, "no preflight: a request like any other"


async def test_all_origins_may_be_let_in_but_none_with_cookies() -> None:
    answer = await ask(guarded(cors_origins="*"), "GET", "/version", bearer(KEY), ("origin", "null"))
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("setting", ["", "example.org", "https://a.example/", "https://a.example,", "https://a b"])
def test_what_is_no_origin_is_refused_at_the_start(setting: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins: "):
        make_app(cors_origins=setting)


def test_keys_are_refused_at_the_start_if_there_is_none() -> None:
    with pytest.raises(ConfigError, match="api_key: key 1 of 1 is empty"):
        make_app(api_key="")
    with pytest.raises(ConfigError, match=r"'/nowhere/keys.toml': No such file"):
        read_keys(ServeConfig(api_keys_file="/nowhere/keys.toml"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "a.example", ""])  # noqa: S104
def test_a_server_that_others_can_reach_warns_that_it_asks_for_no_key(log: Log, host: str) -> None:
    read_keys(ServeConfig(host=host))
    (warning,) = log.lines
    assert warning["level"] == "warning" and "--api-key" in warning["message"]
    read_keys(ServeConfig(host=host, api_key="a"))
    for loopback in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        read_keys(ServeConfig(host=loopback))
    assert len(log.lines) == 1
