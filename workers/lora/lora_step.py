"""Which rows of a step have which adapters, as torch and C read it."""

from __future__ import annotations

import ctypes
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.csrc.bindings import LORA_RUN_ROWS, CLoraRun, CLoraStep

NO_ADAPTER = -1
Places = NDArray[np.int64]  # of each row of a step, its adapter's place; NO_ADAPTER for none


class LoraStep:
    """Which rows of a step have which adapters."""

    def __init__(
        self, places: Places, max_rank: int, max_parts: int, dtype: torch.dtype, mask: Tensor | None = None
    ) -> None:
        """`max_rank` and `max_parts` are the most that a weight has, for C. On a GPU, `mask` says where a row's own
        numbers are not.
        """
        self.places, self.num_rows, self.mask = places, len(places), mask
        self._max_rank, self._max_parts, self._dtype = max_rank, max_parts, dtype

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """First row, number of rows and place of the rows that follow each other and have one adapter."""
        bounds = [0, *(np.flatnonzero(np.diff(self.places)) + 1).tolist(), len(self.places)]
        return [
            (first, stop - first, int(self.places[first]))
            for first, stop in pairwise(bounds)
            if stop > first and self.places[first] != NO_ADAPTER
        ]

    @cached_property
    def address(self) -> int:
        """The address of a `lora_step`, in which the rows of an adapter are together."""
        adapted = np.flatnonzero(self.places != NO_ADAPTER)
        rows = np.ascontiguousarray(adapted[np.argsort(self.places[adapted], kind="stable")], dtype=np.int64)
        bounds = [0, *(np.flatnonzero(np.diff(self.places[rows])) + 1).tolist(), len(rows)]
        runs = [
            CLoraRun(first, min(LORA_RUN_ROWS, stop - first), int(self.places[rows[first]]))
            for begin, stop in pairwise(bounds)
            for first in range(begin, stop, LORA_RUN_ROWS)
        ]
        array = (CLoraRun * len(runs))(*runs)
        hidden = torch.empty(len(rows) * self._max_parts * self._max_rank, dtype=self._dtype)
        struct = CLoraStep(rows.ctypes.data, ctypes.addressof(array), len(runs), self._max_rank, hidden.data_ptr())
        self._keeps_alive = rows, array, hidden, struct  # C has only addresses
        return ctypes.addressof(struct)
