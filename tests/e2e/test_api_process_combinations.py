"""Two API processes beside each other way to run a server: replicas, ranks, workers that join, a shared port, records.

The claims are the same for all of them, and the text of every answer is known before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.e2e.test_observability import attributes, collecting
from tests.support import proc
from tests.support.certificates import make_certificate
from tests.support.server_process import ONE_THREAD, ServerProcess, free_port, serving
from tests.support.streams import NUM_STREAMS, Streams, from_all, prompt_of, read_all

pytestmark = pytest.mark.long  # each combination starts two servers

NUM_TOKENS = 200
LONG_ENOUGH = 1900  # tokens, which are not generated before the second signal


class Combination:
    """A way to run a server with two API processes."""

    model = "sim:step=10ms"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def flags(self) -> list[str]:
        return []

    @contextmanager
    def running(self, *flags: str) -> Iterator[ServerProcess]:
        """The server, when it is ready."""
        arguments = ("--model", self.model, "--api-processes", "2", *self.flags(), *flags)
        with serving(*arguments, log=self.folder / "log", environment=ONE_THREAD) as server:
            yield server

    def expected(self, server: ServerProcess) -> list[str | None]:
        """The answers to the requests of `read_all`."""
        params = SamplingParams(max_tokens=NUM_TOKENS)
        prompts = (prompt_of(number).encode() for number in range(NUM_STREAMS))
        return [bytes(NaiveReference().output(prompt, params)).decode() for prompt in prompts]

    def check_records(self, log: str, num_whole: int) -> None:
        """Check what there is of `num_whole` whole answers, or more, when the server has ended."""


class SharedPort(Combination):
    def flags(self) -> list[str]:
        return ["--reuse-port"]


class ReplicasWithJournals(Combination):
    def flags(self) -> list[str]:
        return ["--data-parallel-size", "2", "--journal", str(self.folder / "journal")]

    def check_records(self, log: str, num_whole: int) -> None:
        command = [sys.executable, "-m", "servekit", "replay", str(self.folder / "journal")]
        replay = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert replay.returncode == 0, replay.stdout
        assert replay.stdout.count("every decision is the same") == 2, replay.stdout


class Ranks(Combination):
    """Of the demo model: a simulated one cannot be divided."""

    model = "demo"

    def flags(self) -> list[str]:
        return ["--tensor-parallel-size", "2"]

    def expected(self, server: ServerProcess) -> list[str | None]:
        """What this server answers undisturbed; test_ranks.py compares that with one process."""
        return read_all(server, max_tokens=NUM_TOKENS)


class Traced(Combination):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._spans: list[Any] = []

    @contextmanager
    def running(self, *flags: str) -> Iterator[ServerProcess]:
        with collecting() as collector:
            with super().running("--otlp-endpoint", collector.url, *flags) as server:
                yield server
            self._spans = collector.spans()

    def check_records(self, log: str, num_whole: int) -> None:
        roots = [span for span in self._spans if span.kind == span.SPAN_KIND_SERVER]
        whole = [span for span in roots if attributes(span).get("gen_ai.usage.output_tokens") == NUM_TOKENS]
        assert len(whole) >= num_whole or "the last traces were dropped" in log
        for root in whole:
            phases = [span for span in self._spans if span.parent_span_id == root.span_id]
            assert [span.name for span in phases] == ["queue", "prefill", "decode"]
            assert phases[2].end_time_unix_nano > phases[2].start_time_unix_nano


class JoinedWorkers(Combination):
    """Two workers over TCP with TLS, started before the server."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._port = free_port()
        self._certificate, self._private = make_certificate(folder)
        self._key = folder / "key"
        self._key.write_text("0123456789abcdef" * 4)
        self._key.chmod(0o600)

    def flags(self) -> list[str]:
        tls = ["--worker-tls-cert", self._certificate, "--worker-tls-key", self._private]
        return ["--listen-workers", f"tcp://127.0.0.1:{self._port}", "--worker-key-file", str(self._key), *tls]

    @contextmanager
    def running(self, *flags: str) -> Iterator[ServerProcess]:
        command = [sys.executable, "-m", "servekit.worker", "--connect", f"tcp://localhost:{self._port}"]
        command += ["--key-file", str(self._key), "--tls-ca", self._certificate]
        with (self.folder / "workers.log").open("wb") as log:
            workers = [subprocess.Popen(command, stdout=log, stderr=log) for _ in range(2)]
        try:
            with super().running(*flags) as server:
                server.wait_for_metric("servekit_workers_alive", 2)
                yield server
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


COMBINATIONS = (SharedPort, ReplicasWithJournals, Ranks, Traced, JoinedWorkers)
each_combination = pytest.mark.parametrize("kind", COMBINATIONS, ids=lambda kind: kind.__name__)


def replaced(server: ServerProcess, killed: int) -> None:
    """Wait until there are two API processes again, and connect to one of them."""
    deadline = time.monotonic() + 60
    while len(pids := server.api_process_pids()) < 2 or killed in pids:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server.client.close()  # it may have been connected to the one that was killed
    server.client = httpx2.Client(base_url=server.url, timeout=120)
    server.wait_until_ready()


@each_combination
def test_answers_are_the_same_when_an_api_process_is_killed_and_when_the_server_drains(
    kind: type[Combination], tmp_path: Path
) -> None:
    combination = kind(tmp_path)
    with combination.running() as server:
        expected = combination.expected(server)
        assert len({each.text for each in from_all(server, "GET", "/info")}) == 1

        killed = server.api_process_pids()[0]
        answers = read_all(server, lambda: os.kill(killed, signal.SIGKILL), max_tokens=NUM_TOKENS)
        assert 1 <= answers.count(None) < NUM_STREAMS, "each API process had some of the connections"
        assert all(answer in (None, text) for answer, text in zip(answers, expected, strict=True))
        replaced(server, killed)
        server.wait_until_at_rest()

        pids = [*server.api_process_pids(), *server.worker_pids()]
        last = read_all(server, lambda: server.process.send_signal(signal.SIGTERM), max_tokens=NUM_TOKENS)
        assert last == expected, "a drain answers what has begun"
        assert server.process.wait(timeout=60) == 0
        proc.wait_until_gone(*pids)
    log = server.log.read_text()
    assert "Traceback" not in log
    combination.check_records(log, NUM_STREAMS - answers.count(None) + NUM_STREAMS)


@each_combination
def test_a_second_signal_ends_it_at_once(kind: type[Combination], tmp_path: Path) -> None:
    combination = kind(tmp_path)
    with combination.running("--shutdown-timeout", "600") as server:
        pids = [*server.api_process_pids(), *server.worker_pids()]
        streams = Streams(server, max_tokens=LONG_ENOUGH)
        with ThreadPoolExecutor(NUM_STREAMS) as threads:
            reading = [threads.submit(streams.read, number) for number in range(NUM_STREAMS)]
            streams.wait_until_all_have_tokens()
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("draining")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 0
            assert not any(map(is_whole, reading))
        proc.wait_until_gone(*pids)
    log = server.log.read_text()
    assert "Traceback" not in log
    combination.check_records(log, 0)


def is_whole(reading: Future[str | None]) -> bool:
    """Whether a stream came to its end. It gets an error, or its connection is lost."""
    try:
        return reading.result(timeout=60) is not None
    except AssertionError:
        return False
