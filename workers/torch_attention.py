"""The reference: attention in torch's own operations, on any device. It gathers pages before it attends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kv_cache import LayerShape, Shape
from workers.page_dtype import PageDtype
from workers.paged_step import HeadNorms, PagedStep, Rotation, Score, StepRows
from workers.staging import staged


@dataclass(slots=True)
class QueryGroup:
    """Rows of a step that compute equally many tokens (Q), so that they can attend as one tensor of B rows.

    Decodes of similar length are one group with Q = 1; a prefill chunk is usually a group of its own.
    """

    token_indices: Tensor  # [B, Q] where in the step's flat tokens the queries stand
    positions: Tensor  # [B, Q] their positions in their sequences
    block_table: Tensor  # [B, num_blocks] padded with any valid block
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, num_keys: int, window: int | None) -> Tensor:
        """[B, 1, Q, num_keys] true where a query may look: at itself and before, within the window if there is one.

        Padding needs no case of its own: padded cells stand at positions after every query.
        """
        if window not in self._masks:
            key_positions = torch.arange(num_keys, device=self.positions.device)
            distance = self.positions[:, None, :, None] - key_positions
            visible = distance >= 0
            self._masks[window] = visible if window is None else visible & (distance < window)
        return self._masks[window]


class TorchAttention:
    """Pages [num_blocks, block_size, num_kv_heads, dim], or in a byte each."""

    name = "torch"
    captures = False  # its groups are made on the host

    def __init__(self, pages: PageDtype) -> None:
        self.stored = pages.stored
        self._pages = pages

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        widths = map(self._pages.width, (layer.key_dim, layer.value_dim))
        key_shape, value_shape = ((block_size, layer.num_kv_heads, width) for width in widths)
        return key_shape, value_shape

    def prepare(self, rows: StepRows) -> list[QueryGroup]:
        """Group the rows by how many tokens they compute.

        Rows of a group are padded to its longest. So that one long sequence does not make all others as expensive as
        itself, only lengths of the same order of magnitude (in powers of two) come together.
        """
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for row, (num_queries, num_keys) in enumerate(zip(rows.num_queries, rows.num_keys, strict=True)):
            groups[int(num_queries), int(num_keys - 1).bit_length()].append(row)
        starts = np.cumsum(rows.num_queries) - rows.num_queries
        shaped = []
        for (num_queries, _), members in groups.items():
            within = np.arange(num_queries)
            token_indices = starts[members][:, None] + within
            positions = (rows.num_keys - rows.num_queries)[members][:, None] + within
            wanted = [np.array(members), token_indices, positions]
            chosen, at, positions_there = staged(wanted, rows.block_table.device)
            width = -(-int(rows.num_keys[members].max()) // rows.block_size)
            shaped.append(QueryGroup(at, positions_there, rows.block_table[chosen, :width]))
        return shaped

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, score: Score
    ) -> Tensor:
        cache, groups = step.cache, step.prepared
        all_pages = cache.keys[layer], cache.values[layer]
        for pages, new in zip(all_pages, (keys, values), strict=True):
            pages.flatten(0, 1).index_copy_(0, step.rows.slot_mapping, self._pages.encode(new))
        output = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for group in groups:
            gathered = (pages[group.block_table].flatten(1, 2).transpose(1, 2) for pages in all_pages)
            of_keys, of_values = (self._pages.decode(pages, queries.dtype) for pages in gathered)
            mask = group.mask(of_keys.shape[2], score.window)
            output[group.token_indices] = attend(queries[group.token_indices], of_keys, of_values, mask, score)
        return output

    def attend_rotated(
        self, step: PagedStep, layer: int, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, score: Score
    ) -> Tensor:
        shape = step.cache.layers[layer]
        heads = qkv.view(qkv.shape[0], -1, shape.key_dim)
        queries, keys, values = heads.tensor_split((-2 * shape.num_kv_heads, -shape.num_kv_heads), dim=1)
        if norms is not None:
            queries = F.rms_norm(queries, queries.shape[-1:], norms.query_weight, norms.epsilon)
            keys = F.rms_norm(keys, keys.shape[-1:], norms.key_weight, norms.epsilon)
        cosines, sines = (each[:, None] for each in rotation)
        queries, keys = (heads * cosines + _turned(heads) * sines for heads in (queries, keys))
        return self.attend(step, layer, queries, keys, values, score).flatten(1)


def _turned(heads: Tensor) -> Tensor:
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, score: Score) -> Tensor:
    """Grouped-query attention; [B, Q, num_heads, head_dim] against [B, num_kv_heads, L, dim] gives [B, Q, heads, dim].

    The heads that share a key head are laid out as further query rows of it, so that keys are never repeated.
    """
    num_rows, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_groups = num_heads // num_kv_heads
    folded = queries.view(num_rows, num_queries, num_kv_heads, num_groups, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_rows, num_kv_heads, num_groups * num_queries, head_dim)
    mask = mask.repeat(1, 1, num_groups, 1)
    if score.softcap is None and score.sinks is None:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=score.scale)
    else:
        output = _attend_explicitly(folded, keys, values, mask, score)
    output = output.view(num_rows, num_kv_heads, num_groups, num_queries, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, -1)


def _attend_explicitly(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, score: Score) -> Tensor:
    """The same with what torch's fused operation lacks: soft-capped scores (Gemma 2), attention sinks (gpt-oss)."""
    scores = torch.matmul(queries, keys.transpose(2, 3)).float() * score.scale
    if score.softcap is not None:
        scores = score.softcap * torch.tanh(scores / score.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if score.sinks is not None:
        # One more column that takes probability and gives nothing. Query rows run through the heads of a key head.
        num_rows, num_kv_heads, num_folded, _ = scores.shape
        per_head = score.sinks.float().view(num_kv_heads, -1, 1)
        column = per_head.expand(-1, -1, num_folded // per_head.shape[1]).reshape(1, num_kv_heads, num_folded, 1)
        scores = torch.cat([scores, column.expand(num_rows, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
