"""Adapters in memory, and how a step's rows are multiplied by the ones that they have.

There are `max_loras` places. A place has rows in the matrices of every linear layer that adapters may change, so
nothing is allocated later. An adapter is read into a place when a step needs it; it stays until the place is needed for
another one, the least recently used first. What is lost is read from its files again.

On a CPU, rows of one adapter that follow each other are multiplied by C, and long runs of them by torch. On a GPU, all
rows are multiplied by the A of all places at once, what is not a row's own is set to zero, and the rest is multiplied
by all B: the shapes are the same for all steps, so that CUDA graphs can repeat them, and with few places it costs a few
percent of the layer's own product.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from servekit.errors import ConfigError
from servekit.protocol.lora import LoraAdapter
from workers.csrc.bindings import CLoraPart, CLoraRun, CLoraStep, CLoraWeight
from workers.csrc.build import LANES, c_library
from workers.device.transfer import to_device
from workers.lora.adapter_files import LowRank, ModuleShape, fingerprint, read_adapter

log = logging.getLogger("servekit.worker")

NO_ADAPTER = -1
LONG_RUN = 16  # rows; torch multiplies more of them faster than C does
Places = NDArray[np.int64]  # of each row of a step, its adapter's place; NO_ADAPTER for none


class LoraLinear:
    """The matrices of all adapters for linear layers with the same input, whose outputs are side by side."""

    def __init__(self, pool: LoraPool, names: Sequence[str], num_inputs: int, sizes: Sequence[int]) -> None:
        """Make room for the adapters of layers `names`, with `sizes` outputs each."""
        self.names, self.num_inputs, self.sizes, self._pool = names, num_inputs, sizes, pool
        num_columns = pool.max_loras * pool.max_rank
        self._a = torch.zeros(len(names), num_columns, num_inputs, dtype=pool.dtype, device=pool.device)
        self._b = [torch.zeros(num_columns, size, dtype=pool.dtype, device=pool.device) for size in sizes]
        self.firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.is_in_c = pool.library is not None and not any(size % LANES for size in (num_inputs, *sizes))
        self._parts = (CLoraPart * (pool.max_loras * len(names)))()
        self._struct = CLoraWeight(num_inputs, sum(sizes), len(names), ctypes.addressof(self._parts))
        self.address = ctypes.addressof(self._struct)

    def write(self, place: int, matrices: dict[str, LowRank]) -> None:
        """Write an adapter's matrices into a place; layers that it does not change get zeros."""
        first = place * self._pool.max_rank
        stop = first + self._pool.max_rank
        for index, name in enumerate(self.names):
            a, b = self._a[index, first:stop], self._b[index][first:stop]
            a.zero_()
            b.zero_()
            rank = 0
            if (given := matrices.get(name)) is not None:
                rank = len(given.a)
                a[:rank].copy_(given.a)
                b[:rank].copy_(given.b.T)
            self._parts[place * len(self.names) + index] = CLoraPart(
                a=a.data_ptr(), b=b.data_ptr(), rank=rank, first_output=self.firsts[index], num_outputs=len(b[0])
            )

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """Add what the adapters of the present step give for x [num_rows, num_inputs] to the output, in place."""
        step = self._pool.step
        if step is not None:
            assert len(x) == step.num_rows, f"{len(x)} rows in a step of {step.num_rows}"
            if step.mask is not None:
                self._add_masked(x, output, step.mask)
            else:
                self._add_runs(x, output, step)
        return output

    def _add_masked(self, x: Tensor, output: Tensor, mask: Tensor) -> None:
        num_parts, num_columns, num_inputs = self._a.shape
        hidden = F.linear(x, self._a.view(-1, num_inputs)).view(len(x), num_parts, num_columns)
        hidden = hidden.masked_fill(mask[:, None], 0)
        for index, (first, size) in enumerate(zip(self.firsts, self.sizes, strict=True)):
            output[:, first : first + size].addmm_(hidden[:, index], self._b[index])

    def _add_runs(self, x: Tensor, output: Tensor, step: LoraStep) -> None:
        short = step.long_runs if self.is_in_c else step.runs
        if self.is_in_c and step.struct is not None:
            library = self._pool.library
            assert library is not None
            if x.is_contiguous() and output.is_contiguous():
                library.add_lora(self.address, step.address, x.data_ptr(), output.data_ptr())
            else:
                short = step.runs
        num_parts = len(self.names)
        for first_row, num_rows, place in short:
            rows = slice(first_row, first_row + num_rows)
            begin = place * self._pool.max_rank
            for index, (first, size) in enumerate(zip(self.firsts, self.sizes, strict=True)):
                rank = self._parts[place * num_parts + index].rank
                if rank:
                    hidden = F.linear(x[rows], self._a[index, begin : begin + rank])
                    output[rows, first : first + size].addmm_(hidden, self._b[index][begin : begin + rank])

    def hook(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Add to the output of a linear layer, as a forward hook of it."""
        if self._pool.step is not None:
            self.add(inputs[0].reshape(-1, self.num_inputs), output.view(-1, sum(self.sizes)))
        return output


class LoraStep:
    """Which rows of a step have which adapters."""

    def __init__(self, pool: LoraPool, places: Places, mask: Tensor | None = None) -> None:
        """Divide the rows into runs of one adapter. On a GPU, `mask` says where a row's own numbers are not."""
        self.places, self.num_rows, self.mask = places, len(places), mask
        self.struct: CLoraStep | None = None
        self.runs: list[tuple[int, int, int]] = []
        self.long_runs: list[tuple[int, int, int]] = []
        if mask is not None:
            return
        bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
        self.runs = [
            (first, stop - first, int(places[first]))
            for first, stop in pairwise(bounds)
            if stop > first and places[first] != NO_ADAPTER
        ]
        self.long_runs = [run for run in self.runs if run[1] > LONG_RUN]
        short = [run for run in self.runs if run[1] <= LONG_RUN]
        if short:
            self._runs, num_rows = (CLoraRun * len(short))(), 0
            for index, (first, count, place) in enumerate(short):
                self._runs[index] = CLoraRun(first, count, place, num_rows)
                num_rows += count
            self._hidden = torch.empty(num_rows * pool.max_parts * pool.max_rank, dtype=torch.float32)
            self.struct = CLoraStep(
                ctypes.addressof(self._runs), len(short), num_rows, pool.max_rank, self._hidden.data_ptr()
            )

    @property
    def address(self) -> int:
        assert self.struct is not None
        return ctypes.addressof(self.struct)


class LoraPool:
    """The adapters that one model has in memory."""

    def __init__(self, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_loras, self.max_rank = max_loras, max_rank
        self.dtype, self.device = dtype, device
        self.library = c_library(str(dtype).removeprefix("torch.")) if device.type == "cpu" else None
        self.max_parts = 1
        self.step: LoraStep | None = None  # of the forward pass that is being computed; None: no row has an adapter
        self._linears: list[LoraLinear] = []
        self.modules: dict[str, ModuleShape] = {}
        self._places: dict[LoraAdapter, int] = {}  # the least recently used first
        self._free = list(range(max_loras - 1, -1, -1))  # places without an adapter, the next one last
        self._failed: dict[LoraAdapter, str] = {}  # why an adapter is not served any more
        self._column_places = torch.arange(max_loras, device=device).repeat_interleave(max_rank)

    def make_linear(self, names: Sequence[str], num_inputs: int, sizes: Sequence[int]) -> LoraLinear:
        """Let adapters change linear layers with the same input, whose outputs are side by side."""
        linear = LoraLinear(self, names, num_inputs, sizes)
        self._linears.append(linear)
        self.max_parts = max(self.max_parts, len(names))
        self.modules.update({name: ModuleShape(num_inputs, size) for name, size in zip(names, sizes, strict=True)})
        return linear

    # -- which adapters are in memory ---------------------------------------------------------------------------------

    def load(self, adapter: LoraAdapter) -> tuple[str, int]:
        """Read an adapter and check it; return the fingerprint of its files and its highest rank.

        It gets a place if one is free. Raises ConfigError for what cannot be served.
        """
        found = fingerprint(Path(adapter.path))
        matrices = self._read(adapter.path, found)
        if self._free:
            self._write(LoraAdapter(adapter.number, adapter.path, found), matrices)
        return found, max(len(each.a) for each in matrices.values())

    def place_of(self, adapter: LoraAdapter, needed: set[LoraAdapter]) -> int:
        """Return the place of an adapter, which is read if it has none. `needed` are those of the same step.

        Raises ConfigError if it cannot be read any more, or if the step needs more adapters than there are places. From
        then on it raises the same for this adapter: rows that were computed without it have left keys and values under
        its name in the prefix cache. Loaded again, it has another number.
        """
        if (reason := self._failed.get(adapter)) is not None:
            raise ConfigError(reason)
        place = self._places.pop(adapter, None)
        if place is not None:
            self._places[adapter] = place  # now the most recently used
            return place
        try:
            matrices = self._read(adapter.path, adapter.fingerprint)
            self._make_room(needed)
        except ConfigError as error:
            log.error("the adapter %s is not served any more: %s", adapter.path, error.message)
            self._failed[adapter] = error.message
            raise
        return self._write(adapter, matrices)

    def _read(self, path: str, expected: str) -> dict[str, LowRank]:
        """Read an adapter whose files have this fingerprint, also after they were read. Raises ConfigError."""
        if fingerprint(Path(path)) == expected:
            matrices = read_adapter(Path(path), self.modules, self.max_rank, self.dtype)
            if fingerprint(Path(path)) == expected:
                return matrices
        raise ConfigError(f"the files of the adapter {path!r} have changed; load it again under another name")

    def _make_room(self, needed: set[LoraAdapter]) -> None:
        """Let a place be free. Raises ConfigError if all of them are needed."""
        if self._free:
            return
        idle = next((each for each in self._places if each not in needed), None)
        if idle is None:
            raise ConfigError(f"a step needs more than {self.max_loras} adapters at once; raise --max-loras")
        self._free.append(self._places.pop(idle))

    def _write(self, adapter: LoraAdapter, matrices: dict[str, LowRank]) -> int:
        """Write an adapter into a free place, and return it. The place stays free where writing fails."""
        place = self._free[-1]
        for linear in self._linears:
            linear.write(place, matrices)
        self._free.pop()
        self._places[adapter] = place
        return place

    # -- a step -------------------------------------------------------------------------------------------------------

    def mask(self, places: Tensor) -> Tensor:
        """Return for each row and each column of the places' A [num_rows, max_loras * max_rank]: is it not its own."""
        return places[:, None] != self._column_places

    @contextlib.contextmanager
    def serving(self, places: Places | None) -> Iterator[None]:
        """Compute with the adapters of these rows; None where no row has one."""
        if places is None:
            yield
            return
        mask = None
        if self.device.type != "cpu":
            mask = self.mask(*to_device([places], self.device))
        with self._during(LoraStep(self, places, mask)):
            yield

    def masked(self, mask: Tensor) -> contextlib.AbstractContextManager[None]:
        """Compute with a mask at a fixed address, as a CUDA graph does."""
        return self._during(LoraStep(self, np.zeros(len(mask), dtype=np.int64), mask))

    @contextlib.contextmanager
    def selecting(self, indices: Tensor) -> Iterator[None]:
        """Compute with some of the present step's rows only."""
        if self.step is None:
            yield
            return
        mask = None if self.step.mask is None else self.step.mask[indices]
        places = self.step.places[indices.numpy()] if mask is None else np.zeros(len(indices), dtype=np.int64)
        with self._during(LoraStep(self, places, mask)):
            yield

    @contextlib.contextmanager
    def _during(self, step: LoraStep) -> Iterator[None]:
        before, self.step = self.step, step
        try:
            yield
        finally:
            self.step = before
