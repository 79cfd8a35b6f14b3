"""Workers on given devices: replicas, ranks, and replicas of ranks answer as one process does.

Each case runs if the machine has the GPUs that it names. On a machine with two GPUs, all but the last run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from servekit.config import ServeConfig
from servekit.executor.placement import placements
from servekit.protocol.cpu_list import format_cpu_list, parse_cpu_list
from tests.e2e.test_ranks import Answer, answers_during, assert_alike
from tests.support.server_process import ServerProcess, serving

pytestmark = pytest.mark.long

# On a GPU that two workers share, each would measure how much memory it may take while the other one loads.
SETTINGS = ("--dtype", "float32", "--num-kv-blocks", "512")


class Case(NamedTuple):
    """Where the workers run."""

    devices: str
    tensor_size: int = 1
    pipeline_size: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs that the machine must have."""
        numbers = [int(device.removeprefix("cuda:")) for device in self.devices.split(",") if device != "cpu"]
        return max(numbers, default=-1) + 1

    @property
    def groups(self) -> list[list[str]]:
        """By replica, the device of each rank."""
        devices, num_ranks = self.devices.split(","), self.tensor_size * self.pipeline_size
        return [devices[start : start + num_ranks] for start in range(0, len(devices), num_ranks)]

    @property
    def arguments(self) -> list[str]:
        sizes = ["--tensor-parallel-size", str(self.tensor_size), "--pipeline-parallel-size", str(self.pipeline_size)]
        return ["--devices", self.devices, *sizes]

    def __str__(self) -> str:
        return f"{self.devices} as {len(self.groups)} x {self.pipeline_size} x {self.tensor_size}"


CASES = [
    Case("cpu,cpu,cpu,cpu", tensor_size=2),
    Case("cuda:0,cuda:0"),
    Case("cuda:1,cuda:0"),
    Case("cuda:1,cuda:0", tensor_size=2),
    Case("cuda:1,cuda:0", pipeline_size=2),
    Case("cuda:3,cuda:1,cuda:0,cuda:2", tensor_size=2),
]

Undivided = Callable[[str], list[Answer]]


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Undivided:
    """A function that returns the answers of one process on a device."""
    known: dict[str, list[Answer]] = {}

    def answers(device: str) -> list[Answer]:
        if device not in known:
            log = tmp_path_factory.mktemp("undivided") / "log"
            with serving("--device", device, *SETTINGS, log=log) as server:
                known[device] = answers_during(server, lambda: None)
        return known[device]

    return answers


def replicas_of(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/info").json()["replicas"]
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_workers_on_given_devices_answer_as_one_process_also_when_a_rank_is_killed(
    case: Case, undivided: Undivided, tmp_path: Path
) -> None:
    if case.num_gpus > torch.cuda.device_count():
        pytest.skip(f"needs {case.num_gpus} GPUs")
    expected = undivided("cuda:0" if case.num_gpus else "cpu")
    with serving(*case.arguments, *SETTINGS, log=tmp_path / "log") as server:
        replicas = replicas_of(server)
        assert [[rank["device"] for rank in replica["ranks"]] for replica in replicas] == case.groups
        assert_cores_are_as_told(case, server)
        for replica, group in enumerate(case.groups):
            each = f" in each of {len(group)} ranks, rank 0:" if len(group) > 1 else ","
            assert f": 512 KV blocks{each} {group[0]}, cores " in line_of_replica(server, replica)

        assert_alike(answers_during(server, lambda: None), expected)
        victim = server.worker_pids()[len(case.groups[0]) - 1]  # the last rank of the first replica
        assert_alike(answers_during(server, lambda: os.kill(victim, signal.SIGKILL)), expected)
        server.wait_for_metric("servekit_workers_alive", len(case.groups))
        places = [replica["ranks"] for replica in replicas_of(server)]
        assert places == [replica["ranks"] for replica in replicas], "the replacement runs in the same place"


def line_of_replica(server: ServerProcess, index: int) -> str:
    """What the log says of where a replica runs."""
    return next(line for line in server.log.read_text().splitlines() if f"replica {index}: " in line)


def assert_cores_are_as_told(case: Case, server: ServerProcess) -> None:
    """Check that /info and the kernel know the cores that are meant for each rank."""
    told = [rank["cpus"] for replica in replicas_of(server) for rank in replica["ranks"]]
    bound = [os.sched_getaffinity(pid) for pid in server.worker_pids()]  # the processes of a server start in this order
    assert [set(parse_cpu_list(text)) for text in told] == bound
    config = ServeConfig(
        devices=case.devices, tensor_parallel_size=case.tensor_size, pipeline_parallel_size=case.pipeline_size
    )
    meant = [format_cpu_list(cpus) for placement in placements(config) for cpus in placement.cpus]
    assert told == meant or case.num_gpus
