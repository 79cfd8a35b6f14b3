"""A small server of KServe's protocol V2, written after its specification, with Triton's repository extension.

It computes sums and the lengths of texts. Triton's own client library can use it (tests/clients/test_triton.py).
"""

from __future__ import annotations

import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HEADER_LENGTH = "Inference-Header-Content-Length"
FORMATS = {"FP32": "f", "INT32": "i", "INT64": "q"}

Tensor = dict[str, Any]

MODELS: dict[str, dict[str, Any]] = {
    "sum": {
        "name": "sum",
        "versions": ["1"],
        "platform": "python",
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "B", "datatype": "FP32", "shape": [-1, 2]},
        ],
        "outputs": [
            {"name": "SUM", "datatype": "FP32", "shape": [-1, 2]},
            {"name": "LARGEST", "datatype": "FP32", "shape": [1]},
        ],
    },
    "lengths": {
        "name": "lengths",
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [{"name": "LENGTH", "datatype": "INT64", "shape": [-1, 1]}],
    },
}


class TritonServer(ThreadingHTTPServer):
    """Serves MODELS. A test may take models away, let requests fail, and hold answers back."""

    daemon_threads = True

    def __init__(self, port: int = 0, *, loaded: tuple[str, ...] = tuple(MODELS), is_explicit: bool = False) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.loaded = set(loaded)
        self.is_explicit = is_explicit  # whether clients may load and unload models
        self.asked: list[tuple[str, str]] = []  # (method, path)
        self.headers: list[dict[str, str]] = []  # of the inferences
        self.failures: list[tuple[int, Any]] = []  # status and body of the next inferences
        self.hold: threading.Event | None = None  # inferences wait until it is set

    def num_inferences(self) -> int:
        return sum(path.endswith("/infer") for _, path in self.asked)


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: TritonServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _answer(self, body: bytes) -> None:
        self.server.asked.append((self.command, self.path))
        try:
            status, answer, binary = 200, *self._result(body)
        except Refused as refused:
            status, answer, binary = refused.status, {"error": str(refused)}, b""
        head = b"" if answer is None else answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream" if binary else "application/json")
        self.send_header("Content-Length", str(len(head) + len(binary)))
        if binary:
            self.send_header(HEADER_LENGTH, str(len(head)))
        self.end_headers()
        self.wfile.write(head + binary)

    def _result(self, body: bytes) -> tuple[Any, bytes]:
        if self.path in ("/v2/health/live", "/v2/health/ready"):
            return None, b""
        if self.path == "/v2":
            extensions = ["model_repository", "binary_tensor_data"]
            return {"name": "stub", "version": "1", "extensions": extensions}, b""
        found = re.fullmatch(r"/v2/(repository/)?models/([^/]+)(?:/(infer|ready|load|unload))?", self.path)
        if found is None:
            raise Refused(404, "Not Found")
        in_repository, name, verb = found.groups()
        if in_repository:
            self._change(name, verb)
            return None, b""
        if name not in self.server.loaded:
            raise Refused(404, f"Request for unknown model: '{name}' is not found")
        if verb == "ready":
            return None, b""
        if verb is None:
            return MODELS[name], b""
        return self._infer(name, body)

    def _change(self, name: str, verb: str) -> None:
        if not self.server.is_explicit:
            raise Refused(400, "explicit model load / unload is not allowed if polling is enabled")
        if verb == "unload":
            self.server.loaded.discard(name)
        elif name in MODELS:
            self.server.loaded.add(name)
        else:
            raise Refused(400, f"failed to load '{name}', failed to poll from model repository")

    def _infer(self, name: str, body: bytes) -> tuple[Any, bytes]:
        self.server.headers.append(dict(self.headers))
        if self.server.hold is not None:
            self.server.hold.wait(30)
        if self.server.failures:
            status, told = self.server.failures.pop(0)
            if status == 200:
                return told, b""
            raise Refused(status, told)
        length = int(self.headers.get(HEADER_LENGTH, len(body)))
        request, rest = json.loads(body[:length]), body[length:]
        inputs: dict[str, list[Any]] = {}
        known = {each["name"]: each for each in MODELS[name]["inputs"]}
        for tensor in request["inputs"]:
            if tensor["name"] not in known:
                raise Refused(400, f"unexpected inference input '{tensor['name']}' for model '{name}'")
            size = tensor.get("parameters", {}).get("binary_data_size")
            values = _flat(tensor["data"]) if size is None else _decode(rest[:size], tensor["datatype"])
            rest = rest[size or 0 :]
            if len(values) != _size(tensor["shape"]):
                raise Refused(400, f"unable to parse 'data': the shape of '{tensor['name']}' has other values")
            inputs[tensor["name"]] = values
        if inputs.keys() != known.keys():
            raise Refused(400, f"expected {len(known)} inputs but got {len(inputs)} inputs for model '{name}'")
        shape = request["inputs"][0]["shape"]
        outputs = _compute(name, inputs, shape)
        wanted = {each["name"]: each.get("parameters", {}) for each in request.get("outputs", ())}
        outputs = [each for each in outputs if not wanted or each["name"] in wanted]
        all_binary = request.get("parameters", {}).get("binary_data_output", False)
        binary = b""
        for output in outputs:
            if wanted.get(output["name"], {}).get("binary_data", all_binary):
                data = struct.pack(f"<{len(output['data'])}{FORMATS[output['datatype']]}", *output.pop("data"))
                output["parameters"] = {"binary_data_size": len(data)}
                binary += data
        return {"model_name": name, "model_version": "1", "outputs": outputs}, binary

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def _compute(name: str, inputs: dict[str, list[Any]], shape: list[int]) -> list[Tensor]:
    if name == "lengths":
        lengths = [len(text.encode()) for text in inputs["TEXT"]]
        return [{"name": "LENGTH", "datatype": "INT64", "shape": shape, "data": lengths}]
    sums = [a + b for a, b in zip(inputs["A"], inputs["B"], strict=True)]
    return [
        {"name": "SUM", "datatype": "FP32", "shape": shape, "data": sums},
        {"name": "LARGEST", "datatype": "FP32", "shape": [1], "data": [max(sums)]},
    ]


def _flat(values: Any) -> list[Any]:
    return [each for value in values for each in _flat(value)] if isinstance(values, list) else [values]


def _decode(data: bytes, datatype: str) -> list[Any]:
    if datatype != "BYTES":
        kind = FORMATS[datatype]
        return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))
    texts, place = [], 0
    while place < len(data):
        (size,) = struct.unpack_from("<I", data, place)
        texts.append(data[place + 4 : place + 4 + size].decode())
        place += 4 + size
    return texts


def _size(shape: list[int]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


@contextmanager
def triton_server(port: int = 0, **options: Any) -> Iterator[TritonServer]:
    with TritonServer(port, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
