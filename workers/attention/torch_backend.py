"""Compute attention by torch's operations on any device: the reference backend. It gathers the pages first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.attention.interface import AttentionMetadata, AttentionParams, HeadNorms, PagedStep, Rotation
from workers.device.transfer import to_device
from workers.kv_cache.kv_quantization import PageFormat
from workers.kv_cache.pages import LayerShape, Shape


@dataclass(slots=True)
class QueryGroup:
    """B sequences of a step that compute the same number of tokens (Q), so that they attend as one batch.

    Decodes of similar length are one group with Q = 1; a prefill chunk is usually a group of its own.
    """

    token_indices: Tensor  # [B, Q] the indices of the queries among the step's flat tokens
    positions: Tensor  # [B, Q] their positions in their sequences
    block_table: Tensor  # [B, num_blocks] padded with any valid block
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, num_keys: int, window: int | None) -> Tensor:
        """Return [B, 1, Q, num_keys], true for keys that a query sees: its own and earlier ones, within the window.

        Padding needs no special case: padded cells are at positions after every query.
        """
        if window not in self._masks:
            key_positions = torch.arange(num_keys, device=self.positions.device)
            distance = self.positions[:, None, :, None] - key_positions
            visible = distance >= 0
            self._masks[window] = visible if window is None else visible & (distance < window)
        return self._masks[window]


class TorchAttention:
    """Pages [num_blocks, block_size, num_kv_heads, width] in any page format, decoded before they are used."""

    name = "torch"
    supports_cuda_graphs = False  # its groups are made on the host

    def __init__(self, pages: PageFormat) -> None:
        self.page_dtype = pages.dtype
        self._pages = pages

    def block_shapes(self, layer: LayerShape, block_size: int) -> tuple[Shape, Shape]:
        widths = map(self._pages.width, (layer.key_dim, layer.value_dim))
        key_shape, value_shape = ((block_size, layer.num_kv_heads, width) for width in widths)
        return key_shape, value_shape

    def prepare(self, metadata: AttentionMetadata) -> list[QueryGroup]:
        """Group the sequences by the number of tokens that they compute.

        Sequences are padded to the longest of their group. Only sequences whose lengths have the same power of two
        share a group; otherwise one long sequence would make all others as expensive as itself.
        """
        groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for sequence, (num_queries, num_keys) in enumerate(zip(metadata.num_queries, metadata.num_keys, strict=True)):
            groups[int(num_queries), int(num_keys - 1).bit_length()].append(sequence)
        starts = np.cumsum(metadata.num_queries) - metadata.num_queries
        query_groups = []
        for (num_queries, _), members in groups.items():
            within = np.arange(num_queries)
            token_indices = starts[members][:, None] + within
            positions = (metadata.num_keys - metadata.num_queries)[members][:, None] + within
            on_host = [np.array(members), token_indices, positions]
            chosen, indices, device_positions = to_device(on_host, metadata.block_table.device)
            width = -(-int(metadata.num_keys[members].max()) // metadata.block_size)
            query_groups.append(QueryGroup(indices, device_positions, metadata.block_table[chosen, :width]))
        return query_groups

    def attend(
        self, step: PagedStep, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        cache, groups = step.cache, step.prepared
        all_pages = cache.keys[layer], cache.values[layer]
        scales = cache.key_scales[layer], cache.value_scales[layer]
        for pages, new, of_heads in zip(all_pages, (keys, values), scales, strict=True):
            pages.flatten(0, 1).index_copy_(0, step.metadata.slot_mapping, self._pages.encode(new, of_heads))
        output = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for group in groups:
            gathered = (pages[group.block_table].flatten(1, 2).transpose(1, 2) for pages in all_pages)
            seen_keys, seen_values = (self._pages.decode(pages, queries.dtype) for pages in gathered)
            mask = group.mask(seen_keys.shape[2], params.window)
            output[group.token_indices] = attend(queries[group.token_indices], seen_keys, seen_values, mask, params)
        return output

    def rotate_and_attend(
        self,
        step: PagedStep,
        layer: int,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        params: AttentionParams,
    ) -> Tensor:
        shape = step.cache.layers[layer]
        heads = qkv.view(qkv.shape[0], -1, shape.key_dim)
        queries, keys, values = heads.tensor_split((-2 * shape.num_kv_heads, -shape.num_kv_heads), dim=1)
        if norms is not None:
            queries, keys = _norm(queries, norms.query_weight, norms), _norm(keys, norms.key_weight, norms)
        queries, keys = _rotate(queries, rotation), _rotate(keys, rotation)
        return self.attend(step, layer, queries, keys, values, params).flatten(1)


def _norm(heads: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
    """Normalise heads [num_tokens, num_heads, head_dim], each by itself or all of a token together."""
    numbers = heads.flatten(1).float() if norms.spans_heads else heads.float()
    return F.rms_norm(numbers, weight.shape, weight, norms.epsilon).to(heads.dtype).view_as(heads)


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first dimensions of heads [num_tokens, num_heads, head_dim], as many as there are cosines."""
    cosines, sines = (each[:, None] for each in rotation)
    rotated, others = heads.tensor_split((cosines.shape[-1],), dim=-1)
    return torch.cat([rotated * cosines + _rotate_half(rotated) * sines, others], dim=-1)


def _rotate_half(heads: Tensor) -> Tensor:
    """Return (-b, a) for heads (a, b), as transformers rotates them."""
    low, high = heads.chunk(2, dim=-1)
    return torch.cat([-high, low], dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams) -> Tensor:
    """Compute grouped-query attention.

    queries: [B, Q, num_heads, key_dim]; keys: [B, num_kv_heads, L, key_dim]; values: [B, num_kv_heads, L, value_dim];
    mask: [B, 1, Q, L]. Returns [B, Q, num_heads, value_dim]. The heads that share a key head are further query rows of
    it, so that keys are never repeated.
    """
    num_rows, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_groups = num_heads // num_kv_heads
    folded = queries.view(num_rows, num_queries, num_kv_heads, num_groups, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_rows, num_kv_heads, num_groups * num_queries, head_dim)
    mask = mask.repeat(1, 1, num_groups, 1)
    if params.softcap is None and params.sinks is None:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=params.scale)
    else:
        output = _attend_step_by_step(folded, keys, values, mask, params)
    output = output.view(num_rows, num_kv_heads, num_groups, num_queries, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, -1)


def _attend_step_by_step(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, params: AttentionParams
) -> Tensor:
    """Attend with what torch's fused operation lacks: soft-capped scores (Gemma 2), attention sinks (gpt-oss)."""
    scores = torch.matmul(queries, keys.transpose(2, 3)).float() * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if params.sinks is not None:
        # One more column, which takes probability and has no value. Query rows run through the heads of a key head.
        num_rows, num_kv_heads, num_folded, _ = scores.shape
        per_head = params.sinks.float().view(num_kv_heads, -1, 1)
        column = per_head.expand(-1, -1, num_folded // per_head.shape[1]).reshape(1, num_kv_heads, num_folded, 1)
        scores = torch.cat([scores, column.expand(num_rows, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)
