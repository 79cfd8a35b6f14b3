"""The matrices that all adapters have for one linear layer, or for several with the same input, and their product."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.csrc.bindings import CLoraPart, CLoraWeight
from workers.csrc.build import LANES
from workers.lora.adapter_files import LowRank
from workers.lora.lora_step import LoraStep


class LoraPlaces(Protocol):
    """How many adapters have a place, of which rank and data type, and the step that is being computed."""

    max_loras: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
    library: ctypes.CDLL | None
    step: LoraStep | None


class LoraLinear(ABC):
    """The matrices of all adapters for linear layers with the same input, whose outputs are side by side."""

    def __init__(self, pool: LoraPlaces, names: Sequence[str], num_inputs: int, sizes: Sequence[int]) -> None:
        """Make room for the adapters of layers `names`, with `sizes` outputs each."""
        self.names, self.num_inputs, self.sizes, self.pool = names, num_inputs, sizes, pool
        self.firsts = [sum(sizes[:index]) for index in range(len(sizes))]

    @abstractmethod
    def write(self, place: int, matrices: Mapping[str, LowRank]) -> None:
        """Write an adapter's matrices into a place; layers that it does not change get rank 0, or zeros."""

    @abstractmethod
    def add_rows(self, x: Tensor, output: Tensor, step: LoraStep) -> None:
        """Add the product of the adapters of the step's rows with x [num_rows, num_inputs] to the output, in place."""

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add the product of the present step's adapters with x [num_rows, num_inputs] to the output, in place."""
        step = self.pool.step
        if step is not None:
            assert len(x) == step.num_rows, f"{len(x)} rows in a step of {step.num_rows}"
            self.add_rows(x, output, step)
        return output

    def hook(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Add to the output of a linear layer, as a forward hook of it."""
        if self.pool.step is not None:
            self.add(inputs[0].reshape(-1, self.num_inputs), output.view(-1, sum(self.sizes)))
        return output


class TorchLoraLinear(LoraLinear):
    """Matrices as torch multiplies them.

    On a GPU, all rows are multiplied by the A of all places, what is not a row's own is set to zero, and the rest is
    multiplied by all B: the shapes are the same for all steps, so that CUDA graphs can repeat them, and with few places
    it costs a few percent of the layer's own product. On a CPU, rows of one adapter that follow each other are two
    matrix products.
    """

    def __init__(self, pool: LoraPlaces, names: Sequence[str], num_inputs: int, sizes: Sequence[int]) -> None:
        super().__init__(pool, names, num_inputs, sizes)
        num_columns = pool.max_loras * pool.max_rank
        self._a = torch.zeros(len(names), num_columns, num_inputs, dtype=pool.dtype, device=pool.device)
        self._b = [torch.zeros(num_columns, size, dtype=pool.dtype, device=pool.device) for size in sizes]
        self._ranks = [[0] * len(names) for _ in range(pool.max_loras)]

    def write(self, place: int, matrices: Mapping[str, LowRank]) -> None:
        first = place * self.pool.max_rank
        stop = first + self.pool.max_rank
        for index, name in enumerate(self.names):
            a, b = self._a[index, first:stop], self._b[index][first:stop]
            a.zero_()
            b.zero_()
            rank = 0
            if (given := matrices.get(name)) is not None:
                rank = len(given.a)
                a[:rank].copy_(given.a)
                b[:rank].copy_(given.b.T)
            self._ranks[place][index] = rank

    def add_rows(self, x: Tensor, output: Tensor, step: LoraStep) -> None:
        if step.mask is not None:
            self._add_masked(x, output, step.mask)
            return
        for first_row, num_rows, place in step.runs:
            rows = slice(first_row, first_row + num_rows)
            begin = place * self.pool.max_rank
            for index, (first, size) in enumerate(zip(self.firsts, self.sizes, strict=True)):
                if rank := self._ranks[place][index]:
                    hidden = F.linear(x[rows], self._a[index, begin : begin + rank])
                    output[rows, first : first + size].addmm_(hidden, self._b[index][begin : begin + rank])

    def _add_masked(self, x: Tensor, output: Tensor, mask: Tensor) -> None:
        num_parts, num_columns, num_inputs = self._a.shape
        hidden = F.linear(x, self._a.view(-1, num_inputs)).view(len(x), num_parts, num_columns)
        hidden = hidden.masked_fill(mask[:, None], 0)
        for index, (first, size) in enumerate(zip(self.firsts, self.sizes, strict=True)):
            output[:, first : first + size].addmm_(hidden[:, index], self._b[index])


class CLoraLinear(LoraLinear):
    """Matrices in the layout that workers/csrc/lora.c multiplies."""

    def __init__(
        self,
        pool: LoraPlaces,
        names: Sequence[str],
        num_inputs: int,
        sizes: Sequence[int],
        library: ctypes.CDLL,
    ) -> None:
        super().__init__(pool, names, num_inputs, sizes)
        max_rank, self._add_lora = rank_in_c(pool.max_rank), library.add_lora
        self._a = torch.zeros(pool.max_loras, len(names), max_rank * num_inputs, dtype=pool.dtype)
        self._b = torch.zeros(pool.max_loras, max_rank * sum(sizes), dtype=pool.dtype)
        self._parts = (CLoraPart * (pool.max_loras * len(names)))()
        self._struct = CLoraWeight(num_inputs, sum(sizes), len(names), ctypes.addressof(self._parts))
        self.address = ctypes.addressof(self._struct)
        for place in range(pool.max_loras):
            self.write(place, {})

    def write(self, place: int, matrices: Mapping[str, LowRank]) -> None:
        for index, (name, first, size) in enumerate(zip(self.names, self.firsts, self.sizes, strict=True)):
            a, b = self._a[place, index], self._b[place, first * rank_in_c(self.pool.max_rank) :]
            rank = 0
            if (given := matrices.get(name)) is not None:
                missing = -len(given.a) % LANES
                rank = len(given.a) + missing
                a[: rank * self.num_inputs].copy_(in_strips(F.pad(given.a, (0, 0, 0, missing))))
                b[: rank * size].copy_(in_strips(F.pad(given.b, (0, missing))))
            self._parts[place * len(self.names) + index] = CLoraPart(
                a=a.data_ptr(), b=b.data_ptr(), rank=rank, first_output=first, num_outputs=size
            )

    def add_rows(self, x: Tensor, output: Tensor, step: LoraStep) -> None:
        x, target = x.contiguous(), output.contiguous()
        self._add_lora(self.address, step.address, x.data_ptr(), target.data_ptr())
        if target is not output:
            output.copy_(target)


def in_strips(matrix: Tensor) -> Tensor:
    """Return a matrix [num_outputs, num_inputs] in the layout of lora.c, flat. Both sizes are multiples of LANES."""
    num_outputs, num_inputs = matrix.shape
    pack = 4 // matrix.element_size()
    return matrix.reshape(num_outputs // LANES, LANES, num_inputs // pack, pack).permute(0, 2, 1, 3).flatten()


def rank_in_c(rank: int) -> int:
    """Return the rank with which C computes."""
    return rank + -rank % LANES
