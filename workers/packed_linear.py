"""Linear layers whose weights lie as oneDNN reads them.

torch's own lays a weight out anew in every call, or multiplies it as it lies, which for the few rows of a decode step
takes longer than reading it. Here it happens once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_ROWS = 32  # of a step that the layout is chosen for; one layout serves all sizes


class PackedLinear(nn.Module):
    """y = x W' + b, as the layer that it was made of."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), NUM_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return output


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch, and this processor, have what is needed."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def pack_linears(model: nn.Module) -> int:
    """Replace every plain linear layer; each weight is let go as soon as its copy is made. Returns how many."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:  # what is derived from it may mean something else
                setattr(parent, name, PackedLinear(child))
                num_packed += 1
    return num_packed
