"""A server without a worker of its own, and the workers that join it: processes, as an operator starts them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.support import proc
from tests.support.server_process import ServerProcess, free_port
from tests.torture.crowd import wait_until
from tests.torture.report import BUILD

KEY = b"0123456789abcdef" * 4
JOINS_WITHIN_S = 120.0


class JoinedWorkers:
    """A server, and workers that join it over TCP on this machine."""

    def __init__(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """`name` is that of the log files in build/torture."""
        self._name = name
        self._environment = dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="servekit-torture-")
        self.key_file = self.write_key("key", KEY)
        self.host, self.port = "127.0.0.1", free_port()
        self.address = f"tcp://{self.host}:{self.port}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self._num_started = 0
        flags = ("--listen-workers", self.address, "--worker-key-file", self.key_file, *arguments)
        self.server = ServerProcess(*flags, log=BUILD / f"{name}.log", environment=self._environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.client.close()
        for process in (*self.workers, self.server.process):
            process.kill()
            process.wait()
        self._folder.cleanup()

    def write_key(self, name: str, key: bytes) -> str:
        """Return the path of a new key file."""
        path = Path(self._folder.name) / name
        path.write_bytes(key)
        path.chmod(0o600)
        return str(path)

    def start_worker(self, address: str | None = None, key_file: str | None = None) -> subprocess.Popen[bytes]:
        """Start a worker that joins. It is ended at the latest when this object is left."""
        self._num_started += 1
        command = [sys.executable, "-m", "servekit.worker", "--connect", address or self.address]
        with (BUILD / f"{self._name}-worker-{self._num_started % 100}.log").open("wb") as log:
            worker = subprocess.Popen(
                [*command, "--key-file", key_file or self.key_file],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
            )
        self.workers.append(worker)
        return worker

    def reap(self, worker: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a worker that was killed or has left; return its exit code."""
        code = worker.wait(60)
        self.workers.remove(worker)
        return code

    def model_process(self, worker: subprocess.Popen[bytes]) -> int | None:
        """The process that an agent has started for the model, if it runs."""
        return next(iter(proc.children(worker.pid)), None)

    async def wait_until_serving(self, num_workers: int) -> None:
        """Wait until so many workers serve. Raises AssertionError if they do not."""

        def is_serving() -> bool:
            assert self.server.process.poll() is None, f"the server ended:\n{self.server.log.read_text()[-2000:]}"
            return self.server.metric("servekit_workers_alive") >= num_workers

        await asyncio.to_thread(self.server.wait_until_ready)
        is_done = await wait_until(is_serving, JOINS_WITHIN_S, pause_s=0.1)
        assert is_done, f"fewer than {num_workers} workers serve after {JOINS_WITHIN_S:g} s"
