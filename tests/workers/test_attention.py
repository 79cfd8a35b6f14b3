"""Claims about paged attention, against a softmax written out over a sequence's own keys."""

from __future__ import annotations

import itertools

import pytest
import torch

from workers.attention import PagedStep, QueryGroup, paged_attention
from workers.kv_cache import KVCache, LayerShape

NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 2, 8, 4


class Layer(torch.nn.Module):
    layer_idx = 0


def naive(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Whole sequences, one head at a time: queries [T, H, D], keys and values [T, kv_heads, D]."""
    num_tokens, num_heads, head_dim = queries.shape
    output = torch.empty(num_tokens, num_heads, head_dim)
    for head, position in itertools.product(range(num_heads), range(num_tokens)):
        first = 0 if window is None else max(0, position - window + 1)
        kv_head = head * NUM_KV_HEADS // num_heads
        scores = keys[first : position + 1, kv_head] @ queries[position, head] * head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1]])
        weights = torch.softmax(scores, 0)[: position + 1 - first]
        output[position, head] = weights @ values[first : position + 1, kv_head]
    return output


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_paged_chunks_give_the_naive_softmax(
    window: int | None, softcap: float | None, with_sinks: bool, num_groups: int
) -> None:
    """Three sequences in scattered blocks; a first step, then one that mixes decodes and a chunk."""
    torch.manual_seed(0)
    num_heads = NUM_KV_HEADS * num_groups
    sinks = torch.randn(num_heads) if with_sinks else None
    lengths, tables = [9, 6, 11], [[7, 2, 5], [0, 9], [3, 8, 1]]
    cache = KVCache([LayerShape(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM)], 10, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    sequences = [
        (torch.randn(n, num_heads, HEAD_DIM), *torch.randn(2, n, NUM_KV_HEADS, HEAD_DIM).unbind(0)) for n in lengths
    ]
    outputs = [torch.empty(n, num_heads, HEAD_DIM) for n in lengths]
    for spans in [[(0, 8), (0, 5), (0, 4)], [(8, 9), (5, 6), (4, 11)]]:
        groups, cells, first = [], [], 0
        for (start, stop), table in zip(spans, tables, strict=True):
            cells += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]
        offsets = [0, *itertools.accumulate(stop - start for start, stop in spans)]
        for size in {stop - start for start, stop in spans}:
            rows = [i for i, (start, stop) in enumerate(spans) if stop - start == size]
            indices = torch.tensor([[offsets[i] + j for j in range(size)] for i in rows])
            positions = torch.tensor([[spans[i][0] + j for j in range(size)] for i in rows])
            padded = torch.tensor([(tables[i] + [6, 6])[:3] for i in rows])
            groups.append(QueryGroup(indices, positions, padded))
        flat = [
            torch.cat([sequence[k][start:stop] for sequence, (start, stop) in zip(sequences, spans, strict=True)])
            for k in range(3)
        ]
        result, _ = paged_attention(
            Layer(),
            *(tensor.transpose(0, 1)[None] for tensor in flat),
            None,
            paged=PagedStep(cache, torch.tensor(cells), groups),
            sliding_window=window,
            softcap=softcap,
            s_aux=sinks,
        )
        for i, (start, stop) in enumerate(spans):
            outputs[i][start:stop] = result[0, first : first + stop - start]
            first += stop - start
    for output, sequence in zip(outputs, sequences, strict=True):
        torch.testing.assert_close(output, naive(*sequence, window, softcap, sinks), rtol=1e-5, atol=1e-5)
