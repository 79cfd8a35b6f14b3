"""Tests of a server with several replicas: what clients and operators see when one of them loses its worker."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from servekit.engine.model_files import DEMO_MODEL_PATH
from tests.support.server_process import ONE_THREAD, ServerProcess, events, serving

NUM_STREAMS = 32
FIELDS = {"max_tokens": 120, "ignore_eos": True, "temperature": 1.0, "seed": 7}


class Streams:
    """Answers that are read at the same time, and when each of their tokens came."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._started = threading.Barrier(NUM_STREAMS + 1)
        self.times_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]

    def wait_until_all_have_tokens(self) -> None:
        self._started.wait(timeout=60)

    def read(self, number: int) -> str:
        body = {"prompt": f"Story number {number}: once", **FIELDS}
        pieces = []
        with self._server.client.stream("POST", "/generate_stream", json=body) as response:
            assert response.status_code == 200
            for event in events(response.iter_lines()):
                assert "error" not in event, event
                pieces.append(event["token"]["text"])
                self.times_s[number].append(time.monotonic())
                if len(pieces) == 5:
                    self._started.wait(timeout=60)
        return "".join(pieces)

    def longest_pauses_s(self, since_s: float) -> list[float]:
        """The longest time between two tokens of each stream, of those that ended after a moment."""
        pauses = []
        for times_s in self.times_s:
            gaps = [after - before for before, after in pairwise(times_s) if after > since_s]
            pauses += [max(gaps)] if gaps else []
        return sorted(pauses)


def read_all(server: ServerProcess, disturb: list[int]) -> tuple[list[str], list[float]]:
    """All answers; while they are read, kill these processes. Also the longest pause of each stream after that."""
    streams = Streams(server)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        reading = [threads.submit(streams.read, number) for number in range(NUM_STREAMS)]
        streams.wait_until_all_have_tokens()
        killed_s = time.monotonic()
        for pid in disturb:
            os.kill(pid, signal.SIGKILL)
        answers = [each.result() for each in reading]
    return answers, streams.longest_pauses_s(killed_s)


def values_by_replica(server: ServerProcess, name: str) -> list[float]:
    lines = server.client.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("replicated") / "log"
    with serving("sim:step=10ms", "--data-parallel-size", "2", log=log) as server:
        yield server


def test_both_replicas_compute_and_metrics_add_up(replicated: ServerProcess) -> None:
    before = values_by_replica(replicated, "servekit_scheduler_steps_total")
    read_all(replicated, disturb=[])
    replicated.wait_until_at_rest()
    steps = values_by_replica(replicated, "servekit_scheduler_steps_total")
    assert len(steps) == 2 and all(now > then for now, then in zip(steps, before, strict=True))
    assert replicated.metric("servekit_workers_alive") == 2


def test_streams_of_a_lost_worker_go_on_at_once_and_token_for_token(tmp_path: Path) -> None:
    """The replacement loads for four seconds, and no stream waits for it."""
    journal = tmp_path / "journal"
    arguments = ("--data-parallel-size", "2", "--journal", str(journal))
    with serving("sim:step=10ms,load=4s", *arguments, log=tmp_path / "log") as server:
        undisturbed, _ = read_all(server, disturb=[])
        answers, pauses_s = read_all(server, disturb=server.worker_pids()[:1])
        assert answers == undisturbed
        logging.info("longest pause of each stream: p50 %.3f s, max %.3f s", pauses_s[len(pauses_s) // 2], pauses_s[-1])
        assert pauses_s[-1] < 4.0, "a stream waited for the replacement"
        assert server.client.get("/ready").status_code == 200
        server.wait_for_metric("servekit_workers_alive", 2)
        server.wait_until_at_rest()
        assert server.metric("servekit_worker_restarts_total") == 1
        assert server.metric("servekit_accounting_faults_total") == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
    replay = subprocess.run([sys.executable, "-m", "servekit", "replay", str(journal)], capture_output=True, text=True)
    assert replay.returncode == 0, replay.stdout
    assert replay.stdout.count("every decision is the same") == 2, "each replica has a journal of its own"


@pytest.mark.long
def test_streams_of_real_workers_go_on_token_for_token(tmp_path: Path) -> None:
    with serving("--data-parallel-size", "2", log=tmp_path / "log", environment=ONE_THREAD) as server:
        undisturbed, _ = read_all(server, disturb=[])
        answers, pauses_s = read_all(server, disturb=server.worker_pids()[1:])
        assert answers == undisturbed
        logging.info("longest pause of each stream: p50 %.3f s, max %.3f s", pauses_s[len(pauses_s) // 2], pauses_s[-1])


def test_with_all_workers_lost_sequences_wait_for_the_first_replacement(tmp_path: Path) -> None:
    with serving("sim:step=10ms,load=1s", "--data-parallel-size", "2", log=tmp_path / "log") as server:
        undisturbed, _ = read_all(server, disturb=[])
        answers, _ = read_all(server, disturb=server.worker_pids())
        assert answers == undisturbed
        assert server.metric("servekit_worker_restarts_total") >= 2


@pytest.mark.long
def test_a_replica_that_was_given_up_starts_its_worker_again(tmp_path: Path) -> None:
    """The weights cannot be read for a while. The other replica serves meanwhile."""
    model, away = tmp_path / "model", tmp_path / "weights"
    shutil.copytree(DEMO_MODEL_PATH, model)
    flags = ("--data-parallel-size", "2", "--max-worker-restarts", "1", "--replica-restart-delay", "4")
    with serving(str(model), *flags, log=tmp_path / "log", environment=ONE_THREAD) as server:
        undisturbed = server.generate("Once upon a time", max_tokens=8)["generated_text"]
        (model / "model.safetensors").rename(away)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.wait_for_log("a worker starts there in 4 s")
        assert states(server) == ["ready", "vacated"] and server.metric("servekit_workers_alive") == 1
        server.wait_for_log("a worker starts there in 8 s")
        assert server.generate("Once upon a time", max_tokens=8)["generated_text"] == undisturbed
        away.rename(model / "model.safetensors")
        server.wait_for_metric("servekit_workers_alive", 2, timeout_s=240)
        assert states(server) == ["ready", "ready"]
        before = values_by_replica(server, "servekit_scheduler_steps_total")
        read_all(server, disturb=[])
        steps = values_by_replica(server, "servekit_scheduler_steps_total")
        assert all(now > then for now, then in zip(steps, before, strict=True)), "both compute again"


def states(server: ServerProcess) -> list[str]:
    return sorted(replica["state"] for replica in server.client.get("/info").json()["replicas"])
