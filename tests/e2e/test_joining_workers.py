"""A server with or without workers of its own, and workers that join it: each one a process that is started by hand."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.support.server_process import ServerProcess

PROMPTS = [f"What is {number} times {number}?" for number in range(8)]
NUM_TOKENS = 60
ENOUGH_S = 90.0


class Service:
    """A server, and workers that join it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._arguments = arguments
        key = folder / "key"
        key.write_text("0123456789abcdef" * 4)
        key.chmod(0o600)
        self._key, self._address = str(key), f"unix:{folder}/workers.sock"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.server = self.start_server()

    def start_server(self) -> ServerProcess:
        arguments = ["--model", "sim:step=20ms", "--listen-workers", self._address, "--worker-key-file", self._key]
        return ServerProcess(*arguments, *self._arguments, log=self._folder / "log")

    def add_worker(self, key: str | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "servekit.worker", "--connect", self._address, "--key-file", key or self._key]
        with (self._folder / f"worker{len(self.workers)}.log").open("wb") as output:
            self.workers.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        return self.workers[-1]

    def serving_worker(self) -> subprocess.Popen[bytes]:
        """The worker that computes the steps, as the server's log says."""
        pid = int(re.findall(r"worker (\d+) on .* serves from now on", self.server.log.read_text())[-1])
        return next(worker for worker in self.workers if worker.pid == pid)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENOUGH_S
        while not condition():
            assert time.monotonic() < deadline, self.server.log.read_text()
            time.sleep(0.05)

    def num_joined(self) -> int:
        return self.server.log.read_text().count("has joined")

    def answers(self, during: Callable[[], object]) -> list[str]:
        """The answers to all prompts, streamed; `during` is called when the first tokens have arrived."""
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            streams = [
                threads.submit(self.server.stream, prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS
            ]
            before = self.server.metric("servekit_generation_tokens_total")
            self.wait_until(lambda: self.server.metric("servekit_generation_tokens_total") > before + 5 * len(PROMPTS))
            during()
            return [stream.result()[-1]["generated_text"] for stream in streams]

    def end(self) -> None:
        self.server.client.close()
        for process in (*self.workers, self.server.process):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    service = Service(tmp_path)
    yield service
    service.end()


def expected() -> list[str]:
    params = SamplingParams(max_tokens=NUM_TOKENS)
    return [bytes(NaiveReference().output(prompt.encode(), params)).decode() for prompt in PROMPTS]


def model_process(worker: subprocess.Popen[bytes]) -> int:
    return int(Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()[0])


def num_serving(service: Service) -> float:
    return service.server.metric("servekit_workers_alive")


def test_streams_go_on_when_a_worker_is_killed_and_when_another_leaves(service: Service) -> None:
    for _ in range(2):
        service.add_worker()
    service.server.wait_until_ready(ENOUGH_S)
    service.wait_until(lambda: num_serving(service) == 2)  # each one is a replica

    killed = service.serving_worker()
    assert service.answers(lambda: os.kill(model_process(killed), signal.SIGKILL)) == expected()
    service.wait_until(lambda: service.num_joined() == 3)  # its agent has started another process
    service.wait_until(lambda: num_serving(service) == 2)

    leaving = service.workers[0]
    assert service.answers(lambda: leaving.send_signal(signal.SIGTERM)) == expected()
    assert leaving.wait(ENOUGH_S) == 0
    service.wait_until(lambda: num_serving(service) == 1)

    service.add_worker()  # takes the place of the one that has left
    service.wait_until(lambda: num_serving(service) == 2)
    assert [each["state"] for each in service.server.client.get("/info").json()["replicas"]] == ["ready", "ready"]
    assert service.answers(lambda: None) == expected()


def test_a_server_that_restarts_finds_its_worker_again(service: Service) -> None:
    service.add_worker()
    service.server.wait_until_ready(ENOUGH_S)
    service.server.process.send_signal(signal.SIGTERM)
    assert service.server.process.wait(ENOUGH_S) == 0
    assert service.workers[0].poll() is None
    service.server.client.close()
    service.server = service.start_server()
    service.server.wait_until_ready(ENOUGH_S)
    assert service.answers(lambda: None) == expected()


@pytest.mark.long
def test_a_worker_that_joins_takes_waiting_sequences_within_a_second(tmp_path: Path) -> None:
    service = Service(tmp_path, "--data-parallel-size", "1", "--max-num-seqs", "4")

    def stream(prompt: str) -> None:
        with suppress(httpx2.HTTPError, AssertionError):  # the server ends before the answers
            service.server.stream(prompt, max_tokens=400, ignore_eos=True)

    def num_running(replica: int) -> float:
        metrics = service.server.client.get("/metrics").text
        found = re.search(rf'servekit_num_requests_running{{[^}}]*replica="{replica}"[^}}]*}} (\S+)', metrics)
        return float(found[1]) if found else 0.0

    with ThreadPoolExecutor(16) as threads:
        try:
            service.server.wait_until_ready(ENOUGH_S)
            for number in range(16):
                threads.submit(stream, f"What is {number} times {number}?")
            service.wait_until(lambda: num_running(0) == 4)
            service.add_worker()
            service.wait_until(lambda: num_serving(service) == 2)
            joined_s = time.monotonic()
            service.wait_until(lambda: num_running(1) == 4)
            assert time.monotonic() - joined_s < 1.0
            assert num_running(0) == 4, "twelve wait: there is work for both"
        finally:
            service.end()


@pytest.mark.long
def test_workers_that_join_serve_beside_the_servers_own(tmp_path: Path) -> None:
    """Sequences go on with the same tokens in both directions, and each replica's worker is named."""
    service = Service(tmp_path, "--data-parallel-size", "1")
    try:
        service.server.wait_until_ready(ENOUGH_S)
        joined = service.add_worker()
        service.wait_until(lambda: num_serving(service) == 2)
        (own_pid,) = service.server.worker_pids()
        own, other = service.server.client.get("/info").json()["replicas"]
        assert own["worker"] == f"process {own_pid}" and own["host"] is None
        assert other["worker"] == f"{joined.pid} on {socket.gethostname()}, auto"
        assert other["host"] == socket.gethostname() and other["device"] == "simulated"

        assert service.answers(lambda: os.kill(own_pid, signal.SIGKILL)) == expected()
        service.wait_until(lambda: num_serving(service) == 2)
        assert service.answers(lambda: os.kill(model_process(joined), signal.SIGKILL)) == expected()
        service.wait_until(lambda: num_serving(service) == 2)
        assert service.answers(lambda: joined.send_signal(signal.SIGTERM)) == expected()
        assert joined.wait(ENOUGH_S) == 0
        service.wait_until(lambda: num_serving(service) == 1)

        wrong_key = tmp_path / "wrong"
        wrong_key.write_text("fedcba9876543210" * 4)
        wrong_key.chmod(0o600)
        assert service.add_worker(str(wrong_key)).wait(ENOUGH_S) == 2
        metrics = service.server.client.get("/metrics").text
        assert re.search(r'servekit_worker_joins_refused_total{[^}]*reason="wrong_key"} 1\.0', metrics)
        log = service.server.log.read_text()
        for line in (
            rf"replica 0: worker process {own_pid} is lost; resuming \d+ sequences .* on others",
            rf"replica 1: worker {joined.pid} on \S+, auto is lost; resuming \d+ sequences .* on others",
            rf"replica 1: worker {joined.pid} on \S+, auto has left",
            "replica 1 is vacated",
        ):
            assert re.search(line, log), f"the log lacks {line!r}:\n{log}"
    finally:
        service.end()


def test_listening_without_a_key_is_refused_at_the_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "servekit", "serve", "--model", "sim:instant", "--port", "0"]
    done = subprocess.run([*command, "--listen-workers", f"unix:{tmp_path}/s"], capture_output=True, text=True)
    assert done.returncode == 2 and "listen_workers needs worker_key_file" in done.stderr
