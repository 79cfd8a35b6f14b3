"""Decide on which device each worker and each of its ranks runs, and on a CPU on which cores.

Otherwise each process on a CPU would use all cores, and the processes would delay each other at every operation of a
layer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.protocol.cpu_list import format_cpu_list, parse_cpu_list
from servekit.protocol.messages import LoadModel
from servekit.simulation.model import is_simulated

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NODES = Path("/sys/devices/system/node")


class Placement(Struct, frozen=True):
    """Where one worker runs: a process, or a group of ranks, each of which is a process."""

    device: str | None = None  # or one for each rank, separated by commas; None: as --device says
    device_index: int | None = None  # index of the first GPU, if `device` names none; None lets torch choose
    cpus: tuple[tuple[int, ...], ...] = ()  # by rank, the cores that it is bound to; empty binds it to none

    def apply(self, load: LoadModel) -> LoadModel:
        """Return the message that loads the model there."""
        return replace(load, device=self.device or load.device, device_index=self.device_index)

    def arguments(self, rank: int) -> list[str]:
        """Of the rank's command line."""
        return ["--cpus", format_cpu_list(self.cpus[rank])] if self.cpus else []

    def environment(self, rank: int) -> dict[str, str]:
        """Variables of the rank's environment, unless the operator has set them."""
        return {"OMP_NUM_THREADS": str(len(self.cpus[rank]))} if self.cpus else {}


ANYWHERE = Placement()


def placements(config: ServeConfig) -> list[Placement]:
    """Return the place of each worker that the server starts itself.

    A single process is bound to no cores, and torch chooses its GPU. Raises ConfigError if the devices are not as many
    as the ranks of all replicas, or cannot work together.
    """
    if not config.starts_workers:
        return []
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    groups = _named_groups(config, num_ranks) or [config.device] * (config.data_parallel_size or 1)
    if is_simulated(config.model):
        return [ANYWHERE] * len(groups)
    if len(groups) == num_ranks == 1:
        return [Placement(groups[0])]
    if config.devices is None and len(groups) > 1 and ":" in config.device:
        raise ConfigError(
            f"device = {config.device!r} (--device) is one device, and data_parallel_size = {len(groups)} replicas "
            f"(--data-parallel-size) need one each; name them with --devices, as in --devices cuda:0,cuda:1, or use "
            "--device cuda, which begins with the first GPU (CUDA_VISIBLE_DEVICES says which one that is)"
        )
    on_cpu = [index for index, group in enumerate(groups) if _is_cpu(group)]
    shares = dict(zip(on_cpu, divide(_cores(), len(on_cpu)), strict=True))
    return [
        Placement(group, cpus=tuple(divide(shares[index], num_ranks)))
        if index in shares
        else Placement(group, device_index=None if ":" in group else index * num_ranks)
        for index, group in enumerate(groups)
    ]


def place_joining(device: str, load: LoadModel, num_local_ranks: int | None = None) -> Placement:
    """Return the place of a worker that joins a server from this machine. `device` is its --device.

    That names the first device, or one for each rank in the order of `placements`. On a CPU, ranks divide the cores
    that this process may use. Where the ranks are on several machines, `num_local_ranks` of them are on this one.
    Raises ConfigError.
    """
    devices = device.split(",")
    num_ranks = num_local_ranks or load.num_ranks
    if num_local_ranks is None and len(devices) not in (1, num_ranks):
        raise ConfigError(
            f"--device names {len(devices)} devices, and the server divides the model among {load.num_ranks} ranks "
            f"(--tensor-parallel-size {load.tensor_parallel_size}, --pipeline-parallel-size "
            f"{load.pipeline_parallel_size}); name one device for each rank, or only the first one"
        )
    _check_group(devices, "--device")
    is_divided = num_ranks > 1 and _is_cpu(device)
    return Placement(device, cpus=tuple(divide(_cores(), num_ranks)) if is_divided else ())


def auto_device() -> str:
    """Return the device that `auto` stands for, as far as this process can tell: it has no torch."""
    return "cuda:0" if _has_gpu() else "cpu"


def divide(cores: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """Divide cores into contiguous parts of nearly equal size. With too few cores, several parts share one."""
    if not num_parts:
        return []
    if num_parts > len(cores):
        return [(cores[index % len(cores)],) for index in range(num_parts)]
    bounds = [index * len(cores) // num_parts for index in range(num_parts + 1)]
    return [tuple(cores[start:stop]) for start, stop in pairwise(bounds)]


def _named_groups(config: ServeConfig, num_ranks: int) -> list[str]:
    """Return the devices of each replica that --devices names; none if it is not set.

    Consecutive devices are a group: those of the first stage by tensor rank, then those of the next stage. vLLM numbers
    its ranks in this order, too. Raises ConfigError.
    """
    if config.devices is None:
        return []
    devices = config.devices.split(",")
    what = f"devices = {config.devices!r} (--devices) names {len(devices)}"
    tensor_size, pipeline_size = config.tensor_parallel_size, config.pipeline_parallel_size
    sizes = f"--tensor-parallel-size {tensor_size} times --pipeline-parallel-size {pipeline_size}"
    num_replicas = config.data_parallel_size
    if num_replicas is not None and len(devices) != num_replicas * num_ranks:
        raise ConfigError(
            f"{what}, and --data-parallel-size {num_replicas} times {sizes} need {num_replicas * num_ranks} devices; "
            f"name {num_replicas * num_ranks}, or change the sizes"
        )
    if len(devices) % num_ranks:
        raise ConfigError(
            f"{what}, and each replica needs {num_ranks} devices ({sizes}); name {num_ranks} for each replica, stage "
            "by stage, or change the sizes"
        )
    groups = [devices[start : start + num_ranks] for start in range(0, len(devices), num_ranks)]
    for group in groups:
        _check_group(group, "--devices")
    return [",".join(group) for group in groups]


def _check_group(devices: Sequence[str], option: str) -> None:
    """Raise ConfigError if ranks on these devices cannot exchange tensors."""
    group = ",".join(devices)
    if len({device.partition(":")[0] for device in devices}) > 1:
        raise ConfigError(
            f"{option} gives the ranks of one replica {group}: ranks exchange tensors between GPUs or between CPUs, "
            "and not between the two; name devices of one kind for each replica"
        )
    if devices[0] != "cpu" and len(set(devices)) < len(devices):
        raise ConfigError(
            f"{option} gives the ranks of one replica {group}: NCCL, through which ranks on GPUs exchange tensors, "
            "needs a GPU for each; name different ones, or use replicas (--data-parallel-size), which may share a GPU"
        )


def _is_cpu(device: str) -> bool:
    """Whether a worker on this device, or on these, computes on the CPU."""
    return device.startswith("cpu") or (device == "auto" and not _has_gpu())


def _has_gpu() -> bool:
    return NVIDIA_DRIVER.exists()


def _cores() -> list[int]:
    """Return the cores that this process may use, sorted by NUMA node."""
    allowed, found = os.sched_getaffinity(0), list[int]()
    for node in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        found += [core for core in parse_cpu_list((node / "cpulist").read_text()) if core in allowed]
    return found if set(found) == allowed else sorted(allowed)
