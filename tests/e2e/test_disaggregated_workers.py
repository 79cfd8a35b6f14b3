"""Prefill and decode apart with workers that join, whose agents exchange blocks over TCP: answers stay the same."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from servekit.joining.nixl_transfer import has_nixl
from servekit.protocol.sampling_params import SamplingParams
from servekit.simulation.worker import NaiveReference
from tests.e2e.test_disaggregated_prefill import (
    Answers,
    all_choices,
    assert_same,
    expected,
    flags,
    num_generated,
    without_adapter,
)
from tests.support import proc
from tests.support.server_process import ONE_THREAD, ServerProcess
from tests.support.timing import again_if_late, assert_within

__all__ = ["expected", "flags"]  # fixtures

# Each process of an agent imports this at its start. What is sent to other agents is changed as a file says.
FAULTS = """
import os, time
from servekit.joining import transfer_socket

real_write = transfer_socket.TransferSocket._write

def write(self, data, ends_s):
    with open(os.environ["FAULT"]) as file:
        fault = file.read()
    if len(data) > 1000:  # blocks
        if fault == "alter":
            data = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        elif fault == "cut":
            real_write(self, bytes(data[:2000]), ends_s)
            self.close()
        elif fault == "stall":
            time.sleep(60)
    real_write(self, data, ends_s)

transfer_socket.TransferSocket._write = write
"""
NUM_TOKENS = 80


class Service:
    """A server, and the agents of two workers that join it, one for prefill and one for decode.

    Each of the two ranks of a worker whose role is in `divided` has an agent of its own, as on several machines.
    """

    def __init__(
        self, folder: Path, *arguments: str, of_workers: tuple[str, ...] = (), divided: tuple[str, ...] = ()
    ) -> None:
        self.folder, self._of_workers = folder, of_workers
        key = folder / "key"
        key.write_text("0123456789abcdef" * 4)
        key.chmod(0o600)
        (folder / "faults").mkdir()
        (folder / "faults" / "sitecustomize.py").write_text(FAULTS)
        self.set_fault("")
        self._address, self._key = f"unix:{folder}/workers.sock", str(key)
        joining = ("--listen-workers", self._address, "--worker-key-file", self._key, "--prefill-replicas", "1")
        self.server = ServerProcess(*arguments, *joining, log=folder / "log", environment=ONE_THREAD)
        self.agents = {}
        for role in ("prefill", "decode"):
            if role not in divided:
                self.agents[role] = self._start_agent(role)
                continue
            with socket.create_server(("127.0.0.1", 0)) as free:
                meeting = ("--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1]))
            for node in range(2):
                name = f"{role}{node}"
                self.agents[name] = self._start_agent(
                    role, "--nnodes", "2", "--node-rank", str(node), *meeting, name=name
                )

    def _start_agent(self, role: str, *more: str, name: str = "") -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "servekit.worker", "--connect", self._address, "--key-file", self._key]
        paths = [str(self.folder / "faults"), str(Path(__file__).parents[2])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "FAULT": str(self.folder / "fault")}
        with (self.folder / f"{name or role}.log").open("wb") as output:
            return subprocess.Popen(
                [*command, "--role", role, *self._of_workers, *more],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ONE_THREAD, **environment},
            )

    def set_fault(self, fault: str) -> None:
        (self.folder / "fault").write_text(fault)

    def info(self, name: str) -> int:
        number: int = self.server.client.get("/info").json()[name]
        return number

    def end(self) -> None:
        self.server.client.close()
        for process in (*self.agents.values(), self.server.process):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


@contextmanager
def serving_apart(
    folder: Path, *arguments: str, of_workers: tuple[str, ...] = (), divided: tuple[str, ...] = ()
) -> Iterator[Service]:
    service = Service(folder, *arguments, of_workers=of_workers, divided=divided)
    try:
        service.server.wait_until_ready()
        service.server.wait_for_metric("servekit_workers_alive", 2)
        yield service
    finally:
        service.end()


def assert_answers(service: Service, turn: int) -> None:
    """Send prompts that none before had, and check their answers."""
    prompts, params = [f"{turn} {number} {'boat ' * 80}" for number in range(8)], SamplingParams(max_tokens=NUM_TOKENS)
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = threads.map(lambda prompt: service.server.generate(prompt, max_tokens=NUM_TOKENS), prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer["generated_text"] == bytes(NaiveReference().output(prompt.encode(), params)).decode()


@pytest.mark.parametrize(
    "backend",
    [
        "tcp",
        pytest.param(
            "nixl",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(not has_nixl(), reason="NIXL is not installed: pip install 'servekit[nixl]'"),
            ],
        ),
    ],
)
def test_answers_are_those_of_one_replica_and_killed_workers_lose_nothing(
    backend: str,
    flags: tuple[str, ...],
    expected: list[Answers],
    tmp_path: Path,
) -> None:
    flags, requests, expected = without_adapter(flags, expected)  # workers that join have none
    with serving_apart(tmp_path, *flags, of_workers=("--transfer-backend", backend)) as service:
        server = service.server
        assert_same(all_choices(server, requests), expected, requests)
        assert server.metric("servekit_kv_transfer_loaded_blocks_total") > 20
        assert server.metric("servekit_kv_transfer_failed_loads_total") == 0
        assert service.info("num_handed_over") > 5 and service.info("num_failed_transfers") == 0
        roles = {each["role"]: each for each in server.client.get("/info").json()["replicas"]}
        assert roles["prefill"]["kv_connector"]["num_sent_blocks"] > 20
        assert roles["decode"]["kv_connector"]["num_loaded_blocks"] > 20
        for agent in service.agents.values():
            server.wait_for_metric("servekit_workers_alive", 2)
            (worker,) = (pid for pid in proc.children(agent.pid) if "servekit.worker" in proc.read(pid, "cmdline"))
            with ThreadPoolExecutor(1) as thread:
                before = num_generated(server)
                answers = thread.submit(all_choices, server, requests)
                while num_generated(server) < before + 20:
                    assert not answers.done()
                    time.sleep(0.01)
                os.kill(worker, signal.SIGKILL)
                assert not answers.done(), "it was killed when nothing ran any more"
                assert_same(answers.result(), expected, requests)
        server.wait_for_metric("servekit_workers_alive", 2)
        num_before = service.info("num_handed_over")
        assert_same(all_choices(server, requests), expected, requests)
        assert service.info("num_handed_over") > num_before, "the next workers hand over, too"
        assert server.metric("servekit_accounting_faults_total") == 0
        of_decode = (tmp_path / "decode.log").read_text()
        assert ("over NIXL" in of_decode) == (backend == "nixl") and "over TCP" not in of_decode
        for agent in service.agents.values():
            agent.terminate()
            assert agent.wait(timeout=60) == 0, "libraries in its process end, too"


@again_if_late
def test_transfers_that_are_altered_cut_off_or_stalled_change_no_answer_and_delay_no_step(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, turns = tmp_path_factory.mktemp("apart"), itertools.count()
    with serving_apart(folder, "--model", "sim:step=10ms") as service:
        assert_answers(service, next(turns))
        num_before = service.info("num_handed_over")
        assert num_before > 0 and service.info("num_failed_transfers") == 0
        for fault, line in (("alter", "wrong MAC"), ("cut", "closed the connection"), ("stall", "timed out")):
            service.set_fault(fault)
            num_failed = service.info("num_failed_transfers")
            began_s = time.monotonic()
            assert_answers(service, next(turns))
            assert_within(NUM_TOKENS * 0.010 + 1.5, time.monotonic() - began_s, "no step waited for a transfer")
            while service.info("num_failed_transfers") == num_failed:  # a stalled one fails after the answers
                time.sleep(0.05)
            assert service.server.metric("servekit_kv_transfer_failed_fetches_total") > num_failed
            assert line in (folder / "decode.log").read_text()
            assert service.info("num_handed_over") == num_before, "nothing of such a transfer is used"
            service.set_fault("")
            while service.info("num_handed_over") == num_before:  # until the pauses after failures are over
                assert_answers(service, next(turns))
            num_before = service.info("num_handed_over")


@pytest.mark.long
@pytest.mark.parametrize(
    "divided",
    [(), ("prefill", "decode"), ("prefill",)],
    ids=["one machine each", "two machines each", "prefill on two machines, decode on one"],
)
def test_ranks_of_two_workers_exchange_their_parts(
    flags: tuple[str, ...],
    expected: list[Answers],
    divided: tuple[str, ...],
    tmp_path: Path,
) -> None:
    flags, requests, expected = without_adapter(flags, expected)
    sizes = ("--tensor-parallel-size", "2")
    with serving_apart(tmp_path, *flags, *sizes, of_workers=("--device", "cpu"), divided=divided) as service:
        assert_same(all_choices(service.server, requests), expected, requests)
        assert service.server.metric("servekit_kv_transfer_loaded_blocks_total") > 20
        assert service.server.metric("servekit_kv_transfer_failed_loads_total") == 0
        assert service.info("num_handed_over") > 5 and service.info("num_failed_transfers") == 0
