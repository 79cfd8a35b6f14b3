"""The Ray Serve application `servekit.ray:app` on Ray nodes of this machine. Needs the package ray."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import httpx2

from tests.support import proc
from tests.support.ray_nodes import RayNodes
from tests.support.server_process import free_port

START_TIMEOUT_S = 180.0

_DEPLOY = """
import json, sys
import ray
from ray import serve
from servekit.ray import app
address, port, arguments = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
serve.run(app(arguments), name="servekit", route_prefix="/", blocking=False)
"""
_SHUT_DOWN = """
import sys
import ray
from ray import serve
ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="ERROR")
serve.shutdown()
"""


class ServeApp:
    """The application, deployed and ready, and a client of Ray Serve's proxy."""

    def __init__(self, nodes: RayNodes, name: str, **arguments: Any) -> None:
        """`name` is what the servers call their model; no other application of the test has it."""
        self._nodes = nodes
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx2.Client(base_url=self.url, timeout=120)
        self.deploy(name, **arguments)

    def deploy(self, name: str, **arguments: Any) -> None:
        """Deploy it, or replace what is deployed by a version with other settings. Returns when that is done."""
        given = {name: str(value).lower() for name, value in arguments.items()} | {"served_model_name": name}
        self._run(_DEPLOY, str(self.port), json.dumps(given))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            assert time.monotonic() < deadline, "the application is not ready"
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        with suppress(httpx2.TransportError):
            return self.client.get("/ready").status_code == 200
        return False

    def servers(self, name: str) -> list[int]:
        """Return the processes of the servers that call their model so."""
        pids = proc.with_variable("SERVEKIT_SERVED_MODEL_NAME", name)
        return [pid for pid in pids if "-m\0servekit\0serve" in proc.read(pid, "cmdline")]

    def metric(self, name: str, metric: str) -> list[float]:
        """Return a metric of each server that calls its model so, without Ray Serve's proxy."""
        values = []
        for pid in self.servers(name):
            variables = dict(line.partition("=")[::2] for line in proc.read(pid, "environ").split("\0"))
            text = httpx2.get(f"http://127.0.0.1:{variables['SERVEKIT_PORT']}/metrics").text
            lines = [line for line in text.splitlines() if line.startswith((f"{metric}{{", f"{metric} "))]
            values.append(sum(float(line.rpartition(" ")[2]) for line in lines))
        return values

    def close(self) -> None:
        self.client.close()
        self._run(_SHUT_DOWN)

    def _run(self, program: str, *arguments: str) -> None:
        command = [sys.executable, "-c", program, self._nodes.address, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
