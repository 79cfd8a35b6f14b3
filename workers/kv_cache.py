"""The KV pages: for each layer, keys and values by block and place in the block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Keys [num_blocks, block_size, num_kv_heads, key_dim] and values alike, one pair for each layer.

    Zeroed, not merely allocated: attention multiplies masked cells by zero, and zero times an uninitialised NaN is
    NaN. On the CPU the kernel hands out zero pages lazily, so the pool costs memory only as it is used.
    """

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

        def pages(num_kv_heads: int, head_dim: int) -> Tensor:
            return torch.zeros(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, device=device)

        self.keys = [pages(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [pages(layer.num_kv_heads, layer.value_dim) for layer in layers]

    def write(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [num_tokens, num_kv_heads, dim] at flat cells `slot_mapping` [num_tokens]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, values)

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Gather [num_rows, num_kv_heads, num_blocks * block_size, dim] for block tables [num_rows, num_blocks]."""
        keys = self.keys[layer][block_table].flatten(1, 2)
        values = self.values[layer][block_table].flatten(1, 2)
        return keys.transpose(1, 2), values.transpose(1, 2)


def kv_bytes_per_token(layers: list[LayerShape], dtype: torch.dtype) -> int:
    """What one token costs over all layers."""
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize
