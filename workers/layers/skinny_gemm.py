"""Linear layers on the few rows of a decode step on a CPU, at the speed of memory, by skinny_gemm.c.

The C code reads oneDNN's packed weights in place, so memory holds each weight once, and oneDNN multiplies when there
are more rows. oneDNN does not document its layout, and it differs between processors. So each weight is checked when it
is made, and a weight in a layout that the C code cannot read is left to oneDNN.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from workers.csrc.bindings import CPackedWeight
from workers.layers.linear import PackedWeight, Weight
from workers.layers.quantized_linear import DequantizingWeight
from workers.quantization.quantized_tensor import QuantizedTensor


class SkinnyGemm:
    """The skinny GEMM of a library; `max_rows` is 0 if it has none for its dtype and this processor."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.max_rows: int = library.skinny_gemm_max_rows()
        if self.max_rows:
            self._packed_block_width = library.packed_block_width
            self.multiply = library.skinny_gemm

    def make_weight(self, matrix: Tensor | QuantizedTensor, bias: Tensor | None) -> Weight:
        """Pack a weight; return one for the skinny GEMM if the C code can read its layout, and otherwise oneDNN's."""
        if isinstance(matrix, QuantizedTensor):
            return DequantizingWeight(matrix, bias)
        weight = matrix
        packed = PackedWeight(weight, bias)
        if not self.max_rows:
            return packed
        weight = weight.contiguous()
        num_outputs, num_inputs = weight.shape
        width = self._packed_block_width(weight.data_ptr(), packed.address, num_outputs, num_inputs, packed.num_bytes)
        return SkinnyGemmWeight(self, packed, bias, (num_outputs, num_inputs), width) if width else packed


class SkinnyGemmWeight:
    """A packed weight that the C code multiplies if there are at most `max_rows` rows, and oneDNN otherwise."""

    def __init__(
        self, gemm: SkinnyGemm, packed: PackedWeight, bias: Tensor | None, shape: tuple[int, int], block_width: int
    ) -> None:
        self.gemm = gemm
        self.num_outputs, self.num_inputs = shape
        self._packed, self._bias = packed, bias  # keeps them alive, because C has only addresses
        self._struct = CPackedWeight(
            packed=packed.address,
            bias=None if bias is None else bias.data_ptr(),
            num_inputs=self.num_inputs,
            num_outputs=self.num_outputs,
            block_width=block_width,
            next=None,
        )
        self.address = ctypes.addressof(self._struct)

    def prefetch_next(self, weight: SkinnyGemmWeight) -> None:
        """Prefetch `weight` at the end of each multiplication, because it is multiplied next."""
        self._struct.next = weight.address

    def multiply(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.num_inputs
        return self._by_c(x, None, num_rows) if 0 < num_rows <= self.gemm.max_rows else self._packed.multiply(x)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        num_rows = x.numel() // self.num_inputs
        if 0 < num_rows <= self.gemm.max_rows:
            return self._by_c(x, residual, num_rows)
        return self._packed.multiply_add(x, residual)

    def _by_c(self, x: Tensor, residual: Tensor | None, num_rows: int) -> Tensor:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        output = x.new_empty(*x.shape[:-1], self.num_outputs)
        residual_address = None if residual is None else residual.data_ptr()
        self.gemm.multiply(self.address, x.data_ptr(), residual_address, output.data_ptr(), num_rows)
        return output
