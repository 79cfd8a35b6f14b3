"""The ranks that hold the parts of the same layers, and the collective operations between them.

All ranks call the same operations in the same order, because they execute the same plans. A rank that does not would
leave the others waiting in theirs. So what only one rank can know (the device's memory, a grammar's mask) never decides
which operations are called.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class RankGroup:
    """One of `size` ranks of a stage, which is this process, and its collective operations."""

    def __init__(self, mesh: DeviceMesh) -> None:
        """`mesh` has one dimension; it is also that of the parts in which weights are read."""
        self.mesh = mesh
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self._group = mesh.get_group()
        self._first_rank = dist.get_global_rank(self._group, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up `x` over all ranks, in place, and return it. The bits of the sum are the same on every rank."""
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor, num_columns: int) -> Tensor:
        """Concatenate the ranks' parts `x` along the last dimension, and return the whole [..., num_columns]."""
        width = -(-num_columns // self.size)  # the last parts may be narrower
        padded = x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded.contiguous(), group=self._group)
        return torch.cat(parts, dim=-1)[..., :num_columns]

    def broadcast(self, x: Tensor) -> Tensor:
        """Overwrite `x` with rank 0's on every rank, and return it."""
        dist.broadcast(x, src=self._first_rank, group=self._group)
        return x

    def total(self, value: int) -> int:
        """Return the sum of the ranks' values."""
        return int(self.all_reduce(torch.tensor([value], dtype=torch.int64)))

    def all_can(self, can: bool) -> bool:
        """Return whether all ranks can do something that a machine, or a rank's part of a model, may not allow."""
        return self.total(int(can)) == self.size

    def share(self, size: int) -> slice:
        """Return this rank's part of `size` items. Parts are as long as the first ones can be, as torch.chunk's."""
        width = -(-size // self.size)
        return slice(min(self.rank * width, size), min((self.rank + 1) * width, size))
