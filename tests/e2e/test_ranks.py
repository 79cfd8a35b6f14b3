"""A server whose model is divided among several processes: clients see no difference, whatever one of them does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from servekit.protocol.cpu_list import format_cpu_list, parse_cpu_list
from tests.support import proc
from tests.support.server_process import ONE_THREAD, ServerProcess
from tests.torture.faults.sitecustomize import SIGNALS
from tests.torture.workers import fault_environment

pytestmark = pytest.mark.long

FIELDS = {"max_tokens": 80, "ignore_eos": True, "temperature": 0.0}
NUMBER = {"type": "json_schema", "value": {"type": "object", "properties": {"n": {"type": "integer"}}}}
DIGITS = {"type": "regex", "value": "[0-9]{40}"}
REQUESTS: list[dict[str, Any]] = [
    *({"prompt": f"Count from {number}.", **FIELDS} for number in range(6)),
    {"prompt": "Once upon a time", **FIELDS, "temperature": 1.0, "seed": 3, "logprobs": 5, "prompt_logprobs": 3},
    {"prompt": "What color is the sky?", **FIELDS, "logprobs": 0},
    {"prompt": "A number:", **FIELDS, "ignore_eos": False, "grammar": NUMBER, "logprobs": 2},
    {"prompt": "Digits:", **FIELDS, "ignore_eos": False, "grammar": DIGITS},
]
LOGPROB_TOLERANCE = 1e-3  # ranks add up in another order

Answer = dict[str, Any]


def ask(server: ServerProcess, request: dict[str, Any]) -> Answer:
    """The answer, without what differs from time to time: its id, its times, and how much of the prompt was cached."""
    answer = server.generate(**request)
    return {name: value for name, value in answer.items() if name not in ("id", "metrics", "usage")}


def assert_alike(answer: object, expected: object) -> None:
    """Check that two answers are equal, but for the rounding of logprobs. Tokens of one logprob may change places."""
    if isinstance(expected, float):
        assert answer == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    elif isinstance(expected, dict):
        assert isinstance(answer, dict) and answer.keys() == expected.keys()
        for key, value in expected.items():
            assert_alike(answer[key], value)
    elif isinstance(expected, list):
        assert isinstance(answer, list) and len(answer) == len(expected)
        for one, other in zip(answer, expected, strict=True):
            assert_alike(one, other)
    else:
        assert answer == expected


@contextmanager
def serving_ranks(log: Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server, which is not ready yet. Its workers have the planted faults."""
    server = ServerProcess(*arguments, log=log, environment={**ONE_THREAD, **fault_environment()})
    try:
        yield server
    finally:
        server.client.close()
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The answers of one process to all requests, which it gets at the same time."""
    with serving_ranks(tmp_path_factory.mktemp("one") / "log") as server:
        server.wait_until_ready()
        return answers_during(server, lambda: None)


def answers_during(server: ServerProcess, disturb: Any) -> list[Answer]:
    """Send all requests at the same time, and call `disturb` while they are answered."""
    before = server.metric("servekit_generation_tokens_total")
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        asked = [threads.submit(ask, server, request) for request in REQUESTS]
        while server.metric("servekit_generation_tokens_total") < before + 50:
            time.sleep(0.02)
        disturb()
        return [each.result() for each in asked]


def num_restarts(server: ServerProcess, cause: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    name = "servekit_worker_restarts_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and f'cause="{cause}"' in line)


@pytest.mark.parametrize(
    ("tensor_size", "pipeline_size", "victims", "lacks_memory"),
    [(2, 1, [0], True), (1, 2, [0, 1], False), (2, 2, [1, 2], False)],
    ids=["tensor", "pipeline", "both"],
)
def test_a_divided_model_answers_as_an_undivided_one_whatever_happens_to_a_rank(
    tensor_size: int,
    pipeline_size: int,
    victims: list[int],
    lacks_memory: bool,
    undivided: list[Answer],
    tmp_path: Path,
) -> None:
    """Greedy, sampled and constrained answers, with and without logprobs; ranks are killed, and one lacks memory.

    To start ranks again takes longest. So of four ranks two are killed, one in each stage and each with another place
    in it. One of them is the second that shares a layer, so where there are two ranks, that one lacks memory and is not
    killed as well. No rank of a pipeline lacks memory: both faults end a group in the same way.
    """
    sizes = ("--tensor-parallel-size", str(tensor_size), "--pipeline-parallel-size", str(pipeline_size))
    with serving_ranks(tmp_path / "log", *sizes) as server:
        server.wait_until_ready()
        ranks = sorted(server.worker_pids())
        assert len(ranks) == tensor_size * pipeline_size
        assert_alike(answers_during(server, lambda: None), undivided)

        for num_killed, victim in enumerate(victims, 1):
            pid = ranks[victim]
            assert_alike(answers_during(server, lambda pid=pid: os.kill(pid, signal.SIGKILL)), undivided)
            assert num_restarts(server, "ended") == server.metric("servekit_worker_restarts_total") == num_killed
            assert f"rank {victim} of {len(ranks)}: the model worker was killed by SIGKILL" in server.log.read_text()
            assert not set(server.worker_pids()) & set(ranks), "the other ranks are replaced, too"
            ranks = sorted(server.worker_pids())

        if not lacks_memory:
            return
        largest_step = server.metric("servekit_step_token_limit")
        answers = answers_during(server, lambda: os.kill(ranks[1], SIGNALS["out of memory"]))
        assert_alike(answers, undivided)
        assert num_restarts(server, "out_of_memory") == 1, server.log.read_text()
        assert "rank 1 of the model worker ran out of memory: a planted fault" in server.log.read_text()
        assert server.metric("servekit_step_token_limit") < largest_step, "smaller steps may fit"


def test_ranks_join_as_one_worker(undivided: list[Answer], tmp_path: Path) -> None:
    """An agent starts as many ranks as the server asks for; one is killed, and they join again; then they leave."""
    (tmp_path / "key").write_text("0123456789abcdef" * 4)
    (tmp_path / "key").chmod(0o600)
    address, key = f"unix:{tmp_path}/workers.sock", str(tmp_path / "key")
    arguments = ("--listen-workers", address, "--worker-key-file", key, "--tensor-parallel-size", "2")
    allowed = os.sched_getaffinity(0)
    command = [sys.executable, "-m", "servekit.worker", "--connect", address, "--key-file", key, "--device", "cpu,cpu"]
    command += ["--cpus", format_cpu_list(allowed)]
    with (
        serving_ranks(tmp_path / "log", *arguments) as server,
        (tmp_path / "worker.log").open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD, **fault_environment()}
        ) as agent,
    ):
        try:
            server.wait_until_ready()
            ranks = proc.children(agent.pid)
            assert len(ranks) == 2
            told = [rank["cpus"] for rank in server.client.get("/info").json()["replicas"][0]["ranks"]]
            cores = [os.sched_getaffinity(pid) for pid in ranks]
            assert [set(parse_cpu_list(text)) for text in told] == cores
            assert set.union(*cores) == allowed and not (set.intersection(*cores) and len(allowed) > 1)
            assert_alike(answers_during(server, lambda: os.kill(ranks[1], signal.SIGKILL)), undivided)
            assert "rank 1 of 2: the model worker was killed by SIGKILL" in server.log.read_text()
            assert not set(proc.children(agent.pid)) & set(ranks), "the other rank is replaced, too"
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(60) == 0, (tmp_path / "worker.log").read_text()
            proc.wait_until_gone(*ranks)
        finally:
            agent.kill()
