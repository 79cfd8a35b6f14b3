"""A program with the flags and the API of `vllm serve`, for tests of how servekit runs it. It answers with words.

A prompt can be an order: `crash` ends the process within an answer, `hang` answers one word and no more.
"""

from __future__ import annotations

import argparse
import json
import os
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from typing import Any

WORDS = ["The ", "sky ", "is ", "blue."]


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    model = ""
    max_model_len = 512


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.0"

    def address_string(self) -> str:
        return "a socket file"

    def do_GET(self) -> None:
        self._begin()
        model = {"id": self.server.model, "max_model_len": self.server.max_model_len}
        self.wfile.write(json.dumps({"data": [model]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._begin()
        for word in WORDS:
            self._event({"choices": [{"index": 0, "text": word, "finish_reason": None}]})
            if body["prompt"] == "crash":
                os._exit(3)
            if body["prompt"] == "hang":
                time.sleep(60)
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--uds")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--told", help="file to write the process ids and the environment to")
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    if options.fail:
        sys.exit(7)
    core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # vLLM's engine core
    if options.told:
        told = {"pids": [os.getpid(), core.pid], "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}
        with open(options.told, "w") as file:
            json.dump({**told, "more": os.environ.get("MORE")}, file)
    with _Server(options.uds, _Handler) as server:
        server.model, server.max_model_len = options.model, options.max_model_len
        server.serve_forever(0.05)


if __name__ == "__main__":
    main()
