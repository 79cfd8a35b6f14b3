"""The operations of a decoder layer between its matrix products, on a CPU, by layers.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

C_GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "clamped_silu": "clamped_swiglu"}  # by activation


class CpuOps:
    """The operations for the dtype of one library. All tensors are dense, and sizes are multiples of LANES."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        """`library` is the one for tensors of `dtype`."""
        self.library, self.scalar_bytes = library, dtype.itemsize
        self._rms_norm = library.rms_norm
        self._swiglu, self._geglu = library.swiglu, library.geglu

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return x / rms(x) * weight, for x [num_tokens, size] and weight [size] float32."""
        output = torch.empty_like(x)
        self._norm_into(output, x, weight, epsilon, None)
        return output

    def norm_add(self, x: Tensor, weight: Tensor, epsilon: float, residual: Tensor) -> Tensor:
        """Return residual + x / rms(x) * weight, which is written into `residual`."""
        self._norm_into(residual, x, weight, epsilon, residual.data_ptr())
        return residual

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""
        return self._gate(self._swiglu, gate_up)

    def geglu(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up, approximated by tanh."""
        return self._gate(self._geglu, gate_up)

    def gate_of(self, activation: str) -> Callable[[Tensor], Tensor]:
        """Return what multiplies ups by the activation of their gates."""
        return partial(self._gate, getattr(self.library, C_GATES[activation]))

    def _norm_into(self, output: Tensor, x: Tensor, weight: Tensor, epsilon: float, residual: int | None) -> None:
        assert weight.dtype is torch.float32
        num_tokens, size = x.shape
        self._rms_norm(x.data_ptr(), weight.data_ptr(), residual, output.data_ptr(), num_tokens, size, epsilon)

    def _gate(self, function: Any, gate_up: Tensor) -> Tensor:
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        function(gate_up.data_ptr(), output.data_ptr(), num_tokens, size)
        return output
