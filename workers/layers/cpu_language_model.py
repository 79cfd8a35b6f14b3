"""A whole model as one call of C, from the tokens of the slot table to logits (language_model.c).

While a step reads the weights, it drives the interpreter's code and data out of the caches. So each operation of Python
or torch after that takes several times as long as in a loop, and a step of few tokens has dozens of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from workers.attention.cpu_backend import CpuAttention
from workers.attention.interface import AttentionBackend
from workers.batch import SlotTable
from workers.csrc.bindings import MAX_STEP_TOKENS, CLanguageModel, CSlotTable
from workers.kv_cache.pages import KVCache
from workers.layers.cpu_weight import CpuWeight
from workers.layers.fused_decoder import FusedDecoder
from workers.layers.linear import PackedLinear
from workers.lora.lora_step import LoraStep

# Of rotations whose frequencies are the same for all positions.
FIXED_ROTATIONS = {"default", "linear", "llama3", "yarn"}
MIN_POSITIONS = 1024  # that have cosines and sines from the start
Span = tuple[int, int, int, int]  # a slot, positions [start, stop) of its sequence, and how many tokens are chosen


def make_cpu_language_model(
    decoder: Any, head: nn.Module, backend: AttentionBackend, cache: KVCache, table: SlotTable, num_choices: int
) -> CpuLanguageModel | None:
    """Return the model of this decoder and head; None if C cannot compute all of it.

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
    if not is_known or not isinstance(weight, CpuWeight) or weight.max_rows < MAX_STEP_TOKENS:
        return None
    if decoder.cpu_decoder.max_tokens < MAX_STEP_TOKENS:
        return None
    return CpuLanguageModel(decoder, weight, backend, cache, table, min(num_choices, weight.num_outputs))


class CpuLanguageModel:
    """One model over one cache. `table` has the tokens and blocks of the sequences."""

    max_tokens = MAX_STEP_TOKENS  # of all spans of a call

    def __init__(
        self,
        decoder: FusedDecoder,
        head: CpuWeight,
        backend: CpuAttention,
        cache: KVCache,
        table: SlotTable,
        num_choices: int,
    ) -> None:
        """Take a model that `make_cpu_language_model` has checked, and allocate memory for intermediate results."""
        layers, embeddings = decoder.cpu_decoder, decoder.embed_tokens.weight.detach().contiguous()
        assert layers is not None and decoder.last_norm is not None
        norm, epsilon = decoder.last_norm
        hidden_size, num_rows = embeddings.shape[1], self.max_tokens

        def rows_of(size: int) -> Tensor:
            return torch.empty(num_rows, size, dtype=embeddings.dtype)

        self._decoder, self._num_positions = decoder, 0
        rotary_dim = decoder.rotations(embeddings, torch.zeros(1, 1, dtype=torch.int64))[0][0].shape[-1]
        states, cosines, sines, self._logits = map(rows_of, (hidden_size, rotary_dim, rotary_dim, head.num_outputs))
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
            rotary_dim=rotary_dim,
            embeddings=embeddings.data_ptr(),
            num_embeddings=len(embeddings),
            last_norm=norm.data_ptr(),
            head=head.address,
            num_choices=num_choices,
            largest_weight=max(layers.largest_weight, head.num_inputs * head.num_outputs),
            states=states.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            logits=self._logits.data_ptr(),
            block_table=block_table.ctypes.data,
            workspace=workspace.data_ptr(),
            gemm_workspace=gemm_workspace.data_ptr(),
            last_norm_epsilon=epsilon,
        )
        self._table = CSlotTable(
            token_ids=table.token_ids.data_ptr(),
            block_tables=block_tables.ctypes.data,
            row_length=table.row_length,
            width=block_tables.shape[1],
            block_size=table.block_size,
        )
        self._compute_step, self._continue = head.library.compute_step, head.library.continue_greedily
        self._spans: NDArray[np.int64] = np.empty((num_rows, 4), dtype=np.int64)
        self._chosen: NDArray[np.int64] = np.empty(num_rows, dtype=np.int64)
        self._addresses = ctypes.addressof(self._model), ctypes.addressof(self._table)
        self._spans_address = self._spans.ctypes.data
        self._chosen_address = self._chosen.ctypes.data
        # C has only addresses.
        self._keeps_alive = (head, backend, cache, table, embeddings, norm, pages)
        self._memory = (states, cosines, sines, workspace, gemm_workspace, block_table)
        self._know_positions(min(MIN_POSITIONS, table.row_length))

    def choose(self, spans: list[Span], adapters: LoraStep | None = None) -> list[int]:
        """Compute the spans, and return the likeliest token after each of the last tokens of every span.

        Each span says how many these are. The table gets the likeliest tokens, too. `adapters` are those of the spans'
        tokens.
        """
        self._run(spans, adapters, self._chosen_address)
        chosen: list[int] = self._chosen[: _num_chosen(spans)].tolist()
        return chosen

    def logits(self, spans: list[Span], adapters: LoraStep | None = None) -> Tensor:
        """Compute the spans, and return the logits [number of tokens to choose, vocab_size] in float32. Choose none."""
        self._run(spans, adapters, None)
        return self._logits[: _num_chosen(spans)].to(torch.float32, copy=True)

    def _run(self, spans: list[Span], adapters: LoraStep | None, chosen_address: int | None) -> None:
        self._know_positions(max([stop for _, _, stop, _ in spans]))
        self._spans[: len(spans)] = spans
        adapters_address = None if adapters is None else adapters.address
        self._compute_step(*self._addresses, adapters_address, self._spans_address, len(spans), chosen_address)

    def continue_greedily(self, spans: list[Span]) -> list[list[int]]:
        """Compute the spans, and continue each one with as many tokens as it asks for, always with the likeliest.

        Spans are in descending order of these numbers. Afterwards all chosen tokens of a span but the last have keys
        and values.
        """
        numbers = [num_chosen for *_, num_chosen in spans]
        self._know_positions(max([stop + num_chosen for _, _, stop, num_chosen in spans]))
        self._spans[: len(spans)] = spans
        drafts = np.empty((len(spans), max(1, numbers[0])), dtype=np.int64)
        self._continue(*self._addresses, self._spans_address, len(spans), drafts.ctypes.data, drafts.shape[1])
        return [row[:number] for row, number in zip(drafts.tolist(), numbers, strict=True)]

    def _know_positions(self, num_positions: int) -> None:
        """Compute the cosines and sines of so many positions, and of more, unless they are known."""
        if num_positions <= self._num_positions:
            return
        self._num_positions = max(num_positions, 2 * self._num_positions)
        positions = torch.arange(self._num_positions)[None]
        with torch.inference_mode():
            (cosines, sines), *_ = self._decoder.rotations(self._logits, positions)
        self._rotation = cosines.contiguous(), sines.contiguous()
        self._model.all_cosines, self._model.all_sines = (each.data_ptr() for each in self._rotation)


def _num_chosen(spans: list[Span]) -> int:
    return sum([num_chosen for *_, num_chosen in spans])
