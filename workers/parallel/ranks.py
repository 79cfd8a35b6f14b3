"""Connect the processes of a worker group: `tensor_parallel_size` ranks for each of `pipeline_parallel_size` stages."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from servekit.errors import ConfigError, WorkerLost
from workers.parallel.pipeline_stage import PipelineStage
from workers.parallel.rank_group import RankGroup
from workers.parallel.rendezvous import TcpRendezvous


class Ranks:
    """This process among all of its worker group. The ranks of a stage have consecutive numbers."""

    def __init__(
        self,
        rank: int,
        tensor_parallel_size: int,
        pipeline_parallel_size: int,
        rendezvous: str,
        device: torch.device,
        timeout_s: float = 1800.0,
    ) -> None:
        """Wait for the other ranks.

        `rendezvous` is a file that all of them can open, and that did not exist before, or the `tcp://` address of a
        TcpRendezvous. `timeout_s` is how long a rank waits for another one in any operation, also while that one reads
        its weights. Raises ConfigError if they cannot be connected, and WorkerLost if another try may help.
        """
        size = tensor_parallel_size * pipeline_parallel_size
        timeout = timedelta(seconds=timeout_s)
        remote = TcpRendezvous(rendezvous) if rendezvous.startswith("tcp://") else None
        missing = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
        if missing:  # otherwise the operator has named it, perhaps because it cannot be found
            # The ranks of one machine need no other interface, and the name of the machine may not resolve.
            interface = "lo" if remote is None else remote.interface()
            os.environ.update(dict.fromkeys(missing, interface))
        meeting: dict[str, Any] = {"init_method": f"file://{rendezvous}"}
        if remote is not None:
            meeting = {"store": remote.open_store(rank, timeout_s)}
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout, **meeting)
        except (RuntimeError, ValueError) as error:
            interface = os.environ["GLOO_SOCKET_IFNAME"]
            what = f"rank {rank} of {size} cannot be connected to the others over the interface {interface}: {error}"
            if remote is not None:  # another machine may be lost, and come back
                raise WorkerLost(
                    f"{what}; rank 0 is at {remote.host}, port {remote.port}, and the machines must be able to connect "
                    "to each other on all TCP ports (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose the interface)"
                ) from error
            raise ConfigError(
                f"{what}; is this interface up? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another one"
            ) from error
        # Every rank makes the groups of all stages, in this order.
        mesh = init_device_mesh(
            "cpu", (pipeline_parallel_size, tensor_parallel_size), mesh_dim_names=("stage", "tensor")
        )
        self.group = RankGroup(mesh["tensor"]) if tensor_parallel_size > 1 else None
        self.stage = None
        if pipeline_parallel_size > 1:
            self.stage = PipelineStage(rank, tensor_parallel_size, pipeline_parallel_size)

    def minimum(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
        return int(tensor)
