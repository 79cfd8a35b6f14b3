"""Linear layers of one input as one multiplication, with their weights as the device reads them.

On a CPU that is how oneDNN lays them out. torch's own lays a weight out anew in every call, or multiplies it as it is,
which for the few rows of a decode step takes longer than reading it; here it happens once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_ROWS = 32  # of a step that the layout is chosen for; one layout serves all sizes


class Weight(Protocol):
    """A weight [num_outputs, num_inputs] and its bias."""

    def multiply(self, x: Tensor) -> Tensor:
        """x W' + b."""

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        """to + x W' + b, rounded once where there is no bias."""


MakeWeight = Callable[[Tensor, Tensor | None], Weight]


class PackedWeight:
    """As oneDNN lays it out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS)
        # Overloads by name: to find the one that fits takes torch as long as a small operation.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_and_add = torch.ops.mkldnn._linear_pointwise.binary

    @property
    def address(self) -> int:
        found: int = torch.ops.mkldnn.data_ptr(self._weight)
        return found

    @property
    def num_bytes(self) -> int:
        found: int = torch.ops.mkldnn._nbytes(self._weight)
        return found

    def multiply(self, x: Tensor) -> Tensor:
        output: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return output

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        output: Tensor = self._multiply_and_add(x, to, self._weight, self._bias, "add")
        return output


class DenseWeight:
    """As torch has it: on a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, to: Tensor) -> Tensor:
        return torch.addmm(to if self._bias is None else to + self._bias, x, self._weight.T)


def joined(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of linear layers that have one input: they are one, side by side."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    weights = [linear.weight.detach() for linear in linears]
    return torch.cat(weights) if len(weights) > 1 else weights[0], torch.cat(biases) if biases else None


class PackedLinear(nn.Module):
    """y = x W' + b, as the layer that it was made of."""

    def __init__(self, linear: nn.Linear, weight: MakeWeight = PackedWeight) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.forward = weight(*joined(linear)).multiply


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, and this processor, have what is needed."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack_linears(model: nn.Module, weight: MakeWeight = PackedWeight) -> int:
    """Replace every plain linear layer; each weight is let go as soon as its copy is made. Returns how many."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # what is derived from it may mean something else
                setattr(parent, name, PackedLinear(child, weight))
                num_packed += 1
    return num_packed
