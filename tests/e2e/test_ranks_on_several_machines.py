"""A server whose worker has a rank on each of two machines: here two agents, which share nothing but a key."""

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

import pytest

from tests.support.server_process import ONE_THREAD, ServerProcess, serving

pytestmark = pytest.mark.long

PROMPTS = [f"What is {number} times {number}?" for number in range(6)]
NUM_TOKENS = 60
ENOUGH_S = 180.0  # each start of a rank takes seconds of a core, and the cores are shared


class Machines:
    """A server, and an agent on each of two machines."""

    def __init__(self, folder: Path, divided: str = "--tensor-parallel-size") -> None:
        self._folder = folder
        self._key = folder / "key"
        self._key.write_text("0123456789abcdef" * 4)
        self._key.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.master_port = free.getsockname()[1]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        arguments = ["demo", divided, "2", "--heartbeat-timeout", "30"]
        arguments += ["--listen-workers", "tcp://127.0.0.1:0", "--worker-key-file", str(self._key)]
        self.server = ServerProcess(*arguments, log=folder / "server.log")
        self.wait_until(lambda: "workers can join at" in self.log)

    @property
    def log(self) -> str:
        return self.server.log.read_text() if self.server.log.exists() else ""

    def start(self, node_rank: int, *more: str) -> subprocess.Popen[bytes]:
        address = re.findall(r"workers can join at (\S+)", self.log)[0]
        command = [sys.executable, "-m", "servekit.worker", "--connect", address, "--key-file", str(self._key)]
        command += ["--device", "cpu", "--node", f"machine-{node_rank}", "--nnodes", "2", "--node-rank", str(node_rank)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(self.master_port), *more]
        with (self._folder / f"agent{node_rank}.log").open("ab") as output:
            environment = {**os.environ, **ONE_THREAD}
            self.agents[node_rank] = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        return self.agents[node_rank]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENOUGH_S
        while not condition():
            logs = [path.read_text() for path in sorted(self._folder.glob("*.log"))]
            assert time.monotonic() < deadline, "\n".join(logs)
            time.sleep(0.1)

    def answers(self, during: Callable[[], object] = lambda: None) -> list[str]:
        """The greedy answers to all prompts; `during` is called when the first tokens have arrived."""
        with ThreadPoolExecutor(len(PROMPTS)) as threads:
            before = self.server.metric("servekit_generation_tokens_total")
            streams = [
                threads.submit(self.server.stream, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
                for prompt in PROMPTS
            ]
            self.wait_until(lambda: self.server.metric("servekit_generation_tokens_total") > before + len(PROMPTS))
            during()
            return [stream.result()[-1]["generated_text"] for stream in streams]

    def end(self) -> None:
        self.server.client.close()
        for process in (*self.agents.values(), self.server.process):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path)
    yield machines
    machines.end()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process answers."""
    with serving("demo", log=tmp_path_factory.mktemp("whole") / "log", environment=dict(ONE_THREAD)) as server:
        fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.0}
        return [server.generate(prompt, **fields)["generated_text"] for prompt in PROMPTS]


def test_two_machines_answer_like_one_process_and_the_loss_of_one_loses_no_token(
    machines: Machines, expected: list[str]
) -> None:
    machines.start(1)  # the order does not matter
    machines.wait_until(lambda: "the model is loaded when rank 0 has come" in machines.log)
    machines.start(0)
    machines.server.wait_until_ready(ENOUGH_S)
    (replica,) = machines.server.client.get("/info").json()["replicas"]
    assert replica["host"] == "machine-0 and machine-1"
    assert [rank["host"] for rank in replica["ranks"]] == ["machine-0", "machine-1"]
    listening = Path("/proc/net/tcp").read_text().upper()
    assert f" 0100007F:{machines.master_port:04X} 00000000:0000 0A" in listening, "only at --master-addr"
    assert machines.answers() == expected

    # A machine is lost in the middle of the answers. The other one's rank joins again, and waits for another machine.
    def lose_one() -> None:
        machines.agents[1].kill()
        machines.agents[1].wait()
        machines.start(1)

    assert machines.answers(lose_one) == expected
    assert machines.log.count("has joined, ") == 2 and machines.log.count("serves from now on") == 2

    # A machine leaves: the worker leaves once, with the steps in flight done, and the other machine waits.
    leaving = machines.agents[0]

    def leave() -> None:
        leaving.send_signal(signal.SIGTERM)
        assert leaving.wait(ENOUGH_S) == 0
        machines.start(0)

    assert machines.answers(leave) == expected
    assert len(re.findall("replica 0: worker .* is lost; resuming", machines.log)) == 1
    assert len(re.findall("replica 0: worker .* has left", machines.log)) == 1
    assert machines.agents[1].poll() is None


def test_a_stage_on_each_of_two_machines_answers_like_one_process(tmp_path: Path, expected: list[str]) -> None:
    """Here the results come from the second machine."""
    machines = Machines(tmp_path, "--pipeline-parallel-size")
    try:
        machines.start(0)
        machines.start(1)
        machines.server.wait_until_ready(ENOUGH_S)
        assert machines.answers() == expected
    finally:
        machines.end()


def test_ranks_that_are_not_as_many_as_the_servers_are_refused_with_a_sentence(machines: Machines) -> None:
    agent = machines.start(0, "--nproc-per-node", "2")
    assert agent.wait(ENOUGH_S) == 2
    assert "is rank 0 of 4 (--nnodes times --nproc-per-node), and the server divides the model among 2" in machines.log
