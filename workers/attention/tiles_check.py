"""Check at load that AMX tiles compute attention of prompts as vectors do. If not, let attention use vectors.

tiled_attention.c was written without a processor that has tiles. The self-check of the whole model would find wrong
results, too. But it would then refuse the model, which can be served with vectors.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionMetadata, AttentionParams, PagedStep
from workers.kv_cache.kv_quantization import PageFormat
from workers.kv_cache.pages import KVCache, LayerShape

log = logging.getLogger("servekit.worker")

# Of the prompt: more rows than a query group has, and seven tiles of keys, of which the last one is partly used.
NUM_TOKENS = 100
TOLERANCE = 0.02  # relative, of each head of a token; both ways round their results to bfloat16, by up to 0.004
_CPU = torch.device("cpu")
# The kinds of layers that passed, each by all that decides its attention. A worker chooses its backend several times.
_checked: set[tuple[object, ...]] = set()


def disable_wrong_tiles(
    library: ctypes.CDLL,
    layers: Iterable[tuple[LayerShape, AttentionParams]],
    dtype: torch.dtype,
    pages: PageFormat,
    block_size: int,
) -> None:
    """Let no layer of the process use tiles if they give other results than vectors for one of `layers`; log that."""
    for shape, params in layers:
        kind = (shape, params.scale, params.window, params.softcap, params.sinks is None, dtype, pages.name, block_size)
        if kind in _checked:
            continue
        attention = CpuAttention(library, dtype, pages)  # keeps parameters by the layer's number, which is 0 here
        distance = _distance_of_tiles(attention, shape, params, dtype, block_size)
        if not distance <= TOLERANCE:  # NaN fails, too
            log.warning(
                "attention of prompts uses vectors, because AMX tiles give other results here "
                "(relative distance: %.2g)",
                distance,
            )
            return
        _checked.add(kind)


def _distance_of_tiles(
    attention: CpuAttention, shape: LayerShape, params: AttentionParams, dtype: torch.dtype, block_size: int
) -> float:
    """Return the largest relative distance of a head's results by tiles from those by vectors.

    Returns 0 if the layer uses no tiles. Afterwards tiles are allowed only if the distance is at most TOLERANCE.
    """
    num_heads = shape.num_kv_heads if params.sinks is None else len(params.sinks)
    num_blocks = -(-NUM_TOKENS // block_size)
    cache = KVCache([shape], attention.block_shapes, num_blocks, block_size, attention.page_dtype, _CPU)
    if not attention.uses_tiles(cache, 0, num_heads, params):
        return 0.0
    generator = torch.Generator().manual_seed(0)
    sizes = (num_heads, shape.key_dim), (shape.num_kv_heads, shape.key_dim), (shape.num_kv_heads, shape.value_dim)
    queries, keys, values = (torch.randn(NUM_TOKENS, *size, generator=generator).to(dtype) for size in sizes)

    def attend() -> Tensor:
        step = PagedStep(attention, cache, _one_prompt(num_blocks, block_size))
        return attention.attend(step, 0, queries, keys, values, params).float()

    by_tiles = attend()
    attention.allow_tiles(False)
    by_vectors = attend()
    distance = float(((by_tiles - by_vectors).norm(dim=-1) / by_vectors.norm(dim=-1)).max())
    attention.allow_tiles(distance <= TOLERANCE)
    return distance


def _one_prompt(num_blocks: int, block_size: int) -> AttentionMetadata:
    """Return a step with one prompt, whose blocks do not follow each other in memory."""
    table = torch.arange(num_blocks - 1, -1, -1, dtype=torch.int32)
    positions = torch.arange(NUM_TOKENS)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    counts = np.array([NUM_TOKENS])
    starts, lengths = torch.tensor([0, NUM_TOKENS], dtype=torch.int32), torch.tensor([NUM_TOKENS], dtype=torch.int32)
    return AttentionMetadata(block_size, counts, counts, starts, lengths, table[None], slots)
