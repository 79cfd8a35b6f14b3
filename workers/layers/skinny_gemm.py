"""Linear layers on the few rows of a decode step on a CPU, at the speed of memory, by skinny_gemm.c.

The C code reads oneDNN's packed weights in place, so memory holds each weight once. More rows are multiplied by
blocked_gemm.c where it is faster than oneDNN, on processors that multiply bfloat16 in vectors and have no AMX, and by
oneDNN elsewhere. oneDNN does not document its layout, and it differs between processors. So each weight is checked when
it is made, and a weight in a layout that the C code cannot read is left to oneDNN.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from workers.csrc.bindings import STRIP, CPackedWeight, CPreparedWeight
from workers.layers.cpu_weight import CpuWeight
from workers.layers.linear import PackedWeight, Weight

# With more rows, the last layer should leave out tokens that are not sampled, and Python takes little of a step. It is
# less than half of the self-check's tokens, which so checks both ways.
MAX_ROWS_IN_ONE_CALL = 32
ANY_NUMBER = 2**62


class SkinnyGemm:
    """The skinny GEMM of a library; `max_rows` is 0 if it has none for its dtype and this processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.max_rows: int = library.skinny_gemm_max_rows()
        self._blocked_width: int = library.blocked_gemm_block_width()  # of weights for any number of rows; 0: none

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
        if not width:
            return packed
        max_rows = ANY_NUMBER if width == self._blocked_width else self.max_rows
        return SkinnyGemmWeight(self.library, packed, bias, weight, width, max_rows)


class SkinnyGemmWeight(CpuWeight):
    """A packed weight that the C code multiplies if there are few rows, and oneDNN otherwise."""

    def __init__(
        self,
        library: ctypes.CDLL,
        packed: PackedWeight,
        bias: Tensor | None,
        weight: Tensor,
        block_width: int,
        max_rows: int,
    ) -> None:
        """Take the weight and its packed form. The C code multiplies up to `max_rows` rows."""
        num_outputs, num_inputs = weight.shape
        base = CPreparedWeight(
            data=packed.address,
            bias=None if bias is None else bias.data_ptr(),
            num_inputs=num_inputs,
            num_outputs=num_outputs,
            strip_bytes=weight.element_size() * STRIP * num_inputs,
        )
        struct = CPackedWeight(base=base, block_width=block_width)
        in_one_call = min(max_rows, MAX_ROWS_IN_ONE_CALL)
        takes_any_rows = max_rows == ANY_NUMBER
        super().__init__(library, library.skinny_gemm, struct, in_one_call, 0, [packed, bias], takes_any_rows)
        self._packed, self._max_rows_by_c = packed, max_rows

    def multiply(self, x: Tensor) -> Tensor:
        return self.multiply_by_c(x, None) if self._has_few_rows(x) else self._packed.multiply(x)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.multiply_by_c(x, residual) if self._has_few_rows(x) else self._packed.multiply_add(x, residual)

    def _has_few_rows(self, x: Tensor) -> bool:
        return 0 < x.numel() // self.num_inputs <= self._max_rows_by_c
