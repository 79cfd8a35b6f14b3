"""Continue sequences by a model's likeliest tokens on a CPU: all rounds in one call of continuation.c.

A small draft model computes a token in some ten microseconds. With a call for each round, the code around it takes ten
times as long, and the threads fall asleep between two calls.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionBackend
from workers.batch import SlotTable
from workers.csrc.bindings import MAX_CONTINUED_TOKENS, CLanguageModel, CSlotTable
from workers.kv_cache.pages import KVCache
from workers.layers.cpu_weight import CpuWeight
from workers.layers.fused_decoder import FusedDecoder
from workers.layers.linear import PackedLinear

# Of rotations whose frequencies are the same for all positions.
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
Span = tuple[int, int, int, int]  # a slot, the positions [start, stop) of its sequence, and the number of drafts


def make_continuation(
    decoder: Any, head: nn.Module, backend: AttentionBackend, cache: KVCache, table: SlotTable, num_choices: int
) -> GreedyContinuation | None:
    """Return the continuation by this model; None if C cannot compute all of it.

    The first `num_choices` outputs of the head are tokens that may be chosen.
    """
    is_fused = isinstance(decoder, FusedDecoder) and decoder.cpu_decoder is not None and decoder.last_norm is not None
    if not is_fused or not isinstance(backend, CpuAttention) or not isinstance(head, PackedLinear):
        return None
    embedding, weight, rotation = decoder.embed_tokens, head.prepared, decoder.rotary_emb
    is_plain = type(embedding) is nn.Embedding and decoder.embedding_factor == 1.0
    kind = getattr(rotation, "rope_type", None)  # of Gemma 3 and OLMo 3, a dict with one for each kind of layers
    is_fixed = isinstance(kind, str) and kind in FIXED_ROTATIONS
    is_known = is_plain and len(decoder.rotary.kinds) == 1 and is_fixed
    if not is_known or not isinstance(weight, CpuWeight) or weight.max_rows < MAX_CONTINUED_TOKENS:
        return None
    head_dim = 2 * len(rotation.inv_freq)
    has_one_rotation = all(layer.key_dim == head_dim for layer in cache.layers)
    if not has_one_rotation or decoder.cpu_decoder.max_tokens < MAX_CONTINUED_TOKENS:
        return None
    return GreedyContinuation(decoder, weight, backend, cache, table, min(num_choices, weight.num_outputs))


class GreedyContinuation:
    """One model over one cache. `table` has the tokens and blocks of the sequences."""

    max_tokens = MAX_CONTINUED_TOKENS  # of all spans of a call

    def __init__(
        self,
        decoder: FusedDecoder,
        head: CpuWeight,
        backend: CpuAttention,
        cache: KVCache,
        table: SlotTable,
        num_choices: int,
    ) -> None:
        """Take a model that `make_continuation` has checked, and allocate memory for intermediate results."""
        layers, embeddings = decoder.cpu_decoder, decoder.embed_tokens.weight.detach().contiguous()
        assert layers is not None and decoder.last_norm is not None
        norm, epsilon = decoder.last_norm
        frequencies = decoder.rotary_emb.inv_freq.float().contiguous()
        hidden_size, head_dim, num_rows = embeddings.shape[1], 2 * len(frequencies), self.max_tokens

        def rows_of(size: int) -> Tensor:
            return torch.empty(num_rows, size, dtype=embeddings.dtype)

        states, cosines, sines, logits = map(rows_of, (hidden_size, head_dim, head_dim, head.num_outputs))
        workspace = rows_of(layers.workspace_per_token)  # which holds a row of hidden_size, and more
        gemm_workspace = torch.empty(
            num_rows * max(layers.gemm_workspace_bytes, head.workspace_bytes), dtype=torch.uint8
        )
        block_tables = table.block_tables
        block_table = np.empty((num_rows, block_tables.shape[1]), dtype=np.int32)
        pages = layers.pages(backend, cache)
        self._model = CLanguageModel(
            layers=ctypes.addressof(layers.structs),
            pages=ctypes.addressof(pages),
            num_layers=len(pages),
            hidden_size=hidden_size,
            head_dim=head_dim,
            embeddings=embeddings.data_ptr(),
            num_embeddings=len(embeddings),
            frequencies=frequencies.data_ptr(),
            last_norm=norm.data_ptr(),
            head=head.address,
            num_choices=num_choices,
            largest_weight=max(layers.largest_weight, head.num_inputs * head.num_outputs),
            states=states.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            logits=logits.data_ptr(),
            block_table=block_table.ctypes.data,
            workspace=workspace.data_ptr(),
            gemm_workspace=gemm_workspace.data_ptr(),
            rotation_scale=decoder.rotary_emb.attention_scaling,
            last_norm_epsilon=epsilon,
        )
        self._table = CSlotTable(
            token_ids=table.token_ids.data_ptr(),
            block_tables=block_tables.ctypes.data,
            row_length=table.row_length,
            width=block_tables.shape[1],
            block_size=table.block_size,
        )
        self._continue = head.library.continue_greedily
        # C has only addresses.
        self._keeps_alive = (decoder, head, cache, table, embeddings, norm, frequencies, pages)
        self._memory = (states, cosines, sines, logits, workspace, gemm_workspace, block_table)

    def run(self, spans: list[Span]) -> list[list[int]]:
        """Compute the spans, and return as many likeliest tokens after each as it asks for.

        Spans are in descending order of their numbers of drafts. All drafts but the last have keys and values then.
        """
        numbers = [num_drafts for *_, num_drafts in spans]
        in_c = np.array(spans, dtype=np.int64)
        drafts = np.empty((len(spans), max(1, numbers[0])), dtype=np.int64)
        self._continue(
            ctypes.byref(self._model),
            ctypes.byref(self._table),
            in_c.ctypes.data,
            len(spans),
            drafts.ctypes.data,
            drafts.shape[1],
        )
        return [row[:number] for row, number in zip(drafts.tolist(), numbers, strict=True)]
