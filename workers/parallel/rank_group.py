"""The ranks that execute each step together, and the collective operations between them.

All ranks call the same operations in the same order, because they execute the same plans. A rank that does not would
leave the others waiting in theirs. So what only one rank can know (the device's memory, a grammar's mask) never decides
which operations are called.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from servekit.errors import ConfigError

# How long a rank may wait for the others. They load their parts of the weights at the speed of their disks. A rank that
# has ended is noticed by the server, which ends the others.
TIMEOUT = timedelta(minutes=30)


class RankGroup:
    """This process as one of `size` ranks."""

    def __init__(self, rank: int, size: int, rendezvous: str, device: torch.device) -> None:
        """Wait for the other ranks. `rendezvous` is a file that all of them can open, and that did not exist before.

        Raises ConfigError if they cannot be connected.
        """
        self.rank, self.size = rank, size
        # The ranks of one machine need no other interface, and the name of the machine may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(
                backend, init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=TIMEOUT
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"rank {rank} of {size} cannot be connected to the others: {error}") from error
        self._group = dist.group.WORLD
        self.mesh: DeviceMesh = init_device_mesh("cpu", (size,))  # of the parts in which weights are read

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up `x` over all ranks, in place, and return it. The bits of the sum are the same on every rank."""
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, num_columns: int) -> Tensor:
        """Return the ranks' parts of the last dimension side by side [..., num_columns]; `x` is this rank's part."""
        width = -(-num_columns // self.size)  # the last parts may be narrower
        padded = x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)[..., :num_columns]

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x` with rank 0's on every rank, and return it."""
        dist.broadcast(x, src=0, group=self._group)
        return x

    def minimum(self, value: int) -> int:
        """Return the smallest of the ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return int(tensor)

    def total(self, value: int) -> int:
        """Return the sum of the ranks' values."""
        return int(self.all_reduce(torch.tensor([value], dtype=torch.int64)))

    def share(self, size: int) -> slice:
        """Return this rank's part of `size` items. Parts are as long as the first ones can be, as torch.chunk's."""
        width = -(-size // self.size)
        return slice(min(self.rank * width, size), min((self.rank + 1) * width, size))

    def broadcast_all(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite all these tensors with rank 0's."""
        for tensor in tensors:
            self.broadcast(tensor)
