"""Tests of where each worker and each of its ranks runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.executor import placement
from servekit.executor.placement import ANYWHERE, Placement, divide, place_joining, placements
from servekit.executor.worker_process import worker_environment
from servekit.protocol.messages import LoadModel

LOAD = LoadModel("/model", "auto", "auto", 16, 1, 1, None, 1, None, 0.9)

UseCores = Callable[..., None]


@pytest.fixture
def use_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> UseCores:
    """A function that gives this process cores, and the machine NUMA nodes (none by default) and no GPU."""

    def use(allowed: set[int], *nodes: str) -> None:
        for number, cores in enumerate(nodes):
            (tmp_path / f"node{number}").mkdir()
            (tmp_path / f"node{number}" / "cpulist").write_text(f"{cores}\n")
        monkeypatch.setattr(placement, "NODES", tmp_path)
        monkeypatch.setattr(placement, "_has_gpu", lambda: False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)

    return use


def devices_of(config: ServeConfig) -> list[str]:
    """By replica, what the message that loads the model says of devices."""
    return [each.apply(replace(LOAD, device=config.device)).device for each in placements(config)]


def test_a_lone_process_is_placed_as_if_there_were_no_placement() -> None:
    (alone,) = placements(ServeConfig())
    for each in (alone, ANYWHERE):
        assert each.apply(LOAD) == LOAD and not each.arguments(0) and not each.environment(0)
    assert placements(ServeConfig(devices="cuda:3"))[0].apply(LOAD).device == "cuda:3"


# -- cores ------------------------------------------------------------------------------------------------------------


def test_replicas_on_a_cpu_divide_the_cores(use_cores: UseCores) -> None:
    use_cores({2, 3, 4, 5, 6})
    found = placements(ServeConfig(device="cpu", data_parallel_size=2))
    assert [each.cpus for each in found] == [((2, 3),), ((4, 5, 6),)]
    assert found[1].arguments(0) == ["--cpus", "4-6"]
    environment = worker_environment(found[1].environment(0))
    assert environment.get("OMP_NUM_THREADS") in ("3", os.environ.get("OMP_NUM_THREADS"))


def test_threads_that_the_operator_has_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(Placement(cpus=((0, 1),)).environment(0))["OMP_NUM_THREADS"] == "7"


def test_cores_of_a_numa_node_stay_together(use_cores: UseCores, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cores(set(range(8)), "0-1,4-5", "2-3,6-7")
    found = placements(ServeConfig(devices="cpu,cpu"))
    assert [each.cpus for each in found] == [((0, 1, 4, 5),), ((2, 3, 6, 7),)]
    (group,) = placements(ServeConfig(device="cpu", tensor_parallel_size=2, pipeline_parallel_size=2))
    assert group.cpus == ((0, 1), (4, 5), (2, 3), (6, 7)), "each rank's memory is that of one node"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))  # a core that no node has
    assert placements(ServeConfig(devices="cpu,cpu"))[0].cpus == ((0, 1, 2, 3),)


def test_the_ranks_of_a_replica_divide_its_cores(use_cores: UseCores) -> None:
    use_cores(set(range(8)))
    found = placements(ServeConfig(devices=",".join(["cpu"] * 4), tensor_parallel_size=2))
    assert [each.cpus for each in found] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert found[1].arguments(1) == ["--cpus", "6-7"] and found[1].environment(1) == {"OMP_NUM_THREADS": "2"}
    (alone,) = placements(ServeConfig(pipeline_parallel_size=3))
    assert alone.cpus == ((0, 1), (2, 3, 4), (5, 6, 7)), "a group alone on the machine, too"


def test_replicas_on_gpus_leave_the_cores_to_those_on_the_cpu(use_cores: UseCores) -> None:
    use_cores(set(range(4)))
    config = ServeConfig(devices="cuda:0,cuda:1,cpu,cpu", tensor_parallel_size=2)
    assert [each.cpus for each in placements(config)] == [(), ((0, 1), (2, 3))]


@pytest.mark.parametrize("num_cores", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_a_core_and_no_core_is_idle_or_shared_if_there_are_enough(
    use_cores: UseCores, num_cores: int, num_replicas: int, num_ranks: int
) -> None:
    use_cores(set(range(num_cores)))
    config = ServeConfig(device="cpu", data_parallel_size=num_replicas, tensor_parallel_size=num_ranks)
    found = [each.cpus for each in placements(config)]
    assert len(found) == num_replicas
    if num_replicas == num_ranks == 1:
        assert found == [()], "all cores are its own"
        return
    ranks = list(chain.from_iterable(found))
    assert len(ranks) == num_replicas * num_ranks and all(ranks)
    if num_cores >= num_replicas * num_ranks:
        assert sorted(chain.from_iterable(ranks)) == list(range(num_cores))
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_each_core_is_in_one_part_unless_there_are_too_few() -> None:
    for num_cores in range(1, 9):
        cores = list(range(num_cores))
        for num_parts in range(1, 9):
            parts = divide(cores, num_parts)
            assert len(parts) == num_parts and all(parts)
            if num_parts <= num_cores:
                assert [core for part in parts for core in part] == cores
                assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_simulated_workers_are_bound_to_no_core() -> None:
    assert placements(ServeConfig(model="sim:instant", data_parallel_size=3)) == [ANYWHERE] * 3
    assert placements(ServeConfig(model="sim:instant", devices="cpu,cpu")) == [ANYWHERE] * 2


# -- devices ----------------------------------------------------------------------------------------------------------


def test_replicas_on_gpus_have_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_has_gpu", lambda: True)
    config = ServeConfig(data_parallel_size=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert [each.apply(LOAD).device_index for each in placements(config)] == [0, 4]
    named = [each.apply(LOAD) for each in placements(ServeConfig(devices="cuda:1,cuda:0"))]
    assert [(each.device, each.device_index) for each in named] == [("cuda:1", None), ("cuda:0", None)]
    assert all(not each.cpus for each in placements(config))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("tensor_size", [1, 2, 3])
@pytest.mark.parametrize("pipeline_size", [1, 2])
@pytest.mark.parametrize("says_size", [False, True])
def test_named_devices_are_those_of_the_replicas_in_order_then_of_their_stages_then_of_their_ranks(
    num_replicas: int, tensor_size: int, pipeline_size: int, says_size: bool
) -> None:
    """The server's rank r is rank r % T of stage r // T, and gets the r-th device of the message."""
    names = iter(f"cuda:{number}" for number in (7, 3, 9, 1, 0, 11, 5, 2, 17, 4, 6, 8, 10, 12, 13, 14, 15, 16))
    expected = {
        (replica, stage, tensor_rank): next(names)
        for replica in range(num_replicas)
        for stage in range(pipeline_size)
        for tensor_rank in range(tensor_size)
    }
    config = ServeConfig(
        devices=",".join(expected.values()),
        tensor_parallel_size=tensor_size,
        pipeline_parallel_size=pipeline_size,
        data_parallel_size=num_replicas if says_size else ServeConfig().data_parallel_size,
    )
    found = {
        (replica, rank // tensor_size, rank % tensor_size): device
        for replica, group in enumerate(devices_of(config))
        for rank, device in enumerate(group.split(","))
    }
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"devices": "cuda:0,cuda:1,cuda:2", "tensor_parallel_size": 2}, "names 3, and each replica needs 2 devices"),
        (
            {"devices": "cuda:0", "tensor_parallel_size": 2, "pipeline_parallel_size": 3},
            r"needs 6 devices \(--tensor-parallel-size 2 times --pipeline-parallel-size 3\); name 6 for each replica",
        ),
        (
            {"devices": "cpu,cpu", "data_parallel_size": 3},
            "names 2, and --data-parallel-size 3 times --tensor-parallel-size 1 .* need 3 devices; name 3",
        ),
        (
            {"devices": "cpu,cpu,cpu,cpu", "data_parallel_size": 4, "tensor_parallel_size": 2},
            "names 4, and --data-parallel-size 4 times --tensor-parallel-size 2 .* need 8 devices; name 8",
        ),
        (
            {"devices": "cpu,cuda:0", "tensor_parallel_size": 2},
            "--devices gives the ranks of one replica cpu,cuda:0: .* name devices of one kind",
        ),
        (
            {"devices": "cuda:0,cuda:1,cuda:2,cuda:2", "tensor_parallel_size": 2},
            "ranks of one replica cuda:2,cuda:2: NCCL.* name different ones",
        ),
        ({"devices": "cpu,cpu,cpu", "tensor_parallel_size": 2, "model": "sim:instant"}, "names 3"),
    ],
)
def test_devices_that_do_not_fit_the_ranks_are_refused_with_numbers_and_the_remedy(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        placements(ServeConfig(**settings))


def test_replicas_may_share_a_gpu_and_ranks_on_cpus_their_device() -> None:
    assert devices_of(ServeConfig(devices="cuda:0,cuda:0")) == ["cuda:0", "cuda:0"]
    assert devices_of(ServeConfig(devices="cpu,cpu,cpu,cpu", tensor_parallel_size=2)) == ["cpu,cpu", "cpu,cpu"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_several_replicas_on_one_named_device_are_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"'cuda:2' \(--device\) is one device.* --devices cuda:0,cuda:1"):
        placements(ServeConfig(device="cuda:2", data_parallel_size=2, tensor_parallel_size=num_ranks))
    assert devices_of(ServeConfig(device="cuda:2", tensor_parallel_size=num_ranks)) == ["cuda:2"]


def test_a_server_that_workers_join_places_its_own_only() -> None:
    address = "unix:/run/servekit.sock"
    assert not placements(ServeConfig(device="cuda:2", listen_workers=address)), "a worker that joins has a device"
    assert len(placements(ServeConfig(data_parallel_size=2, listen_workers=address))) == 2
    assert placements(ServeConfig(devices="cuda:3", listen_workers=address))[0].apply(LOAD).device == "cuda:3"


# -- workers that join ------------------------------------------------------------------------------------------------


def test_a_group_that_joins_has_the_devices_and_divides_the_cores_of_its_agent(use_cores: UseCores) -> None:
    use_cores({1, 2, 5})
    load = replace(LOAD, tensor_parallel_size=2)
    assert place_joining("cuda:2,cuda:3", load) == Placement("cuda:2,cuda:3")
    assert place_joining("cuda:2", load) == Placement("cuda:2"), "and the next one"
    for device in ("cpu", "auto", "cpu,cpu"):
        found = place_joining(device, load)
        assert found.cpus == ((1,), (2, 5)) and found.apply(load).device == device
    assert place_joining("cpu", LOAD) == Placement("cpu"), "a process alone has all cores of its agent"


def test_ranks_of_a_group_on_several_machines_divide_the_cores_of_each(use_cores: UseCores) -> None:
    use_cores({1, 2, 5})
    load = replace(LOAD, tensor_parallel_size=4)
    assert place_joining("cpu", load, 1) == Placement("cpu"), "alone on its machine"
    assert place_joining("cpu", load, 2) == Placement("cpu", cpus=((1,), (2, 5)))
    assert place_joining("cuda:2,cuda:3", load, 2) == Placement("cuda:2,cuda:3")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:0,cuda:1", r"--device names 2 devices, .* 3 ranks \(--tensor-parallel-size 3, .* name one device for"),
        ("cuda:0,cuda:1,cuda:0", "--device gives the ranks of one replica cuda:0,cuda:1,cuda:0: NCCL"),
        ("cuda:0,cpu,cpu", "name devices of one kind"),
    ],
)
def test_devices_of_a_group_that_joins_follow_the_same_rules(device: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        place_joining(device, replace(LOAD, tensor_parallel_size=3))
