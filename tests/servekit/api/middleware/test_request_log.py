"""Request ids and the request log."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from servekit.api.responses.sse import SERVER_SENT_EVENTS, EventStream
from servekit.engine.client_queue import ClientQueue, TokenDelta
from servekit.engine.request_state import RequestState
from servekit.errors import WorkerLost
from servekit.requests.generation import GenerationRequest, Sampling
from tests.support.asgi import (
    KEY,
    Log,
    ask,
    bearer,
    guarded,
    shared,
)

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


async def test_safe_request_id_is_kept_and_any_other_replaced() -> None:
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


async def test_each_request_is_one_log_entry_with_caller_route_and_outcome(log: Log) -> None:
    app = shared()
    await ask(app, "GET", "/version", bearer(KEY), ("x-request-id", "a-1"))
    await ask(app, "POST", "/generate", ("x-request-id", "a-2"))
    await ask(app, "GET", "/metrics", bearer(KEY))
    await ask(app, "GET", "/metrics")
    await ask(app, "GET", "/nowhere", bearer(KEY))
    first, denied, routine, denied_routine, lost = (line for line in log.lines if line["message"] == "request")
    assert 0 <= first.pop("duration_ms") < 60_000
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


class OneEvent:
    """Write any tokens as the same event."""

    framing = SERVER_SENT_EVENTS
    end_of_stream = b"data: end\n\n"

    def events(self, _: list[TokenDelta]) -> bytes:
        return b"data: 1\n\n"

    def last_events(self) -> bytes:
        return b""


async def test_server_errors_are_warnings_with_their_code(log: Log) -> None:
    """Also for a stream, whose status was 200 before it failed."""
    app = guarded(scheduling_policy="priority")

    def fails(error: Exception) -> Any:
        async def stream(request: Request) -> Response:
            queue = ClientQueue()
            queue.put(TokenDelta(0, 1, "a", False))
            queue.fail(error)
            asked = GenerationRequest(prompts=[], sampling=Sampling())
            state = RequestState(asked, None, [None], queue, 1, lambda *_: None)  # type: ignore[arg-type,list-item]
            return EventStream(request, state, OneEvent())

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
    logged = [(line["level"], line["status"], line["code"]) for line in log.lines if line["message"] == "request"]
    assert logged == [
        ("warning", 503, "worker_unavailable"),
        ("info", 400, "invalid_json"),
        ("warning", 200, "worker_unavailable"),
        ("warning", 200, "internal_error"),
    ]


async def test_internal_error_is_one_entry_with_its_request_id(log: Log, text_log: Log) -> None:
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


async def test_hostile_ids_and_paths_cannot_forge_log_lines(log: Log, text_log: Log) -> None:
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


async def test_keys_are_in_no_log_and_no_answer(log: Log, text_log: Log) -> None:
    app = shared()
    for number in range(500):
        shown = bearer(KEY), bearer(f"{KEY}-{number}"), ("x-api-key", f"{number}{KEY}"), ("authorization", KEY)
        answer = await ask(app, "GET", ("/info", "/nowhere")[number % 2], shown[number % 4])
        assert KEY.encode() not in answer.body
        answer = await ask(app, "POST", "/generate", shown[number // 2 % 4], ("x-request-id", f"{number}"))
        assert KEY.encode() not in answer.body
    assert len(log.lines) >= 1000
    assert KEY not in log.text and KEY not in text_log.text
