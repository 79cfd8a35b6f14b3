"""Claims about the servers that benchmarks/against_peers.py starts by a command."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2
import pytest

from benchmarks.against_peers import accuracies, first_tokens, started

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, "")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token = sys.argv[2] if asked["prompt"] in sys.argv[3] else "other"
        event = json.dumps({"choices": [{"text": token}]})
        self.answer(200, f'data: {event}\\n\\ndata: {{"choices": []}}\\n\\ndata: [DONE]\\n\\n')

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return f"{sys.executable} {tmp_path / 'server.py'} {{port}}"


def test_a_server_is_started_with_a_port_and_ended(script: str, tmp_path: Path) -> None:
    with started(f"{script} yes ab", tmp_path / "log") as url:
        assert first_tokens(url, ["a", "c"]) == ["yes", "other"]
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


def test_a_command_that_ends_is_shown_with_its_output(tmp_path: Path) -> None:
    command = f"""{sys.executable} -c "raise SystemExit('there is no model')" {{port}}"""
    with pytest.raises(SystemExit, match="there is no model"), started(command, tmp_path / "log"):
        pass


def test_accuracy_is_the_share_of_equal_tokens(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = iter("abcd")
    monkeypatch.setattr("benchmarks.against_peers.TextGenerator.passage", lambda *_: next(prompts))
    with (
        started(f"{script} yes abcd", tmp_path / "log") as reference,
        started(f"{script} yes abc", tmp_path / "log-2") as other,
    ):
        assert accuracies({"other": other}, reference, 4, 4.0) == {"other": "75 %"}
