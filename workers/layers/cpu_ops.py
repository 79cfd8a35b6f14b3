"""The operations of a decoder layer between its matrix products, on a CPU, by layers.c."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class CpuOps:
    """The operations for the dtype of one library. All tensors are dense, and sizes are multiples of LANES."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._rms_norm = library.rms_norm
        self._swiglu = library.swiglu

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return x / rms(x) * weight, for x [num_tokens, size]."""
        output = torch.empty_like(x)
        num_tokens, size = x.shape
        self._rms_norm(x.data_ptr(), weight.data_ptr(), output.data_ptr(), num_tokens, size, epsilon)
        return output

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(num_tokens, size)
        self._swiglu(gate_up.data_ptr(), output.data_ptr(), num_tokens, size)
        return output
