"""A weight whose products are computed by C, in steps of its own or in one call with all other layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from workers.csrc.bindings import CPackedWeight, CPreparedWeight, CQuantizedWeight, CSideBySideWeight

WORKSPACE_ROWS = 128  # MAX_ROWS in quantized_gemm.c, which multiplies more rows in parts of as many
SCALAR_BYTES = 4  # of float32; bfloat16 takes half


class CpuWeight:
    """A weight [num_outputs, num_inputs] in a layout that a C function multiplies.

    `max_rows` is the largest step that all layers compute in one call, the last one included. If `takes_any_rows`, the
    C function multiplies larger ones as well.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        multiply: Any,
        struct: CPackedWeight | CQuantizedWeight | CSideBySideWeight,
        max_rows: int,
        workspace_bytes: int,
        keeps_alive: Sequence[object],
        takes_any_rows: bool = True,
    ) -> None:
        """Take the library's function `multiply`, the struct that it reads, and the workspace it needs for each row.

        `keeps_alive` holds the tensors that the struct points to, because C has only addresses.
        """
        self.library, self.max_rows, self.workspace_bytes = library, max_rows, workspace_bytes
        self.takes_any_rows = takes_any_rows
        self.num_outputs: int = struct.base.num_outputs
        self.num_inputs: int = struct.base.num_inputs
        self._multiply, self._struct, self._keeps_alive = multiply, struct, keeps_alive
        struct.base.multiply = ctypes.cast(multiply, ctypes.c_void_p).value
        self.address = ctypes.addressof(struct)

    @property
    def first_address(self) -> int:
        """The struct of what is read first in a multiplication."""
        return self.address

    def prefetch_next(self, weight: CpuWeight) -> None:
        """Prefetch `weight` at the end of each multiplication, because it is multiplied next."""
        self._struct.base.next = weight.first_address

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W' + b."""
        return self.multiply_by_c(x, None)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + x W' + b."""
        return self.multiply_by_c(x, residual)

    def multiply_by_c(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return x W' + b + residual for x [..., num_inputs]; without rows, an empty result."""
        num_rows = x.numel() // self.num_inputs
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        output = x.new_empty(*x.shape[:-1], self.num_outputs)
        workspace = self.make_workspace(num_rows)
        self._multiply(
            self.address,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            output.data_ptr(),
            num_rows,
            None if workspace is None else workspace.data_ptr(),
        )
        return output

    def make_workspace(self, num_rows: int) -> Tensor | None:
        """Return memory for the intermediate results of so many rows."""
        if not self.workspace_bytes:
            return None
        return torch.empty(self.workspace_bytes_of(num_rows), dtype=torch.uint8)

    def workspace_bytes_of(self, num_rows: int) -> int:
        """Return the bytes that the intermediate results of so many rows take."""
        return min(num_rows, WORKSPACE_ROWS) * self.workspace_bytes


class SideBySideCpuWeight(CpuWeight):
    """Weights with the same input as one, for the call that runs all layers; see multiply_side_by_side in C."""

    def __init__(self, parts: Sequence[CpuWeight]) -> None:
        self._parts = parts
        for part, next_part in pairwise(parts):
            part.prefetch_next(next_part)
        library, num_outputs = parts[0].library, sum(part.num_outputs for part in parts)
        addresses = (ctypes.c_void_p * len(parts))(*(part.address for part in parts))
        struct = CSideBySideWeight(
            base=CPreparedWeight(num_inputs=parts[0].num_inputs, num_outputs=num_outputs),
            num_parts=len(parts),
            parts=ctypes.addressof(addresses),
        )
        max_rows = min(part.max_rows for part in parts)
        workspace_bytes = max(part.workspace_bytes for part in parts) + SCALAR_BYTES * num_outputs
        takes_any_rows = all(part.takes_any_rows for part in parts)
        keeps_alive = [parts, addresses]
        multiply = library.multiply_side_by_side
        super().__init__(library, multiply, struct, max_rows, workspace_bytes, keeps_alive, takes_any_rows)

    def workspace_bytes_of(self, num_rows: int) -> int:
        of_products = SCALAR_BYTES * self.num_outputs * num_rows
        return of_products + max(part.workspace_bytes_of(num_rows) for part in self._parts)

    @property
    def first_address(self) -> int:
        return self._parts[0].first_address

    def prefetch_next(self, weight: CpuWeight) -> None:
        self._parts[-1].prefetch_next(weight)
