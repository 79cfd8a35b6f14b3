"""Steps for attention alone: rows over pages that hold random numbers and lie anywhere, and their exact answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.kv_cache import KVCache, LayerShape
from workers.page_dtype import PlainPages
from workers.paged_step import PagedAttention, PagedStep, Score, StepRows
from workers.torch_attention import TorchAttention


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a layer."""

    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def layer(self) -> LayerShape:
        return LayerShape(self.num_kv_heads, self.dim, self.dim)


@dataclass(frozen=True, slots=True)
class Case:
    """One step's share of a layer."""

    step: PagedStep
    queries: Tensor  # [num_tokens, num_heads, dim]
    keys: Tensor  # [num_tokens, num_kv_heads, dim]
    values: Tensor
    score: Score

    def attend(self) -> Tensor:
        return self.step.attention.attend(self.step, 0, self.queries, self.keys, self.values, self.score)

    def look(self) -> Tensor:
        """Without storing keys and values first, where that can be had by itself."""
        look = getattr(self.step.attention, "look", None)
        return self.attend() if look is None else look(self.step, 0, self.queries, self.score)

    def exact(self) -> Tensor:
        """The same by torch's own operations in float64, over a copy of the pages."""
        plain, layer, old = TorchAttention(PlainPages(torch.float64)), self.step.cache.layers[0], self.step.cache
        assert self.step.attention.block_shapes(layer, old.block_size) == plain.block_shapes(layer, old.block_size)
        sizes = (old.num_blocks, old.block_size, torch.float64, self.queries.device)
        cache = KVCache([layer], plain.block_shapes, *sizes)
        cache.keys[0].copy_(old.keys[0])
        cache.values[0].copy_(old.values[0])
        step = PagedStep(plain, cache, self.step.rows)
        return plain.attend(step, 0, *(each.double() for each in (self.queries, self.keys, self.values)), self.score)


def make_case(
    attention: PagedAttention,
    heads: Heads,
    rows: list[tuple[int, int]],
    score: Score,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Rows of (new tokens, keys)."""
    widths = [-(-num_keys // block_size) for _, num_keys in rows]
    cache = KVCache([heads.layer], attention.block_shapes, sum(widths), block_size, dtype, device)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    blocks = iter(torch.randperm(sum(widths)).tolist())
    table = torch.zeros(len(rows), max(widths), dtype=torch.int32)
    cells: list[int] = []
    for row, (new, num_keys) in enumerate(rows):
        own = [next(blocks) for _ in range(widths[row])]
        table[row, : len(own)] = torch.tensor(own)
        cells += [own[p // block_size] * block_size + p % block_size for p in range(num_keys - new, num_keys)]
    num_queries, num_keys = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), num_queries.cumsum(0)]).int()
    on_device = (each.to(device) for each in (starts, num_keys.int(), table, torch.tensor(cells)))
    step = PagedStep(attention, cache, StepRows(block_size, num_queries.numpy(), num_keys.numpy(), *on_device))
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    queries, keys, values = (
        torch.randn(len(cells), count, heads.dim, device=device, dtype=torch.float32).to(dtype) for count in counts
    )
    return Case(step, queries, keys, values, score)
