"""Adapters in memory, and which of them a step's rows have.

There are `max_loras` places. A place has rows in the matrices of every linear layer that adapters may change, so
nothing is allocated later. An adapter is read into a place when a step needs it; it stays until the place is needed for
another one, the least recently used first. What is lost is read from its files again.

How rows are multiplied: lora_linear.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from servekit.errors import ConfigError
from servekit.protocol.lora import LoraAdapter
from workers.csrc.build import LANES, c_library
from workers.device.transfer import to_device
from workers.lora.adapter_files import LowRank, ModuleShape, file_state, fingerprint, read_adapter
from workers.lora.lora_linear import CLoraLinear, LoraLinear, TorchLoraLinear, rank_in_c
from workers.lora.lora_step import LoraStep, Places

log = logging.getLogger("servekit.worker")


class LinearPart(Protocol):
    """Which inputs and outputs of a linear layer this process has, and how many there are in all."""

    @property
    def num_inputs(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def inputs(self) -> slice: ...
    @property
    def outputs(self) -> Tensor: ...


class OtherRanks(Protocol):
    """The processes that have the other parts of each layer. All of them call the same methods in the same order."""

    def part_of(self, name: str, num_inputs: int, num_outputs: int) -> LinearPart:
        """Return this process's part of a layer, of which it has so many inputs and outputs."""

    def total(self, value: int) -> int:
        """Return the sum of all processes' values."""


class LoraPool:
    """The adapters that one model has in memory, or this rank's part of them.

    A layer that is cut by its outputs has that part of B and all of A; one that is cut by its inputs has that part of
    A and all of B, and what the ranks' parts give is added up with the layer's own product.
    """

    def __init__(
        self,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        other_ranks: OtherRanks | None = None,
    ) -> None:
        """Allocates nothing yet: `make_linear` does, for each layer."""
        self.max_loras, self.max_rank, self._other_ranks = max_loras, max_rank, other_ranks
        self._parts: dict[str, LinearPart] = {}  # by layer, if there are other ranks
        self.dtype, self.device = dtype, device
        self.library = c_library(str(dtype).removeprefix("torch.")) if device.type == "cpu" else None
        self._max_parts = 1
        self.step: LoraStep | None = None  # of the forward pass that is being computed; None: no row has an adapter
        self._linears: list[LoraLinear] = []
        self.modules: dict[str, ModuleShape] = {}
        self._places: dict[LoraAdapter, int] = {}  # the least recently used first
        self._free = list(range(max_loras - 1, -1, -1))  # places without an adapter, the next one last
        self._failed: dict[LoraAdapter, str] = {}  # the reason why an adapter is not served any more
        self._num_reads = self._num_evictions = 0  # since `take_counts`
        self._column_places = torch.arange(max_loras, device=device).repeat_interleave(max_rank)

    def make_linear(self, names: Sequence[str], num_inputs: int, sizes: Sequence[int]) -> LoraLinear:
        """Let adapters change linear layers with the same input, whose outputs are side by side."""
        linear: LoraLinear
        if self.library is not None and not any(size % LANES for size in (num_inputs, *sizes)):
            linear = CLoraLinear(self, names, num_inputs, sizes, self.library)
        else:
            linear = TorchLoraLinear(self, names, num_inputs, sizes)
        self._linears.append(linear)
        self._max_parts = max(self._max_parts, len(names))
        for name, size in zip(names, sizes, strict=True):
            self.modules[name] = ModuleShape(num_inputs, size)
            if self._other_ranks is not None:
                part = self._parts[name] = self._other_ranks.part_of(name, num_inputs, size)
                self.modules[name] = ModuleShape(part.num_inputs, part.num_outputs)
        return linear

    @property
    def has_failed(self) -> bool:
        """Whether the KV cache may hold keys and values that were computed without their adapter."""
        return bool(self._failed)

    # -- which adapters are in memory ---------------------------------------------------------------------------------

    def load(self, adapter: LoraAdapter) -> tuple[str, int]:
        """Read an adapter and check it; return the fingerprint of its files and its highest rank.

        It gets a place if one is free; but not if there are other ranks, because only this one was asked, and all of
        them have the same adapters in the same places. Raises ConfigError for what cannot be served.
        """
        matrices, found = self._read(adapter.path)
        if self._free and self._other_ranks is None:
            self._write(replace(adapter, fingerprint=found), matrices)
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
            matrices = self._read_on_all_ranks(adapter)
            self._make_room(needed)
        except ConfigError as error:
            log.error("the adapter %s is not served any more: %s", adapter.path, error.message)
            self._failed[adapter] = error.message
            raise
        return self._write(adapter, matrices)

    def _read_on_all_ranks(self, adapter: LoraAdapter) -> dict[str, LowRank]:
        """Read an adapter. Raises ConfigError on every rank if one of them cannot read it."""
        error = None
        try:
            matrices, found = self._read(adapter.path)
            if found != adapter.fingerprint:
                raise ConfigError(_changed(adapter.path))
        except ConfigError as raised:
            error = raised
        if self._other_ranks is not None and self._other_ranks.total(int(error is not None)) and error is None:
            error = ConfigError(f"another rank cannot read the adapter {adapter.path!r}")
        if error is not None:
            raise error
        return {name: self._part_of(name, each) for name, each in matrices.items()}

    def _part_of(self, name: str, matrices: LowRank) -> LowRank:
        part = self._parts.get(name)
        return matrices if part is None else LowRank(matrices.a[:, part.inputs], matrices.b[part.outputs])

    def _read(self, path: str) -> tuple[dict[str, LowRank], str]:
        """Read an adapter and compute its fingerprint. Raises ConfigError, also if its files change meanwhile."""
        before = file_state(Path(path))
        matrices = read_adapter(Path(path), self.modules, self.max_rank, self.dtype)
        if file_state(Path(path)) != before:
            raise ConfigError(_changed(path))
        return matrices, fingerprint(matrices)

    def _make_room(self, needed: set[LoraAdapter]) -> None:
        """Free a place. Raises ConfigError if all of them are needed."""
        if self._free:
            return
        idle = next((each for each in self._places if each not in needed), None)
        if idle is None:
            raise ConfigError(f"a step needs more than {self.max_loras} adapters at once; raise --max-loras")
        self._free.append(self._places.pop(idle))
        self._num_evictions += 1

    def _write(self, adapter: LoraAdapter, matrices: dict[str, LowRank]) -> int:
        """Write an adapter into a free place, and return it. The place stays free if writing fails."""
        place = self._free[-1]
        for linear in self._linears:
            linear.write(place, matrices)
        self._free.pop()
        self._places[adapter] = place
        self._num_reads += 1
        return place

    def take_counts(self) -> tuple[int, int]:
        """Return how many adapters got a place since the last call, and how many lost theirs."""
        counts = self._num_reads, self._num_evictions
        self._num_reads = self._num_evictions = 0
        return counts

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
        with self._during(self.make_step(places, mask)):
            yield

    def masked(self, mask: Tensor) -> contextlib.AbstractContextManager[None]:
        """Compute with a mask at a fixed address, as a CUDA graph does."""
        return self._during(self.make_step(np.zeros(len(mask), dtype=np.int64), mask))

    @contextlib.contextmanager
    def selecting(self, indices: Tensor) -> Iterator[None]:
        """Compute with some of the present step's rows only."""
        if self.step is None:
            yield
            return
        mask = None if self.step.mask is None else self.step.mask[indices]
        places = self.step.places[indices.numpy()] if mask is None else np.zeros(len(indices), dtype=np.int64)
        with self._during(self.make_step(places, mask)):
            yield

    def make_step(self, places: Places, mask: Tensor | None = None) -> LoraStep:
        """Return what a step needs to compute with adapters. `places` has the place of each row's. C needs no mask."""
        return LoraStep(places, rank_in_c(self.max_rank), self._max_parts, self.dtype, mask)

    @contextlib.contextmanager
    def _during(self, step: LoraStep) -> Iterator[None]:
        before, self.step = self.step, step
        try:
            yield
        finally:
            self.step = before


def _changed(path: str) -> str:
    return f"the files of the adapter {path!r} have changed; load it again under another name"
