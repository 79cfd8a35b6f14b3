"""A linear layer that holds a quantized weight, as a checkpoint is read into the model.

It is the reference: each call dequantizes the weight and multiplies as nn.Linear does. The self-check's sample is
computed with it. Afterwards replace_layers takes its weight and prepares it for a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.device.heap import trim_heap
from workers.quantization.quantized_tensor import QuantizedTensor


class QuantizedLinear(nn.Module):
    """y = x W' + b, where W is a QuantizedTensor."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        """Make a layer without a matrix; `fill` must be called before the first call."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.bias = bias
        self._matrix: QuantizedTensor | None = None
        self._read: Callable[[], QuantizedTensor] | None = None
        self.num_bytes, self.rounds_activations = 0, False

    @property
    def matrix(self) -> QuantizedTensor:
        """The matrix, which may be read from the files for this call."""
        # Not called `weight`: transformers takes a module's weight for a parameter.
        if self._matrix is None and self._read is not None:
            return self._read()
        assert self._matrix is not None
        return self._matrix

    @property
    def num_numbers(self) -> int:
        """How many numbers the matrix stands for."""
        return self.in_features * self.out_features

    def fill(self, matrix: QuantizedTensor, read: Callable[[], QuantizedTensor] | None = None) -> None:
        """Set the matrix. A rank's part is smaller than the layer that was made.

        With `read`, which returns the same matrix, none is kept in memory: it is read again whenever it is needed.
        """
        self._matrix, self._read = (matrix, None) if read is None else (None, read)
        self.num_bytes, self.rounds_activations = matrix.num_bytes, matrix.activations == "int8"
        self.out_features, self.in_features = matrix.num_outputs, matrix.num_inputs

    def release(self) -> None:
        """Drop the matrix, because a copy of it is prepared; the layer cannot be called any more."""
        self._matrix = self._read = None

    def forward(self, x: Tensor) -> Tensor:
        if self.rounds_activations:
            x = round_rows_to_int8(x)
        products = []
        for rows, part in self.matrix.pieces():
            products.append(F.linear(x, part.dequantize(x.dtype), None if self.bias is None else self.bias[rows]))
        if len(products) == 1:
            return products[0]
        trim_heap()  # or the C library would keep up to twice the largest piece that it ever gave back
        return torch.cat(products, dim=-1)

    def _apply(self, function: Any, recurse: bool = True) -> QuantizedLinear:
        """Move the matrix as nn.Module moves parameters. Its dtypes stay."""
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        if self._matrix is not None or self._read is not None:
            before = torch.device("cpu") if self._matrix is None else self._matrix.codes.device  # files are read there
            device = function(torch.empty(0, dtype=torch.uint8, device=before)).device
            if device != before:
                self._matrix, self._read = self.matrix.to(device), None
        return self


def round_rows_to_int8(x: Tensor) -> Tensor:
    """Return x [..., size] as kernels for int8 activations see it: each row rounded to 255 steps."""
    steps = 127 / x.float().abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    return ((x.float() * steps).round() / steps).to(x.dtype)


class QuantizedEmbedding(nn.Module):
    """An embedding whose matrix is also the output head's: rows are looked up in its codes."""

    def __init__(self, head: QuantizedLinear, dtype: torch.dtype) -> None:
        """`head` holds the matrix; `dtype` is that of the rows."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = head.out_features, head.in_features
        self._head, self._dtype = [head], dtype  # a list, because the head is a module of the model, not of this one

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._head[0].matrix.take_outputs(token_ids.flatten())
        return rows.dequantize(self._dtype).view(*token_ids.shape, self.embedding_dim)


def _outside_of_files(tensor: Tensor) -> Tensor:
    """Return a copy of what is part of a mapped file, which would be mapped as long as the tensor is in use."""
    return tensor if tensor.untyped_storage().resizable() else tensor.clone()


class DequantizingWeight:
    """A quantized weight that each multiplication dequantizes: slow, but correct on every device."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.map_rows(_outside_of_files), bias

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.dequantize(x.dtype), self._bias)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        dense = self._weight.dequantize(x.dtype)
        return torch.addmm(residual if self._bias is None else residual + self._bias, x, dense.T)
