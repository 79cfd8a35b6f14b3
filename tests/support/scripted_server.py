"""A server that sends exactly what a test scripts, byte for byte, at the time that the test chooses."""

from __future__ import annotations

import json
import select
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from servekit.observability.live_frames import LiveLimits, LiveState

TIMEOUT_S = 60

Script = list[bytes | threading.Event]  # pieces to send; at an event, sending pauses until the event is set


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def piece(text: str, finish_reason: str | None = None) -> bytes:
    """A chunk of a chat's answer."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


DONE = piece("", "stop") + b"data: [DONE]\n\n"
MODELS = json.dumps({"data": [{"id": "scripted"}]}).encode()


def frame(model_name: str, **fields: object) -> bytes:
    """An event of the live feed."""
    limits = LiveLimits(8, 2048, 4096, 64, 16)
    state = LiveState(1.0, "ready", "", model_name, "1", [], limits=limits, **fields)  # type: ignore[arg-type]
    return b"event: state\nid: 1\ndata: " + msgspec.json.encode(state) + b"\n\n"


class ScriptedServer(ThreadingHTTPServer):
    """Each path has a list of scripts, one for each request; the last one serves all further requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.scripts: dict[str, list[Script]] = defaultdict(list, {"/v1/models": [[MODELS]]})
        self.statuses: dict[str, tuple[int, dict[str, str]]] = {}
        self.asked: list[tuple[str, Any]] = []  # (path, body)
        self.num_departed = 0  # clients that disconnected while a script waited

    def wait_for(self, num_asked: int, num_departed: int = 0) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.asked) < num_asked or self.num_departed < num_departed:
            assert time.monotonic() < deadline, f"requests: {self.asked}; disconnected clients: {self.num_departed}"
            time.sleep(0.01)

    def chats(self) -> list[list[str]]:
        """What each request for an answer said, as `role: content`."""
        return [
            [f"{message['role']}: {message['content']}" for message in body["messages"]]
            for path, body in self.asked
            if path == "/v1/chat/completions"
        ]


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        scripts = self.server.scripts[self.path]
        script = scripts.pop(0) if len(scripts) > 1 else scripts[0]
        status, headers = self.server.statuses.get(self.path, (200, {}))
        self.server.asked.append((self.path, body))
        begun = False
        try:
            for what in script:
                if isinstance(what, threading.Event):
                    self._wait(what)
                    continue
                if not begun:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    begun = True
                self.wfile.write(what)
        except ConnectionError:
            self.server.num_departed += 1

    def _wait(self, until: threading.Event) -> None:
        """Wait for the event. Raises ConnectionError if the client disconnects first."""
        deadline = time.monotonic() + TIMEOUT_S
        while not until.is_set() and time.monotonic() < deadline:
            if select.select([self.connection], [], [], 0.02)[0] and not self.connection.recv(1):
                raise ConnectionError

    def log_message(self, *args: object) -> None:
        """Log nothing."""


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
