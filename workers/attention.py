"""Attention over KV pages, as a function that transformers' own layers call.

Every model that goes through transformers' AttentionInterface hands its queries, keys and values to the function
registered here. It stores keys and values in the pages of the step at hand, which travels along as a keyword
argument, and lets each query look at its own sequence's pages. The models' code stays as it is.

This is the torch reference: it gathers pages before it attends, and runs on any device. On a CPU, rows of one query
have something better (decode_attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from workers.decode_attention import DecodeAttention
from workers.kv_cache import KVCache

PAGED_ATTENTION = "servekit_paged"


@dataclass(slots=True)
class QueryGroup:
    """Rows of a step that compute equally many tokens (Q), so that they can attend as one tensor of B rows.

    Decodes of similar length are one group with Q = 1; a prefill chunk is usually a group of its own.
    """

    token_indices: Tensor  # [B, Q] where in the step's flat tokens the queries stand
    positions: Tensor  # [B, Q] their positions in their sequences
    block_table: Tensor  # [B, num_blocks] padded with any valid block
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        return self.token_indices.shape[1] == 1

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


@dataclass(slots=True)
class PagedStep:
    """What attention needs to know of a step: where new keys go, and who looks at which pages."""

    cache: KVCache
    slot_mapping: Tensor  # [num_tokens] flat cell for each new key
    groups: list[QueryGroup]
    decode: DecodeAttention | None = None  # for rows of one query, where there is one


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend each query to its sequence's pages, the newly written ones included.

    query: [1, num_heads, num_tokens, head_dim]; key, value: [1, num_kv_heads, num_tokens, dim].
    Returns [1, num_tokens, num_heads, value_dim]. Writes the step's cells of `paged.cache`.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    paged.cache.write(layer, paged.slot_mapping, key[0].transpose(0, 1), value[0].transpose(0, 1))
    queries = query[0].transpose(0, 1).contiguous()  # [num_tokens, num_heads, head_dim]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    output = queries.new_empty(*queries.shape[:2], value.shape[-1])
    keys, values = paged.cache.keys[layer], paged.cache.values[layer]
    decode = paged.decode if paged.decode is not None and paged.decode.takes(queries, keys, values) else None
    for group in paged.groups:
        if decode is not None and group.is_decode:
            where = (group.token_indices, group.block_table, group.positions)
            decode(queries, keys, values, *where, output, scale, sliding_window, softcap, s_aux)
            continue
        of_rows = paged.cache.read(layer, group.block_table)
        mask = group.mask(of_rows[0].shape[2], sliding_window)
        output[group.token_indices] = attend(queries[group.token_indices], *of_rows, mask, scale, softcap, s_aux)
    return output[None], None


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention; [B, Q, num_heads, head_dim] against [B, num_kv_heads, L, dim] gives [B, Q, heads, dim].

    The heads that share a key head are laid out as further query rows of it, so that keys are never repeated.
    """
    num_rows, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    num_groups = num_heads // num_kv_heads
    folded = queries.view(num_rows, num_queries, num_kv_heads, num_groups, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(num_rows, num_kv_heads, num_groups * num_queries, head_dim)
    mask = mask.repeat(1, 1, num_groups, 1)
    if softcap is None and sinks is None:
        output = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        output = _attend_explicitly(folded, keys, values, mask, scale, softcap, sinks)
    output = output.view(num_rows, num_kv_heads, num_groups, num_queries, -1).permute(0, 3, 1, 2, 4)
    return output.reshape(num_rows, num_queries, num_heads, -1)


def _attend_explicitly(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with what the fused kernel lacks: soft-capped scores (Gemma 2), attention sinks (gpt-oss)."""
    scores = torch.matmul(queries, keys.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # One more column that takes probability and gives nothing. Query rows run through the heads of a key head.
        num_rows, num_kv_heads, num_folded, _ = scores.shape
        per_head = sinks.float().view(num_kv_heads, -1, 1)
        column = per_head.expand(-1, -1, num_folded // per_head.shape[1]).reshape(1, num_kv_heads, num_folded, 1)
        scores = torch.cat([scores, column.expand(num_rows, -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return torch.matmul(weights.to(values.dtype), values)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
# Who may look where is ours to say, from positions and pages; a dense mask would be built for nothing.
AttentionMaskInterface.register(PAGED_ATTENTION, lambda *_, **__: None)
