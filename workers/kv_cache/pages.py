"""The KV cache of one device: for each layer, pages of keys and of values, by block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer stores for a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    # By head: the scales of codes, from the checkpoint. None: each vector has its own (see kv_quantization.py).
    key_scales: tuple[float, ...] | None = None
    value_scales: tuple[float, ...] | None = None


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
        # [num_kv_heads] float32 where the checkpoint has them
        self.key_scales = [_on_device(layer.key_scales, device) for layer in layers]
        self.value_scales = [_on_device(layer.value_scales, device) for layer in layers]

    @property
    def num_bytes(self) -> int:
        return sum(pages.nbytes for pages in (*self.keys, *self.values))

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in every layer, for sequences that shared a block and will both write to it."""
        for pages in (*self.keys, *self.values):
            pages[targets] = pages[sources]


def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On the CPU they come from numpy, so that memory is taken page by page at first use.

    torch.zeros would write all of it now. They begin with a cache line: a vector that lies in two is read twice.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + CACHE_LINE_BYTES, dtype=np.uint8)
    first = -memory.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def _on_device(scales: tuple[float, ...] | None, device: torch.device) -> Tensor | None:
    return None if scales is None else torch.tensor(scales, dtype=torch.float32, device=device)


def bytes_per_block(layers: list[LayerShape], block_shapes: BlockShapes, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes that one block takes over all layers, scales included."""
    shapes = [shape for layer in layers for shape in block_shapes(layer, block_size)]
    return sum(map(math.prod, shapes)) * dtype.itemsize
