"""The KV pages: for each layer, keys and values by block and place in the block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
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

    Every cell is finite, always: attention multiplies masked cells by zero, and zero times infinity or NaN is NaN.
    Hence the pages begin as zeros, and what overflowed in one sequence is stored as zero, where it can hurt only
    itself; stored as it is, it would spoil whoever gets the block next.
    """

    def __init__(
        self, layers: list[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size

        def pages(num_kv_heads: int, head_dim: int) -> Tensor:
            return _zeros((num_blocks, block_size, num_kv_heads, head_dim), dtype, device)

        self.keys = [pages(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self.values = [pages(layer.num_kv_heads, layer.value_dim) for layer in layers]

    def write(self, layer: int, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [num_tokens, num_kv_heads, dim] at flat cells `slot_mapping` [num_tokens]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slot_mapping, keys.nan_to_num(0.0, 0.0, 0.0))
        self.values[layer].flatten(0, 1).index_copy_(0, slot_mapping, values.nan_to_num(0.0, 0.0, 0.0))

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks, in every layer: two sequences shared a block until now and will both write to it."""
        for pages in (*self.keys, *self.values):
            pages[targets] = pages[sources]

    def read(self, layer: int, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Gather [num_rows, num_kv_heads, num_blocks * block_size, dim] for block tables [num_rows, num_blocks]."""
        keys = self.keys[layer][block_table].flatten(1, 2)
        values = self.values[layer][block_table].flatten(1, 2)
        return keys.transpose(1, 2), values.transpose(1, 2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU from numpy, so that memory is taken as it is used, where torch would fill all of it now."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def kv_bytes_per_token(layers: list[LayerShape], dtype: torch.dtype) -> int:
    """What one token costs over all layers."""
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize
