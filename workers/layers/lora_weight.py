"""Where adapters take part in a model: a weight with adapters, and linear layers that get theirs by a hook."""

from __future__ import annotations

import re

from torch import Tensor, nn

from workers.layers.linear import PackedLinear, Weight, is_plain
from workers.layers.quantized_linear import QuantizedLinear
from workers.lora.lora_linear import LoraLinear
from workers.lora.lora_pool import LoraPool

# Linear layers in a numbered layer that all of a step's tokens pass. A router chooses some of them for an expert.
_IN_LAYER = re.compile(r"(?:[\w]+\.)*\d+\.(?!.*experts\.).+")


class LoraWeight:
    """A prepared weight, and what the adapters of a step's rows add to its product."""

    def __init__(self, base: Weight, linear: LoraLinear) -> None:
        self.base, self.linear = base, linear

    def multiply(self, x: Tensor) -> Tensor:
        return self.linear.add(x, self.base.multiply(x))

    def multiply_add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.linear.add(x, self.base.multiply_add(x, residual))


def add_hooks(model: nn.Module, pool: LoraPool) -> None:
    """Let adapters change the linear layers that are modules still."""
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear | QuantizedLinear | PackedLinear)
        if is_linear and _IN_LAYER.fullmatch(name) and (isinstance(module, PackedLinear) or is_plain(module)):
            linear = pool.make_linear([name], module.in_features, [module.out_features])
            module.register_forward_hook(linear.hook)
