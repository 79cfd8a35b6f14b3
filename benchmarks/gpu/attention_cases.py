"""Steps for attention alone: sequences over scattered pages of random numbers, and their exact result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, PagedStep
from workers.attention.torch_backend import TorchAttention
from workers.kv_cache.kv_quantization import PlainPages
from workers.kv_cache.pages import KVCache, LayerShape


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer."""

    num_heads: int
    num_kv_heads: int
    dim: int

    @property
    def layer(self) -> LayerShape:
        return LayerShape(self.num_kv_heads, self.dim, self.dim)


@dataclass(frozen=True, slots=True)
class Case:
    """The attention of one layer in one step."""

    step: PagedStep
    queries: Tensor  # [num_tokens, num_heads, dim]
    keys: Tensor  # [num_tokens, num_kv_heads, dim]
    values: Tensor
    params: AttentionParams

    def attend(self) -> Tensor:
        return self.step.backend.attend(self.step, 0, self.queries, self.keys, self.values, self.params)

    def attend_to_pages(self) -> Tensor:
        """Attend without storing keys and values, if the backend can do that by itself."""
        attend = getattr(self.step.backend, "attend_to_pages", None)
        return self.attend() if attend is None else attend(self.step, 0, self.queries, self.params)

    def exact(self) -> Tensor:
        """Return the result of torch's operations in float64, over a copy of the pages."""
        plain, layer, old = TorchAttention(PlainPages(torch.float64)), self.step.cache.layers[0], self.step.cache
        assert self.step.backend.block_shapes(layer, old.block_size) == plain.block_shapes(layer, old.block_size)
        sizes = (old.num_blocks, old.block_size, torch.float64, self.queries.device)
        cache = KVCache([layer], plain.block_shapes, *sizes)
        cache.keys[0].copy_(old.keys[0])
        cache.values[0].copy_(old.values[0])
        step = PagedStep(plain, cache, self.step.metadata)
        return plain.attend(step, 0, self.queries.double(), self.keys.double(), self.values.double(), self.params)


def make_case(
    attention: AttentionBackend,
    heads: Heads,
    sequences: list[tuple[int, int]],
    params: AttentionParams,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Case:
    """Make a step of sequences with (new tokens, keys)."""
    widths = [-(-num_keys // block_size) for _, num_keys in sequences]
    cache = KVCache([heads.layer], attention.block_shapes, sum(widths), block_size, dtype, device)
    cache.keys[0].normal_()
    cache.values[0].normal_()
    blocks = iter(torch.randperm(sum(widths)).tolist())
    table = torch.zeros(len(sequences), max(widths), dtype=torch.int32)
    slots: list[int] = []
    for sequence, (new, num_keys) in enumerate(sequences):
        own = [next(blocks) for _ in range(widths[sequence])]
        table[sequence, : len(own)] = torch.tensor(own)
        slots += [own[p // block_size] * block_size + p % block_size for p in range(num_keys - new, num_keys)]
    num_queries, num_keys = (torch.tensor(column) for column in zip(*sequences, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), num_queries.cumsum(0)]).int()
    on_device = (each.to(device) for each in (starts, num_keys.int(), table, torch.tensor(slots)))
    step = PagedStep(attention, cache, AttentionMetadata(block_size, num_queries.numpy(), num_keys.numpy(), *on_device))
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    queries, keys, values = (
        torch.randn(len(slots), count, heads.dim, device=device, dtype=torch.float32).to(dtype) for count in counts
    )
    return Case(step, queries, keys, values, params)
