"""Decide where each replica's worker runs: on which device, and on a CPU on which cores.

Workers on one CPU would otherwise each use all cores, and wait for each other at every operation of a layer.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel
from servekit.simulation.model import is_simulated

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NODES = Path("/sys/devices/system/node")


class Placement(Struct, frozen=True):
    """Where one worker runs."""

    device: str | None = None  # None: as --device says
    device_index: int | None = None  # of the GPU, where `device` names none; None lets torch choose
    cpus: tuple[int, ...] = ()  # cores that the worker is bound to; empty binds it to none

    def apply(self, load: LoadModel) -> LoadModel:
        """Return the message that loads the model there."""
        return replace(load, device=self.device or load.device, device_index=self.device_index)

    @property
    def arguments(self) -> list[str]:
        """Of the worker's command line."""
        return ["--cpus", ",".join(map(str, self.cpus))] if self.cpus else []

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the worker's environment, unless the operator has set them."""
        return {"OMP_NUM_THREADS": str(len(self.cpus))} if self.cpus else {}

    def __str__(self) -> str:
        return f"cores {','.join(map(str, self.cpus))}" if self.cpus else "not bound to cores"


ANYWHERE = Placement()


def placements(config: ServeConfig) -> list[Placement]:
    """Return the place of each worker that the server starts itself.

    A single one is bound to no cores, and torch chooses its GPU. Raises ConfigError if all would be on one device.
    """
    if not config.starts_workers:
        return []
    devices = config.devices.split(",") if config.devices is not None else []
    num_replicas = len(devices) or config.data_parallel_size or 1
    if num_replicas == 1:
        return [Placement(device=devices[0] if devices else None)]
    if is_simulated(config.model):
        return [Placement()] * num_replicas
    if not devices and ":" in config.device:
        raise ConfigError(
            f"device = {config.device!r} (--device) is one device, and data_parallel_size = {num_replicas} replicas "
            f"(--data-parallel-size) need one each; name them with --devices, as in --devices cuda:0,cuda:1, or use "
            "--device cuda, which begins with the first GPU (CUDA_VISIBLE_DEVICES says which one that is)"
        )
    names = devices or [config.device] * num_replicas
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    on_cpu = [index for index, name in enumerate(names) if name == "cpu" or (name == "auto" and not _has_gpu())]
    shares = dict(zip(on_cpu, divide(_cores(), len(on_cpu)), strict=True))
    return [
        Placement(
            device=name,
            device_index=None if index in shares or ":" in name else index * num_ranks,
            cpus=shares.get(index, ()),
        )
        for index, name in enumerate(names)
    ]


def divide(cores: list[int], num_parts: int) -> list[tuple[int, ...]]:
    """Divide cores into contiguous parts of nearly equal size. With too few cores, several parts share one."""
    if not num_parts:
        return []
    if num_parts > len(cores):
        return [(cores[index % len(cores)],) for index in range(num_parts)]
    bounds = [index * len(cores) // num_parts for index in range(num_parts + 1)]
    return [tuple(cores[start:stop]) for start, stop in pairwise(bounds)]


def _has_gpu() -> bool:
    return NVIDIA_DRIVER.exists()


def _cores() -> list[int]:
    """Return the cores that this process may use, sorted by NUMA node."""
    allowed, found = os.sched_getaffinity(0), list[int]()
    for node in sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        found += [core for core in _parse((node / "cpulist").read_text()) if core in allowed]
    return found if set(found) == allowed else sorted(allowed)


def _parse(text: str) -> list[int]:
    """Parse a list of cores of the kernel: `0-3,8`."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores
