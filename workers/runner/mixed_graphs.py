"""Run steps that compute prompts, too, as CUDA graphs: up to 512 tokens of any sequences.

While requests arrive, most steps have a chunk of a prompt beside the decodes. Launched one by one, their kernels take
the host some milliseconds, and a small model's device a fraction of that. With more tokens than these graphs have, the
device takes longer than the host, which is then a step ahead.

A graph is for a number of tokens. Tokens beyond a step's own belong to no sequence: their keys and values are stored
nowhere, no attention is computed for them, and what the layers make of them is never read. (It may be NaN. Every
operation of a layer but attention treats tokens alone, so it stays with them.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from workers.attention.interface import AttentionMetadata
from workers.batch import Batch
from workers.runner.step_graphs import Capture, StepGraphs

# A step pays for the padding: at most half as many tokens again, and from 128 tokens on, where they begin to take time,
# a third or less.
NUM_TOKENS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512)

# From token ids [1, num_tokens], positions [1, num_tokens], metadata and the indices of the tokens whose logits are
# wanted [num_rows], to logits [num_rows, vocab_size], any dtype.
Forward = Callable[[Tensor, Tensor, AttentionMetadata, Tensor], Tensor]


class MixedGraphs(StepGraphs):
    """All graphs of steps of any chunks, by number of tokens."""

    steps = "steps of %d tokens with prompts"

    def __init__(
        self,
        forward: Forward,
        max_num_tokens: int,
        table_width: int,
        block_size: int,
        logits: Tensor,
        capture: Capture,
    ) -> None:
        """Allocate inputs; `table_width` is how many blocks the longest sequence can have.

        `logits` [num_rows, vocab_size] limits how many sequences a step has, and how many tokens it samples.
        """
        largest = min(max_num_tokens, NUM_TOKENS[-1])
        super().__init__([*(size for size in NUM_TOKENS if size < largest), largest], logits, capture)
        self._forward = forward
        self._num_rows = len(logits)
        while self._num_rows in self._sizes:  # with as many tokens as sequences, each would be taken to have one
            self._num_rows += 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=logits.device)

        self._token_ids, self._positions, self._slots = zeros(largest), zeros(largest), zeros(largest) - 1
        self._indices = zeros(len(logits))
        self._starts, self._lengths = (zeros(n, dtype=torch.int32) for n in (self._num_rows + 1, self._num_rows))
        self._table = zeros(self._num_rows, table_width, dtype=torch.int32)
        self._block_size = block_size

    def _can_hold(self, batch: Batch) -> bool:
        num_rows, num_tokens = len(batch.attention.num_keys), len(batch.position_ids)
        is_small = num_tokens <= self._sizes[-1] and max(num_rows, len(batch.sampling)) <= len(self.logits)
        # Decodes have graphs of their own, in which the keys of few sequences are divided among programs.
        return is_small and num_tokens > num_rows and not batch.prompt_logprobs

    def _size_of(self, batch: Batch) -> int:
        return len(batch.position_ids)

    def _fill(self, batch: Batch, size: int) -> None:
        attention, num_tokens = batch.attention, len(batch.position_ids)
        num_rows, width = attention.block_table.shape
        self._token_ids[:num_tokens] = batch.input_ids
        self._positions[:num_tokens] = batch.position_ids
        self._slots[:num_tokens] = attention.slot_mapping
        self._slots[num_tokens:size] = -1
        self._starts[: num_rows + 1] = attention.query_starts
        self._starts[num_rows + 1 :] = num_tokens  # the other sequences have no tokens
        self._lengths[:num_rows] = attention.lengths
        self._lengths[num_rows:] = 0
        self._table[:num_rows, :width] = attention.block_table
        self._indices[: len(batch.sampling)] = batch.logits_indices
        self._indices[len(batch.sampling) :] = 0  # the first token's, again and again

    def _clear(self, size: int) -> None:
        for each in (self._starts, self._lengths, self._indices):
            each.zero_()
        self._slots[:size] = -1

    def _compute(self, size: int) -> None:
        # One chunk and many decodes: attention is launched for sequences of many tokens and for those of few.
        num_queries = np.ones(self._num_rows, dtype=np.int64)
        num_queries[0] = size
        num_keys = np.full(self._num_rows, self._table.shape[1] * self._block_size)
        attention = AttentionMetadata(
            self._block_size, num_queries, num_keys, self._starts, self._lengths, self._table, self._slots[:size]
        )
        indices = self._indices[:size]  # no step samples more tokens than it has
        logits = self._forward(self._token_ids[None, :size], self._positions[None, :size], attention, indices)
        self.logits[:size].copy_(logits)  # which are in the model's own dtype
