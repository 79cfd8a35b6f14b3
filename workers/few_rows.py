"""Linear layers of few rows on a CPU, at the speed of memory, by the C of few_rows.c.

Weights are oneDNN's, where they lie, so memory holds each once; more rows are multiplied by oneDNN as ever. How it lays
a weight out is its own affair and differs by processor, so each weight is looked at when it is made, and what lies in
another way than the C reads is oneDNN's alone.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from workers.packed_linear import PackedWeight, Weight


class _Linear(ctypes.Structure):
    """As in the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "bias")),
        *((name, ctypes.c_int64) for name in ("num_inputs", "num_outputs", "width")),
        ("next", ctypes.c_void_p),
    )


class FewRows:
    """What this processor has for bfloat16; `most` rows is 0 if that is nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer: Any = ctypes.c_void_p
        number: Any = ctypes.c_int64
        self.library = library
        library.most_few_rows.restype = number
        self.most: int = library.most_few_rows()
        if self.most:
            self._width_of_blocks = library.width_of_blocks
            self._width_of_blocks.argtypes = [pointer, pointer, number, number, number]
            self._width_of_blocks.restype = number
            self.multiply = library.multiply_few_rows
            self.multiply.argtypes = [pointer, pointer, pointer, pointer, number]
            self.multiply.restype = None

    def weight(self, weight: Tensor, bias: Tensor | None) -> Weight:
        """Multiplied by the C for few rows, if it can read it, and otherwise by oneDNN."""
        packed, width = PackedWeight(weight, bias), 0
        if self.most:
            weight = weight.contiguous()
            width = self._width_of_blocks(weight.data_ptr(), packed.address, *weight.shape, packed.num_bytes)
        return StreamedWeight(self, packed, bias, (*weight.shape, width)) if width else packed


class StreamedWeight:
    """A weight that is read at the speed of memory if there are few rows."""

    def __init__(
        self, few_rows: FewRows, packed: PackedWeight, bias: Tensor | None, shape: tuple[int, int, int]
    ) -> None:
        self.few_rows = few_rows
        self._packed, self._bias = packed, bias  # kept, for C is given addresses only
        self.num_outputs, self.num_inputs, width = shape
        bias_address = None if bias is None else bias.data_ptr()
        self._described = _Linear(packed.address, bias_address, self.num_inputs, self.num_outputs, width, None)
        self.address = ctypes.addressof(self._described)

    def precede(self, weight: StreamedWeight) -> None:
        """Let it be read ahead: it is what is multiplied next."""
        self._described.next = weight.address

    def multiply(self, x: Tensor) -> Tensor:
        num_rows = x.numel() // self.num_inputs
        return self._by_c(x, None, num_rows) if 0 < num_rows <= self.few_rows.most else self._packed.multiply(x)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        num_rows = x.numel() // self.num_inputs
        return self._by_c(x, to, num_rows) if 0 < num_rows <= self.few_rows.most else self._packed.add(x, to)

    def _by_c(self, x: Tensor, to: Tensor | None, num_rows: int) -> Tensor:
        x, to = x.contiguous(), None if to is None else to.contiguous()
        output = x.new_empty(*x.shape[:-1], self.num_outputs)
        to_address = None if to is None else to.data_ptr()
        self.few_rows.multiply(self.address, x.data_ptr(), to_address, output.data_ptr(), num_rows)
        return output
