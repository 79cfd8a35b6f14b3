"""Start a real server as a user does: its own process, with a worker process, over HTTP."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from tests.support import proc


def free_port() -> int:
    """Return a port that no other test run on this machine takes before the server starts.

    It is below the range that the kernel gives to clients, and each test process has its own range. Otherwise a server
    that lost its port to another one would be mistaken for it.
    """
    for _ in range(PORTS_EACH):
        port = FIRST_PORT + (os.getpid() % 100) * PORTS_EACH + next(_numbers) % PORTS_EACH
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError(f"none of {PORTS_EACH} ports is free")


FIRST_PORT, PORTS_EACH = 20_000, 100
_numbers = itertools.count()


def num_listening(port: int) -> int:
    """Return how many sockets of this machine listen on a port. Of servers that share it, any may answer /ready."""
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in sockets)


# A step of the demo model is as fast on one core as on two. With a thread on each core, whatever interrupts one of them
# delays both, and each connection does. So steps are timed with one thread.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ServerProcess:
    """`servekit serve ARGUMENTS` on a free port, and a client for it."""

    def __init__(
        self,
        *arguments: str,
        log: Path,
        environment: dict[str, str] | None = None,
        port: int | None = None,
        prefix: list[str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """`prefix` is a command that executes the server's."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [*(prefix or []), python, "-m", "servekit", "serve", *arguments, "--port", str(self.port)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        self.client = httpx2.Client(base_url=self.url, timeout=120)

    def wait_until_ready(self, timeout_s: float = 300) -> float:
        """Wait until /ready answers 200. Returns the seconds it took."""
        started = time.monotonic()
        while time.monotonic() < started + timeout_s:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            with suppress(httpx2.TransportError):
                if self.client.get("/ready").status_code == 200:
                    return time.monotonic() - started
            time.sleep(0.05)
        raise AssertionError(f"not ready after {timeout_s} s:\n{self.log.read_text()}")

    def generate(self, prompt: str, **fields: Any) -> dict[str, Any]:
        response = self.client.post("/generate", json={"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, prompt: str, **fields: Any) -> list[dict[str, Any]]:
        """Return all events of a stream."""
        with self.client.stream("POST", "/generate_stream", json={"prompt": prompt, **fields}) as response:
            assert response.status_code == 200
            return list(events(response.iter_lines()))

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = self.client.get("/metrics").text.splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        assert values, f"there is no metric {name}"
        return sum(values)

    def wait_for_metric(self, name: str, value: float, timeout_s: float = 120) -> None:
        """Wait until the sum of a metric's samples is `value`.

        The longer it has waited, the less often it asks: a worker starts or computes meanwhile, and an answer takes
        4 ms of a processor from that.
        """
        started = time.monotonic()
        while (now := self.metric(name)) != value:
            waited_s = time.monotonic() - started
            assert waited_s < timeout_s, f"{name} is {now}, not {value}"
            time.sleep(min(max(0.02, waited_s / 4), 0.2))

    def wait_for_log(self, text: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in (log := self.log.read_text()):
            assert time.monotonic() < deadline, f"there is no {text!r} in the log:\n{log[-2000:]}"
            time.sleep(0.02)

    def wait_until_a_sandbox_works(self, timeout_s: float = 60) -> None:
        """Wait until the sandbox processes together have used the processor for a tenth of a second."""
        before, deadline = sum(map(proc.cpu_s, self.sandbox_pids())), time.monotonic() + timeout_s
        while sum(map(proc.cpu_s, self.sandbox_pids())) < before + 0.1:
            assert time.monotonic() < deadline, "no sandbox process works"
            time.sleep(0.01)

    def wait_until_a_request_is_in_preparation(self, timeout_s: float = 60) -> None:
        """Wait until a request has its places in the queue. Call this while no sequence waits."""
        deadline = time.monotonic() + timeout_s
        while not self.metric("servekit_queue_usage_perc"):
            assert time.monotonic() < deadline, "no request is in preparation"
            time.sleep(0.01)

    def wait_until_at_rest(self) -> None:
        """Wait until nothing runs, nothing waits and all blocks are free."""
        self.wait_for_metric("servekit_num_requests_running", 0)
        self.wait_for_metric("servekit_num_requests_waiting", 0)
        self.wait_for_metric("servekit_kv_blocks_free", self.metric("servekit_kv_blocks_total"))

    def worker_pids(self) -> list[int]:
        return self.child_pids("servekit.worker")

    def mask_process_pids(self) -> list[int]:
        """Return the processes that compute masks for the workers."""
        children = [child for worker in self.worker_pids() for child in proc.children(worker)]
        return [pid for pid in children if "workers.grammar.process" in proc.read(pid, "cmdline")]

    def api_process_pids(self) -> list[int]:
        """Return the processes of --api-processes; none if there is one process for all."""
        return self.child_pids("servekit.server.api_process")

    def body_process_pids(self) -> list[int]:
        """Return the process that decodes large request bodies."""
        return self.child_pids("servekit.api.body_process")

    def sandbox_pids(self) -> list[int]:
        """Return the process that forks sandbox processes, if it runs, and then those that it has forked."""
        fork_servers = self.child_pids("servekit.sandbox.fork_server")
        return [*fork_servers, *(child for pid in fork_servers for child in proc.children(pid))]

    def child_pids(self, module: str) -> list[int]:
        """Return the server's child processes that run this module."""
        return [pid for pid in proc.children(self.process.pid) if module in proc.read(pid, "cmdline")]

    def started_pids(self) -> list[int]:
        """Return all processes that were started by the server, whatever their parent is now."""
        mark = f"--parent-pid\0{self.process.pid}\0"
        return [pid for pid in proc.all_pids() if mark in proc.read(pid, "cmdline")]

    def num_open_files(self) -> int:
        return len(proc.open_files(self.process.pid))

    def resident_mib(self) -> float:
        return proc.resident_mib(self.process.pid)


def events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def serving(
    *arguments: str,
    log: Path,
    environment: dict[str, str] | None = None,
    port: int | None = None,
    prefix: list[str] | None = None,
    python: str = sys.executable,
) -> Iterator[ServerProcess]:
    """Yield a server that is ready, and end it afterwards in any case."""
    server = ServerProcess(*arguments, log=log, environment=environment, port=port, prefix=prefix, python=python)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()
