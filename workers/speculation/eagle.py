"""Draft with a head that continues the model's hidden states: EAGLE-3, and the MTP layer of a checkpoint.

A head is one decoder layer. For position p it reads the model's hidden states at p and the token at p + 1, and returns
what stands for the hidden states at p + 1. So the token at p + 2 can be guessed from it, and the head can go on with
its own output. Its keys and values are in pages of their own, in blocks with the same numbers as the model's.

For each position that the model computes, the head computes its own, from the model's hidden states and the token that
the model chose. So what it keeps of accepted drafts is replaced by what the model knows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from servekit.protocol.messages import LoadModel, StepPlan
from servekit.protocol.speculative_config import MAX_DRAFTS
from workers.attention.interface import AttentionBackend, AttentionMetadata, AttentionParams, PagedStep
from workers.attention.selector import choose_attention
from workers.batch import Batch, Indices
from workers.device.memory import allocation_refused_as
from workers.device.transfer import to_device
from workers.kv_cache.pages import KVCache, LayerShape, bytes_per_block
from workers.loading.model_manager import LoadedModel
from workers.speculation.drafter import Drafter, DraftRequest, HiddenStates, Target
from workers.speculation.eagle_head import load_eagle3_head
from workers.speculation.mtp_head import load_mtp_head

NO_POSITION = -1


class Head(Protocol):
    """One decoder layer that continues hidden states."""

    layers: tuple[int, ...]  # of the model, whose inputs it reads; none: it reads what the output head reads
    hidden_size: int
    kv_shape: LayerShape
    attention_params: AttentionParams

    def fuse(self, hidden_states: Tensor) -> Tensor:
        """Return [num_tokens, hidden_size] for the model's hidden states of the layers, side by side."""
        ...

    def forward(self, token_ids: Tensor, hidden_states: Tensor, position_ids: Tensor, paged: PagedStep) -> Tensor:
        """Return what stands for the hidden states of the next positions; see Eagle3Head."""
        ...

    def predict(self, hidden_states: Tensor) -> Tensor:
        """Return the most probable token after each row of what `forward` returned."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """A head that is loaded, before its keys and values have memory."""

    head: Head
    loaded: LoadedModel  # the model that it belongs to
    attention: AttentionBackend
    bytes_per_block: int

    @classmethod
    def of(cls, head: Head, loaded: LoadedModel, settings: LoadModel) -> LoadedHead:
        """Choose how the head attends. Its pages have the model's data type, also if the model's pages are rounded."""
        shapes, block_size = [head.kv_shape], settings.block_size
        attention = choose_attention(loaded.device, loaded.dtype, shapes, [head.attention_params], block_size)
        num_bytes = bytes_per_block(shapes, attention.block_shapes, block_size, attention.page_dtype)
        return cls(head, loaded, attention, num_bytes)

    def make_drafter(self, target: Target) -> EagleDrafter:
        """Return the drafter, with as many blocks as the model has. Raises ConfigError if they do not fit."""
        return EagleDrafter(self, target)


class EagleDrafter(Drafter):
    """Drafts a chain of tokens for each sequence with a head."""

    def __init__(self, loaded_head: LoadedHead, target: Target) -> None:
        """Allocate the head's keys and values, one layer's. Raises ConfigError if they do not fit into memory."""
        self._head = head = loaded_head.head
        self._attention, self._table = loaded_head.attention, target.table
        device, dtype, blocks = target.loaded.device, target.loaded.dtype, target.cache
        self.hidden_states = HiddenStates(of_all_tokens=True, layers=head.layers)
        cache_bytes = blocks.num_blocks * loaded_head.bytes_per_block
        remedy = "lower --kv-cache-memory-bytes or --num-kv-blocks"
        with allocation_refused_as(f"the drafter's KV cache of {cache_bytes:,} bytes", device, remedy):
            self._cache = KVCache(
                [head.kv_shape],
                self._attention.block_shapes,
                blocks.num_blocks,
                blocks.block_size,
                self._attention.page_dtype,
                device,
            )
        num_slots = len(self._table.num_blocks)
        # What the head returned in the slot's last step, for position p at p % width; and which positions it is for.
        self._width = MAX_DRAFTS + 1
        self._returned = torch.zeros(num_slots * self._width, head.hidden_size, dtype=dtype, device=device)
        self._first_returned: Indices = np.zeros(num_slots, dtype=np.int64)
        self._last_returned: Indices = np.full(num_slots, NO_POSITION, dtype=np.int64)
        # The model's hidden states of the last position of a chunk that ends within the prompt, whose next token is
        # known with the next chunk.
        self._waiting = torch.zeros(num_slots, head.hidden_size, dtype=dtype, device=device)
        self._waiting_position: Indices = np.full(num_slots, NO_POSITION, dtype=np.int64)

    def begin(self, plan: StepPlan) -> None:
        if plan.copies:
            self._cache.copy_blocks(*to_device(list(np.array(plan.copies).T), self._returned.device))
        for assignment in plan.slot_assignments:
            self._last_returned[assignment.slot] = self._waiting_position[assignment.slot] = NO_POSITION

    def observe(self, batch: Batch, hidden_states: Tensor) -> None:
        """Compute the head for each token of the step. After a rejected draft, the next step computes it again."""
        slots, metadata = batch.slots, batch.attention
        begins = metadata.num_keys - metadata.num_queries
        self._compute_waiting(slots, begins)
        states = self._head.fuse(hidden_states)
        positions = np.arange(len(states)) + (begins - metadata.num_queries.cumsum() + metadata.num_queries).repeat(
            metadata.num_queries
        )
        next_cells = self._cells(slots.repeat(metadata.num_queries), positions + 1)
        returned = self._forward(next_cells, states, batch.position_ids, metadata)
        self._keep(batch, slots, metadata.num_keys, states, returned)

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = [()] * len(requests)
        # Those that want most drafts first, so that each pass continues the first rows of the one before.
        order = sorted(range(len(requests)), key=lambda index: -requests[index].max_drafts)
        slots = np.array([requests[index].slot for index in order])
        newest = np.array([requests[index].num_tokens - 1 for index in order])
        is_known = (self._first_returned[slots] <= newest - 1) & (newest - 1 <= self._last_returned[slots])
        order = [index for index, known in zip(order, is_known, strict=True) if known]
        if not order:
            return drafts
        slots, newest = slots[is_known], newest[is_known]
        wanted = np.array([requests[index].max_drafts for index in order])
        (rows,) = to_device([slots * self._width + (newest - 1) % self._width], self._returned.device)
        states = self._returned[rows]
        passes = [self._head.predict(states)]
        for length in range(1, int(wanted[0])):
            num_rows = int((wanted > length).sum())
            states = self._continue(slots[:num_rows], newest[:num_rows] - 1 + length, passes[-1], states[:num_rows])
            passes.append(self._head.predict(states))
        token_ids = iter(torch.cat(passes).tolist())
        chains: list[list[int]] = [[] for _ in order]
        for made in passes:
            for row in range(len(made)):
                chains[row].append(next(token_ids))
        for index, chain in zip(order, chains, strict=True):
            drafts[index] = tuple(chain)
        return drafts

    def _compute_waiting(self, slots: Indices, begins: Indices) -> None:
        """Compute the last position of each chunk before these ones that waited for its next token."""
        positions = self._waiting_position[slots]
        chosen = (positions != NO_POSITION) & (positions == begins - 1)
        if not chosen.any():
            return
        slots, positions = slots[chosen], positions[chosen]
        position_ids, metadata = self._single_tokens(slots, positions)
        (rows,) = to_device([slots], self._waiting.device)
        self._forward(self._cells(slots, positions + 1), self._waiting[rows], position_ids, metadata)

    def _continue(self, slots: Indices, positions: Indices, token_ids: Tensor, states: Tensor) -> Tensor:
        """Compute the head at one position of each slot from drafts and from what it returned for them."""
        position_ids, metadata = self._single_tokens(slots, positions)
        paged = PagedStep(self._attention, self._cache, metadata)
        return self._head.forward(token_ids[: len(slots)], states, position_ids, paged)

    def _forward(
        self, next_cells: Indices, states: Tensor, position_ids: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Compute the head from the model's hidden states and from tokens in these cells of the token table."""
        (cells,) = to_device([next_cells], states.device)
        token_ids = self._table.token_ids[cells].long()
        return self._head.forward(token_ids, states, position_ids, PagedStep(self._attention, self._cache, metadata))

    def _keep(self, batch: Batch, slots: Indices, ends: Indices, states: Tensor, returned: Tensor) -> None:
        """Keep what `propose` continues, and the hidden states of chunks whose next token is not known yet."""
        rows = batch.sampling
        row_slots = np.array([row.slot for row in rows], dtype=np.int64)
        row_positions = np.array([row.position - 1 for row in rows], dtype=np.int64)
        has_rows = np.isin(slots, row_slots)
        self._waiting_position[slots] = np.where(has_rows, NO_POSITION, ends - 1)
        self._last_returned[slots] = NO_POSITION
        last_tokens = batch.attention.num_queries.cumsum() - 1
        places, waiting, waiting_slots = to_device(
            [row_slots * self._width + row_positions % self._width, last_tokens[~has_rows], slots[~has_rows]],
            states.device,
        )
        self._waiting.index_copy_(0, waiting_slots, states[waiting])
        if rows:
            self._returned.index_copy_(0, places, returned[batch.logits_indices])
            self._last_returned[row_slots] = row_positions  # rows of a slot are in order, so its last one remains
            self._first_returned[row_slots[::-1]] = row_positions[::-1]

    def _cells(self, slots: Indices, positions: Indices) -> Indices:
        return slots * self._table.row_length + positions

    def _single_tokens(self, slots: Indices, positions: Indices) -> tuple[Tensor, AttentionMetadata]:
        """Return the position ids and the metadata of a step that computes one position of each slot."""
        tables, block_size = self._table.block_tables, self._cache.block_size
        block_ids = tables[slots, positions // block_size].astype(np.int64)
        position_ids, query_starts, lengths, block_table, slot_mapping = to_device(
            [
                positions,
                np.arange(len(slots) + 1, dtype=np.int32),
                (positions + 1).astype(np.int32),
                tables[slots, : int(positions.max()) // block_size + 1],
                block_ids * block_size + positions % block_size,
            ],
            self._returned.device,
        )
        metadata = AttentionMetadata(
            block_size, np.ones_like(positions), positions + 1, query_starts, lengths, block_table, slot_mapping
        )
        return position_ids, metadata


def load_eagle_head(loaded: LoadedModel, settings: LoadModel) -> LoadedHead:
    """Load the EAGLE-3 head that `--speculative eagle:PATH` names. Raises ConfigError for one that does not fit."""
    return LoadedHead.of(load_eagle3_head(Path(settings.speculative.path), loaded), loaded, settings)


def load_mtp_layer(loaded: LoadedModel, settings: LoadModel) -> LoadedHead:
    """Load the MTP layer of the model's own checkpoint. Raises ConfigError if it has none that can be read."""
    return LoadedHead.of(load_mtp_head(Path(settings.model_path), loaded), loaded, settings)
