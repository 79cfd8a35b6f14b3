"""Tests of where the worker of each replica runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.executor import placement
from servekit.executor.placement import ANYWHERE, Placement, divide, placements
from servekit.executor.worker_process import worker_environment
from servekit.protocol.messages import LoadModel

LOAD = LoadModel("/model", "auto", "auto", 16, 1, 1, None, 1, None, 0.9)


def test_a_lone_replica_is_placed_as_if_there_were_none() -> None:
    assert placements(ServeConfig()) == [ANYWHERE]
    assert ANYWHERE.apply(LOAD) == LOAD and not ANYWHERE.arguments and not ANYWHERE.environment
    assert placements(ServeConfig(devices="cuda:3"))[0].apply(LOAD).device == "cuda:3"


def test_replicas_on_a_cpu_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 6})
    monkeypatch.setattr(placement, "NODES", Path("/nowhere"))
    found = placements(ServeConfig(device="cpu", data_parallel_size=2))
    assert [each.cpus for each in found] == [(2, 3), (4, 5, 6)]
    assert found[1].arguments == ["--cpus", "4,5,6"] and str(found[1]) == "cores 4,5,6"
    assert worker_environment(found[1].environment).get("OMP_NUM_THREADS") in ("3", os.environ.get("OMP_NUM_THREADS"))


def test_threads_that_the_operator_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(Placement(cpus=(0, 1)).environment)["OMP_NUM_THREADS"] == "7"


def test_cores_of_a_numa_node_stay_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for node, cores in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(placement, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    found = placements(ServeConfig(devices="cpu,cpu"))
    assert [each.cpus for each in found] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))  # a core that no node has
    assert placements(ServeConfig(devices="cpu,cpu"))[0].cpus == (0, 1, 2, 3)


def test_each_core_is_in_one_part_unless_there_are_too_few() -> None:
    for num_cores in range(1, 9):
        cores = list(range(num_cores))
        for num_parts in range(1, 9):
            parts = divide(cores, num_parts)
            assert len(parts) == num_parts and all(parts)
            if num_parts <= num_cores:
                assert [core for part in parts for core in part] == cores
                assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_replicas_on_gpus_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_has_gpu", lambda: True)
    config = ServeConfig(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [each.apply(LOAD).device_index for each in placements(config)] == [0, 4]
    named = [each.apply(LOAD) for each in placements(ServeConfig(devices="cuda:1,cuda:0"))]
    assert [(each.device, each.device_index) for each in named] == [("cuda:1", None), ("cuda:0", None)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_replicas_on_one_named_device_are_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"'cuda:2' \(--device\) is one device.* --devices cuda:0,cuda:1"):
        placements(ServeConfig(device="cuda:2", data_parallel_size=2, tensor_parallel_size=num_ranks))
    assert placements(ServeConfig(device="cuda:2", tensor_parallel_size=num_ranks)) == [ANYWHERE]


def test_a_server_that_workers_join_places_its_own_only() -> None:
    address = "unix:/run/servekit.sock"
    assert not placements(ServeConfig(device="cuda:2", listen_workers=address)), "a worker that joins has a device"
    assert len(placements(ServeConfig(data_parallel_size=2, listen_workers=address))) == 2
    assert placements(ServeConfig(devices="cuda:3", listen_workers=address))[0].apply(LOAD).device == "cuda:3"


def test_simulated_workers_are_bound_to_no_core() -> None:
    assert placements(ServeConfig(model="sim:instant", data_parallel_size=3)) == [ANYWHERE] * 3
