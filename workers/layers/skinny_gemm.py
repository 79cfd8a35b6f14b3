"""Linear layers on the few rows of a decode step on a CPU, at the speed of memory, by skinny_gemm.c.

The C code reads oneDNN's packed weights in place, so memory holds each weight once, and oneDNN multiplies when there
are more rows. oneDNN does not document its layout, and it differs between processors. So each weight is checked when it
is made, and a weight in a layout that the C code cannot read is left to oneDNN.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from workers.csrc.bindings import STRIP, CPackedWeight, CPreparedWeight
from workers.layers.cpu_weight import CpuWeight
from workers.layers.linear import PackedWeight, Weight


class SkinnyGemm:
    """The skinny GEMM of a library; `max_rows` is 0 if it has none for its dtype and this processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.max_rows: int = library.skinny_gemm_max_rows()

    def make_weight(self, weight: Tensor, bias: Tensor | None) -> Weight:
        """Pack a weight; return one for the skinny GEMM if the C code can read its layout, and otherwise oneDNN's."""
        packed = PackedWeight(weight, bias)
        if not self.max_rows:
            return packed
        weight = weight.contiguous()
        num_outputs, num_inputs = weight.shape
        width = self.library.packed_block_width(
            weight.data_ptr(), packed.address, num_outputs, num_inputs, packed.num_bytes
        )
        return SkinnyGemmWeight(self, packed, bias, weight, width) if width else packed


class SkinnyGemmWeight(CpuWeight):
    """A packed weight that the C code multiplies if there are at most `max_rows` rows, and oneDNN otherwise."""

    def __init__(
        self, gemm: SkinnyGemm, packed: PackedWeight, bias: Tensor | None, weight: Tensor, block_width: int
    ) -> None:
        num_outputs, num_inputs = weight.shape
        base = CPreparedWeight(
            data=packed.address,
            bias=None if bias is None else bias.data_ptr(),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            strip_bytes=weight.element_size() * STRIP * num_inputs,
        )
        struct = CPackedWeight(base=base, block_width=block_width)
        super().__init__(gemm.library, gemm.library.skinny_gemm, struct, gemm.max_rows, 0, [packed, bias])
        self._packed = packed

    def multiply(self, x: Tensor) -> Tensor:
        return self.multiply_by_c(x, None) if self._has_few_rows(x) else self._packed.multiply(x)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.multiply_by_c(x, residual) if self._has_few_rows(x) else self._packed.multiply_add(x, residual)

    def _has_few_rows(self, x: Tensor) -> bool:
        return 0 < x.numel() // self.num_inputs <= self.max_rows
