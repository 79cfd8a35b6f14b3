"""A server with API keys: tenants, limits, public routes, and its log."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support import proc
from tests.support.server_process import ServerProcess, events, serving

KEY, OTHER, SAME, NARROW, METERED = (f"canary-{name}" for name in ("search", "other", "same", "narrow", "metered"))
KEYS = f"""
[[key]]
key = "{KEY}"
tenant = "search"
[[key]]
key = "{OTHER}"
tenant = "other"
[[key]]
key = "{SAME}"
tenant = "search"
[[key]]
key = "{NARROW}"
tenant = "other"
max_concurrent_requests = 2
[[key]]
key = "{METERED}"
tenant = "other"
tokens_per_minute = 300
"""
FROM_THE_ENVIRONMENT = "canary-from-the-environment"
PROMPT = "The canary sings of a prompt that nobody logs. " * 8


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "keys.toml").write_text(KEYS)
    flags = ["--api-keys-file", str(folder / "keys.toml"), "--log-format", "json", "--log-level", "debug"]
    # Its own environment: another server that is started meanwhile wants no key.
    with serving(*flags, log=folder / "log", environment={"SERVEKIT_API_KEY": FROM_THE_ENVIRONMENT}) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(server: ServerProcess, key: str, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields}
    return server.client.post("/generate", json=body, headers=bearer(key))


def requests_logged(server: ServerProcess) -> list[dict[str, Any]]:
    entries = [json.loads(line) for line in server.log.read_text().splitlines()]
    return [entry for entry in entries if entry["message"] == "request"]


def request_logged(server: ServerProcess, request_id: str, timeout_s: float = 60) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        found = [entry for entry in requests_logged(server) if entry["request_id"] == request_id]
        if found:
            assert len(found) == 1
            return found[0]
        assert time.monotonic() < deadline, f"{request_id} is not in the log"
        time.sleep(0.02)


def test_prefix_cache_is_shared_within_a_tenant_only(locked: ServerProcess) -> None:
    first, again, colleague, stranger = (ask(locked, key) for key in (KEY, KEY, SAME, OTHER))
    cached = [answer.json()["usage"]["cached_tokens"] for answer in (first, again, colleague, stranger)]
    assert cached[0] == 0 and cached[1] > 50
    assert cached[2] == cached[1], "another key of the same tenant"
    assert cached[3] == 0, "the time of an answer must not depend on other tenants' prompts"
    texts = {answer.json()["generated_text"] for answer in (first, again, colleague, stranger)}
    assert len(texts) == 1


def test_a_request_is_aborted_by_its_own_tenant_only(locked: ServerProcess) -> None:
    """The stream ends with what there is; for another tenant there is no such request."""
    body = {"prompt": "Count to 20.", "max_tokens": 1500, "ignore_eos": True, "temperature": 1}
    headers = {**bearer(KEY), "x-request-id": "to-be-aborted"}

    def abort(key: str) -> Any:
        return locked.client.post("/abort_request", json={"rid": "to-be-aborted"}, headers=bearer(key))

    with locked.client.stream("POST", "/generate_stream", json=body, headers=headers) as response:
        stream = events(response.iter_lines())
        first = next(stream)
        stranger = abort(OTHER)
        assert stranger.status_code == 404 and stranger.json()["error"]["code"] == "request_not_found"
        colleague = abort(SAME)
        assert colleague.status_code == 200 and colleague.json() == {"num_aborted": 1}
        *_, last = stream
    assert last["finish_reason"] == "abort" and last["generated_text"].startswith(first["token"]["text"])
    assert last["usage"]["completion_tokens"] < 1500
    assert abort(KEY).status_code == 404, "it has ended"


def test_request_with_a_foreign_host_header_is_refused(server: ServerProcess) -> None:
    """The page needs no preflight for such a request, and to its browser the answer would have its own origin."""
    simple = "\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 32\r\n\r\n"
    for host, expected in ((f"evil.example:{server.port}", 403), (f"localhost:{server.port}", 200)):
        request = f'POST /generate HTTP/1.1\r\nHost: {host}{simple}{{"prompt": "a", "max_tokens": 1}}'
        assert raw(server, request.encode())[0] == expected


def test_every_route_needs_a_key_under_every_spelling_of_its_path(locked: ServerProcess) -> None:
    host = f"127.0.0.1:{locked.port}"
    lines = [
        "GET /info",
        "GET //generate",
        "GET /health/../info",
        "GET /HEALTH",
        "GET /health/",
        "GET /%69nfo",
        "GET /docs",
        "GET /health%2f..%2finfo",
        "GET /health%00",
        "GET /health%0d%0a",
        "GET /metrics?x=/health",
        "OPTIONS *",
        f"GET http://{host}/info",
        f"GET http://{host}/health/../info",
        "POST /health",
        "TRACE /info",
        "PATCH /ready",
    ]
    for line in lines:
        status, head = raw(locked, f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert status == 401, line
        assert "www-authenticate: Bearer" in head and "x-request-id: " in head, line
    for line in (f"CONNECT {host}", "GET"):
        status, _ = raw(locked, f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert status in (400, 401), line
    for line in ("GET /health", "GET /ready", "HEAD /health", f"GET http://{host}/health"):
        status, _ = raw(locked, f"{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert status == 200, line
    upgrade = (
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    )
    status, _ = raw(locked, f"GET /generate_stream HTTP/1.1\r\nHost: {host}\r\n{upgrade}".encode())
    assert status in (400, 401, 403)


def raw(server: ServerProcess, request: bytes) -> tuple[int, str]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        answer = connection.recv(65536)
    head = answer.partition(b"\r\n\r\n")[0].decode()
    return int(head.split()[1]), head


def test_log_entry_of_a_stream_has_token_counts_and_no_text(locked: ServerProcess) -> None:
    headers = {"x-request-id": "a-stream"}
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
    with locked.client.stream("POST", "/generate_stream", json=body, headers=headers) as response:
        assert response.headers["x-request-id"] == "a-stream"
        last = list(events(response.iter_lines()))[-1]
    logged = request_logged(locked, "a-stream")
    assert logged["generated_tokens"] == 5 and logged["prompt_tokens"] == last["usage"]["prompt_tokens"]
    assert logged["finish_reasons"] == ["length"] and logged["status"] == 200 and logged["tenant"] == "search"
    assert logged["client_left"] is False
    assert 0 < logged["duration_ms"] < 60_000


def leave_a_stream(server: ServerProcess, key: str, request_id: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}).encode()
    head = f"POST /generate_stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        read = b""
        while b"data: " not in read:
            read += connection.recv(4096)


def leave_before_the_answer(server: ServerProcess, key: str, request_id: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.05)


def leave_with_half_a_body(server: ServerProcess, key: str, request_id: str) -> None:
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nX-Request-Id: {request_id}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode() + b'{"prompt": "a')


def test_disconnect_frees_the_keys_concurrency_slot_exactly_once(locked: ServerProcess) -> None:
    """The key has two slots. None is left if one leaks, and three requests run if one is freed twice."""
    for number, leave in enumerate([leave_a_stream, leave_before_the_answer, leave_with_half_a_body] * 3):
        leave(locked, NARROW, f"gone-{number}")
        logged = request_logged(locked, f"gone-{number}")
        assert logged["client_left"] is True and logged["tenant"] == "other"
        if leave is leave_a_stream:
            assert logged["status"] == 200 and logged["finish_reasons"] == ["abort"] and logged["generated_tokens"] > 0
    assert ask(locked, NARROW).status_code == 200
    assert ask(locked, NARROW, max_tokens=0.5).status_code == 400
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True}
    with ExitStack() as stack:
        for _ in range(2):
            running = locked.client.stream("POST", "/generate_stream", json=body, headers=bearer(NARROW))
            assert stack.enter_context(running).status_code == 200
        refused = ask(locked, NARROW)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 concurrent requests (max_concurrent_requests)" in refused.json()["error"]["message"]


def test_tokens_are_charged_as_in_usage_also_after_a_disconnect(locked: ServerProcess) -> None:
    started_s = time.monotonic()
    leave_a_stream(locked, METERED, "left-in-debt")
    logged = request_logged(locked, "left-in-debt")
    spent = logged["prompt_tokens"] + logged["generated_tokens"]
    for _ in range(20):
        answer = ask(locked, METERED, n=2)
        if answer.status_code == 429:
            break
        spent += answer.json()["usage"]["total_tokens"]
    debt_s = (spent - 300) / (300 / 60)
    passed_s = time.monotonic() - started_s
    assert debt_s - passed_s <= int(answer.headers["retry-after"]) <= debt_s + 1


def test_server_listens_on_one_address_and_its_child_processes_on_none(locked: ServerProcess) -> None:
    assert listening(locked.process.pid) == [("0100007F", locked.port)], "127.0.0.1, as the kernel writes it"
    for pid in [*locked.worker_pids(), *locked.sandbox_pids()]:
        assert listening(pid) == []


def listening(pid: int) -> list[tuple[str, int]]:
    """Return (address, port) of each socket that the process listens on."""
    inodes = set()
    for opened in proc.open_files(pid):
        inodes |= set(re.findall(r"socket:\[(\d+)\]", opened))
    found = []
    for table in ("tcp", "tcp6"):
        for line in proc.read(pid, f"net/{table}").splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = fields = line.split()
            if state == "0A" and fields[9] in inodes:
                address, _, port = local.rpartition(":")
                found.append((address, int(port, 16)))
    return found


def test_child_processes_do_not_inherit_the_key(locked: ServerProcess) -> None:
    children = [*locked.worker_pids(), *locked.sandbox_pids()[:1]]
    assert len(children) == 2, "the worker, and the process that forks sandbox processes"
    for pid in [*children, *locked.sandbox_pids()]:
        visible = proc.read_bytes(pid, "environ") + proc.read_bytes(pid, "cmdline")
        assert b"canary" not in visible
        assert b"PATH=" in visible or pid not in children  # a sandbox process may have ended
    assert locked.client.get("/version", headers=bearer(FROM_THE_ENVIRONMENT)).status_code == 200


def test_log_contains_no_prompts_answers_or_keys_at_any_level(locked: ServerProcess) -> None:
    """After all requests above, and at debug level."""
    query = {"prompt": PROMPT, "max_tokens": "2"}
    assert locked.client.get("/generate_stream", params=query, headers={"x-request-id": "query"}).status_code == 200
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    assert locked.client.post("/v1/chat/completions", json=chat).status_code == 200
    assert locked.client.post("/v1/completions", json={"prompt": [PROMPT] * 2, "temperature": "hot"}).status_code == 400
    assert locked.client.post("/generate", json={"prompt": PROMPT * 500}).status_code == 400
    assert locked.client.post("/tokenize", content=PROMPT).status_code == 400
    for number in range(200):
        locked.client.get("/info", headers=bearer(f"{KEY}{number}"))
    assert locked.stream("What color is the sky?")[-1]["generated_text"] == " The sky is blue."
    request_logged(locked, "query")
    info = locked.client.get("/info").text
    log = locked.log.read_text()
    for line in log.splitlines():
        entry = json.loads(line)
        assert {"time", "level", "logger", "message"} <= entry.keys()
    assert any(" from " in json.loads(line)["message"] for line in log.splitlines()), "the worker's lines are there"
    assert len(requests_logged(locked)) > 200
    assert "canary" not in log and "canary" not in info
    assert "sky is blue" not in log
    assert log.replace("\n", "").isprintable()


def test_sighup_reloads_the_keys_file_and_a_bad_file_changes_nothing(locked: ServerProcess) -> None:
    path = locked.log.parent / "keys.toml"
    assert ask(locked, METERED + "-2").status_code == 401
    for text, message, statuses in (
        (KEYS.replace(METERED, METERED + "-2"), "it has 5 API keys", (401, 200)),
        (KEYS + "[[key]]", "the API keys were not changed: ", (401, 200)),
        (KEYS, "it has 5 API keys", (200, 401)),
    ):
        seen = locked.log.read_text().count(message)
        path.write_text(text)
        locked.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 60
        while locked.log.read_text().count(message) == seen:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        asked = (locked.client.get("/version", headers=bearer(key)) for key in (METERED + "-2", METERED))
        # That one is in debt since a test above, and its account outlived two readings of the file.
        assert tuple({429: 200}.get(answer.status_code, answer.status_code) for answer in asked) == statuses[::-1]


def test_refused_connections_are_logged_with_their_address_at_most_once_a_second(locked: ServerProcess) -> None:
    hello = bytes.fromhex("16030100c8010000c40303") + bytes(190)  # TLS
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
            connection.sendall(hello)
            assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    refused: list[dict[str, str]] = []
    deadline_s = time.monotonic() + 60
    while len(refused) < 5 and time.monotonic() < deadline_s:  # a thread writes the log
        time.sleep(0.05)
        entries = [json.loads(line) for line in locked.log.read_text().splitlines()]
        refused = [each for each in entries if each["message"].startswith("connection refused: not a valid HTTP/1.1")]
    assert len(refused) >= 5
    assert all((entry["code"], entry["client"]) == ("invalid_http", "127.0.0.1") for entry in refused)
    levels = [entry["level"] for entry in refused]
    assert "info" in levels and "debug" in levels, "a flood does not fill the log"


def test_json_log_has_one_ready_entry_with_the_settings(locked: ServerProcess) -> None:
    entries = [json.loads(line) for line in locked.log.read_text().splitlines()]
    (ready,) = [entry for entry in entries if entry["message"].startswith("ready at http://127.0.0.1:")]
    assert ready["settings"]["log_format"] == "json" and ready["settings"]["api_key"] == "***"
    assert ready["num_kv_blocks"] > 0 and ready["device"] == "cpu" and ready["max_total_tokens"] == 2048
    assert not [entry for entry in entries if "curl" in entry["message"] or entry["message"].startswith(" ")]


def test_bad_keys_file_exits_with_2_and_does_not_print_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[[key]]\nkey = '{KEY}'\ntenant = 'a'\n[[key]]\nkey = '{KEY} '\ntenant = 'b'\n")
    command = [sys.executable, "-m", "servekit", "serve", "--api-keys-file", str(path), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    (logged,) = map(json.loads, done.stderr.splitlines())
    assert logged["message"].startswith(f"{path}: [[key]] 2: key is empty")
    assert KEY not in done.stderr
