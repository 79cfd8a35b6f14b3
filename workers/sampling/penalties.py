"""Change logits before a token is chosen from them: penalties for repetition, then biases.

All of it is computed anew in each step from the token table, so there are no counts to keep, to move or to lose when a
sequence is preempted. Rows without such parameters cost nothing.

Repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output. Presence and frequency penalties:
OpenAI's, over the output alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servekit.protocol.sampling_params import SamplingParams
from workers.batch import SamplingRow, SlotTable
from workers.device.transfer import to_device


def adjust(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Return logits [num_rows, vocab_size] with the rows' penalties and biases; the same tensor if no row has any."""
    penalized = [i for i, row in enumerate(rows) if _is_penalized(row.sampling)]
    biased = [i for i, row in enumerate(rows) if row.sampling.logit_bias]
    if not (penalized or biased):
        return logits
    logits = logits.clone()
    if penalized:
        (indices,) = to_device([np.array(penalized)], logits.device)
        changed = _penalize(logits.index_select(0, indices), [rows[i] for i in penalized], table)
        logits.index_copy_(0, indices, changed)
    if biased:
        _add_biases(logits, rows, biased)
    return logits


def _add_biases(logits: Tensor, rows: list[SamplingRow], biased: list[int]) -> None:
    """Add, in place, the biases of the rows with the indices `biased`."""
    vocab_size = logits.shape[-1]
    named = [(i, *bias) for i in biased for bias in rows[i].sampling.logit_bias]
    # A request may name tokens that the model does not have. In flat cells they would be tokens of the next row.
    known = [(i * vocab_size + token_id, value) for i, token_id, value in named if token_id < vocab_size]
    cells, values = np.array([cell for cell, _ in known], dtype=np.int64), np.array([value for _, value in known])
    indices, biases = to_device([cells, values.astype(np.float32)], logits.device)
    logits.view(-1).index_add_(0, indices, biases.to(logits.dtype))


def _is_penalized(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _penalize(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Return logits [num_rows, vocab_size], one row for each of `rows`, with their penalties applied."""
    positions = torch.arange(max(row.position for row in rows), device=logits.device)
    params = [row.sampling for row in rows]
    penalties = [[each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each in params]
    places = [[row.slot * table.row_length, row.position, row.position - row.num_outputs] for row in rows]
    of_rows, places_of_rows = to_device([np.array(penalties, dtype=np.float32), np.array(places)], logits.device)
    repetition, presence, frequency = torch.split(of_rows.to(logits.dtype), 1, dim=1)
    first_cells, lengths, prompt_lengths = torch.split(places_of_rows, 1, dim=1)
    # Cells beyond a row's own length hold arbitrary tokens; they are masked below.
    token_ids = table.token_ids[first_cells + positions].long().clamp_(0, logits.shape[-1] - 1)

    def count(counted: Tensor) -> Tensor:
        """Return [num_rows, vocab_size]: how often each token is at one of the `counted` positions."""
        return torch.zeros_like(logits).scatter_add_(-1, token_ids, counted.to(logits.dtype))

    known = positions < lengths
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(count(known) > 0, repeated, logits)
    outputs = count(known & (positions >= prompt_lengths))
    return logits - frequency * outputs - presence * (outputs > 0)
