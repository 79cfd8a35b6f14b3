"""A linear layer that holds a quantized weight, as a checkpoint is read into the model.

It is the reference: each call dequantizes the weight and multiplies as nn.Linear does. The self-check's sample is
computed with it. Afterwards replace_layers takes its weight and prepares it for a kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.quantization.quantized_tensor import QuantizedTensor


class QuantizedLinear(nn.Module):
    """y = x W' + b, for a W of few bits."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        """Make a layer without a weight; `quantized` must be set before the first call."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias
        self.quantized: QuantizedTensor | None = None

    @property
    def weight(self) -> QuantizedTensor:
        assert self.quantized is not None
        return self.quantized

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantize(x.dtype), self.bias)


class DequantizingWeight:
    """A quantized weight that each multiplication dequantizes: slow, and right on every device."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.dequantize(x.dtype), self._bias)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        dense = self._weight.dequantize(x.dtype)
        return torch.addmm(residual if self._bias is None else residual + self._bias, x, dense.T)
