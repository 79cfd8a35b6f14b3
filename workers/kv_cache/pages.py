"""The KV cache of one device: for each layer, pages of keys and of values, by block."""

from __future__ import annotations

import math
from collections.abc import Callable
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


Shape = tuple[int, ...]
BlockShapes = Callable[[LayerShape, int], tuple[Shape, Shape]]  # (layer, block_size) -> shapes of its keys, its values


class KVCache:
    """Keys [num_blocks, ...] and values [num_blocks, ...], one pair for each layer.

    Each attention backend defines the layout of a block. Every cell is finite, always: attention multiplies masked
    cells by zero, and zero times infinity or NaN is NaN. Hence the pages begin as zeros, and backends store numbers
    that overflowed as zero. So an overflow affects only its own sequence, and not the next one that gets the block.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        block_shapes: BlockShapes,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.num_blocks = num_blocks
        self.block_size = block_size
        shapes = [block_shapes(layer, block_size) for layer in layers]
        self.keys = [_zeros((num_blocks, *keys), dtype, device) for keys, _ in shapes]
        self.values = [_zeros((num_blocks, *values), dtype, device) for _, values in shapes]

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in (*self.keys, *self.values))

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in every layer, for sequences that shared a block and will both write to it."""
        for pages in (*self.keys, *self.values):
            pages[targets] = pages[sources]


def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On the CPU they come from numpy, so that memory is taken page by page at first use.

    torch.zeros would write all of it now.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def bytes_per_block(layers: list[LayerShape], block_shapes: BlockShapes, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all layers."""
    shapes = [shape for layer in layers for shape in block_shapes(layer, block_size)]
    return sum(map(math.prod, shapes)) * dtype.itemsize
