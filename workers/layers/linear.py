"""Linear layers whose weights are prepared once, at load. Layers with the same input become one matrix product.

On a CPU, a weight is prepared in oneDNN's packed layout. torch's own linear layer repacks a weight in every call, or
multiplies it unpacked. For the few rows of a decode step, both take longer than to read the weight once.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.device.heap import trim_heap
from workers.layers.quantized_linear import DequantizingWeight, QuantizedLinear
from workers.parallel.rank_group import RankGroup
from workers.quantization.quantized_tensor import QuantizedTensor, stack_outputs

SAME_AS_LINEAR = {"FalconLinear"}  # subclasses of nn.Linear in transformers that compute what it does
NUM_ROWS = 32  # the number of rows that oneDNN chooses the layout for; one layout serves all sizes of steps


class Weight(Protocol):
    """A weight W [num_outputs, num_inputs] with its bias b."""

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W' + b."""

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + x W' + b, rounded once if there is no bias. `residual` may be overwritten."""


class LinearMethod(Protocol):
    """How a device multiplies: it prepares a matrix and its bias."""

    def __call__(self, matrix: Tensor | QuantizedTensor, bias: Tensor | None) -> Weight:
        """Return the prepared weight. It may hold `matrix` itself, or a copy in a layout of its own."""


class PackedWeight:
    """A weight in oneDNN's packed layout, for CPUs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS)
        # Overloads by name: to resolve them in each call takes torch as long as a small operation.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_add = torch.ops.mkldnn._linear_pointwise.binary

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

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        output: Tensor = self._multiply_add(x, residual, self._weight, self._bias, "add")
        return output


class DenseWeight:
    """A weight as torch stores it, for GPUs."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        # In place: out of place, torch first copies the residual, a kernel more for each of a layer's two products.
        return (residual if self._bias is None else residual + self._bias).addmm_(x, self._weight.T)


class SideBySideWeight:
    """Weights with the same input that cannot be one matrix: the same product, one after the other."""

    def __init__(self, parts: list[Weight]) -> None:
        self.parts = parts

    def multiply(self, x: Tensor) -> Tensor:
        return torch.cat([part.multiply(x) for part in self.parts], dim=-1)

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.multiply(x) + residual


class RowParallelWeight:
    """A weight of which this rank holds a part of the inputs. The ranks' products are added up."""

    def __init__(self, part: Weight, group: RankGroup) -> None:
        """`part` has a bias on rank 0 only."""
        self._part, self._group = part, group

    def multiply(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._part.multiply(x))

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        # Rank 0's product includes the residual, and the other ranks leave it out.
        product = self._part.multiply(x) if self._group.rank else self._part.multiply_add(x, residual)
        return self._group.all_reduce(product)


def pack_for_cpu(matrix: Tensor | QuantizedTensor, bias: Tensor | None) -> Weight:
    """Prepare a weight for a CPU without C kernels: the LinearMethod of torch alone."""
    return PackedWeight(matrix, bias) if isinstance(matrix, Tensor) else DequantizingWeight(matrix, bias)


def prepare(method: LinearMethod, *linears: nn.Linear | QuantizedLinear) -> Weight:
    """Prepare the weights of linear layers with the same input, side by side: as one matrix where they can be one.

    Several quantized layers are released as soon as their matrices are one, so that memory holds two copies at most.
    """
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    bias = torch.cat(biases) if biases else None
    dense = [linear.weight.detach() for linear in linears if isinstance(linear, nn.Linear)]
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if not quantized:
        return method(torch.cat(dense) if len(dense) > 1 else dense[0], bias)
    if len(linears) == 1:  # not released: an embedding may look up rows in its matrix
        return method(quantized[0].matrix, bias)
    stacked = None if dense else stack_outputs([linear.matrix for linear in quantized])
    if stacked is None:
        return SideBySideWeight([prepare(method, linear) for linear in linears])
    for linear in quantized:
        linear.release()
    trim_heap()
    return method(stacked, bias)


class PackedLinear(nn.Module):
    """A linear layer, y = x W' + b, that multiplies by a prepared weight."""

    def __init__(self, linear: nn.Linear | QuantizedLinear, method: LinearMethod = pack_for_cpu) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        if isinstance(linear, nn.Linear):  # some routers of experts ask for its dtype
            self.weight = torch.empty_like(linear.weight, device="meta")
        self.prepared = prepare(method, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.prepared.multiply(x)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether the module computes what nn.Linear does: a subclass may compute something else."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and type(module).__name__ in SAME_AS_LINEAR)


def is_plain(module: nn.Module) -> bool:
    """Return whether the module is a linear layer that `prepare` takes."""
    return type(module) is QuantizedLinear or is_plain_linear(module)


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build of torch, and this processor, can pack weights of `dtype`."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack_linears(model: nn.Module, method: LinearMethod = pack_for_cpu) -> int:
    """Replace every plain linear layer and return how many; each weight is freed as soon as its copy is made."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | QuantizedLinear) and is_plain(child):
                setattr(parent, name, PackedLinear(child, method))
                num_packed += 1
    return num_packed
