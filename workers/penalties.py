"""What moves logits before a token is chosen from them: penalties for repetition, then biases.

All of it is computed anew in each step from the token table, so there are no counts to keep, to move or to lose when a
sequence is preempted. Rows that ask for nothing cost nothing.

Repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output. Presence and frequency penalties:
OpenAI's, over the output alone.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from servekit.sampling_params import SamplingParams
from workers.batch import SlotTable
from workers.sampler import SamplingRow
from workers.staging import staged


def adjust(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Logits [num_rows, vocab_size] as the rows' clients want them bent."""
    penalized = [i for i, row in enumerate(rows) if _is_penalized(row.sampling)]
    biased = [i for i, row in enumerate(rows) if row.sampling.logit_bias]
    if not (penalized or biased):
        return logits
    logits = logits.clone()
    if penalized:
        (at,) = staged([np.array(penalized)], logits.device)
        bent = _penalize(logits.index_select(0, at), [rows[i] for i in penalized], table)
        logits.index_copy_(0, at, bent)
    if biased:
        _add_biases(logits, rows, biased)
    return logits


def _add_biases(logits: Tensor, rows: list[SamplingRow], biased: list[int]) -> None:
    vocab_size = logits.shape[-1]
    named = [(i, *bias) for i in biased for bias in rows[i].sampling.logit_bias]
    # A client may name tokens that the model does not have: in flat cells they would be the next row's.
    known = [(i * vocab_size + token_id, value) for i, token_id, value in named if token_id < vocab_size]
    cells, values = np.array([cell for cell, _ in known], dtype=np.int64), np.array([value for _, value in known])
    at, biases = staged([cells, values.astype(np.float32)], logits.device)
    logits.view(-1).index_add_(0, at, biases.to(logits.dtype))


def _is_penalized(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _penalize(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    positions = torch.arange(max(row.position for row in rows), device=logits.device)
    params = [row.sampling for row in rows]
    wishes = [[each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each in params]
    places = [[row.slot * table.row_length, row.position, row.position - row.num_outputs] for row in rows]
    staged_wishes, staged_places = staged([np.array(wishes, dtype=np.float32), np.array(places)], logits.device)
    repetition, presence, frequency = torch.split(staged_wishes.to(logits.dtype), 1, dim=1)
    first_cells, lengths, prompt_lengths = torch.split(staged_places, 1, dim=1)
    # Cells behind a row's own length hold anything; they are masked below.
    token_ids = table.token_ids[first_cells + positions].long().clamp_(0, logits.shape[-1] - 1)

    def count(counted: Tensor) -> Tensor:
        return torch.zeros_like(logits).scatter_add_(-1, token_ids, counted.to(logits.dtype))

    known = positions < lengths
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(count(known) > 0, repeated, logits)
    outputs = count(known & (positions >= prompt_lengths))
    return logits - frequency * outputs - presence * (outputs > 0)
