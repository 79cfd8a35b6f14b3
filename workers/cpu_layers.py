"""What a decoder layer does between its multiplications, on a CPU, by the C of layers.c."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class CpuLayers:
    """For one dtype. All tensors are dense, and sizes multiples of sixteen."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._norm = library.norm
        self._norm.argtypes = [pointer, pointer, pointer, number, number, ctypes.c_float]
        self._norm.restype = None
        self._swiglu = library.swiglu
        self._swiglu.argtypes = [pointer, pointer, number, number]
        self._swiglu.restype = None

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """x / rms(x) * weight, for x [num_tokens, size]."""
        output = torch.empty_like(x)
        self._norm(x.data_ptr(), weight.data_ptr(), output.data_ptr(), *x.shape, epsilon)
        return output

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up [num_tokens, size], for [num_tokens, 2 * size] with the gates first."""
        num_tokens, both = gate_up.shape
        output = gate_up.new_empty(num_tokens, both // 2)
        self._swiglu(gate_up.data_ptr(), output.data_ptr(), num_tokens, both // 2)
        return output
