"""Change logits before a token is chosen from them: penalties for repetition, then biases.

Everything is computed in each step from the token table. So no counts have to be kept or moved, and none are lost when
a sequence is preempted. Rows without such parameters cost nothing.

Repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output. Presence and frequency penalties:
OpenAI's, over the output alone.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servekit.protocol.sampling_params import SamplingParams
from workers.batch import Indices, SamplingRow, SlotTable
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
    named = [_known(rows[i].sampling.logit_bias, vocab_size) for i in biased]
    cells = np.concatenate([i * vocab_size + token_ids for i, (token_ids, _) in zip(biased, named, strict=True)])
    indices, biases = to_device([cells, np.concatenate([values for _, values in named])], logits.device)
    logits.view(-1).index_add_(0, indices, biases.to(logits.dtype))


@lru_cache(maxsize=256)
def _known(biases: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[Indices, NDArray[np.float32]]:
    """Return token ids and their biases, which are the same for all answers to a request.

    A request may name tokens that the model does not have. In flat cells they would be tokens of the next row.
    """
    token_ids = np.array([token_id for token_id, _ in biases], dtype=np.int64)
    is_known = token_ids < vocab_size
    return token_ids[is_known], np.array([value for _, value in biases], dtype=np.float32)[is_known]


def _is_penalized(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _penalize(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Return logits [num_rows, vocab_size], one row for each of `rows`, with their penalties applied."""
    params = [row.sampling for row in rows]
    penalties = [[each.repetition_penalty, each.presence_penalty, each.frequency_penalty] for each in params]
    starts = np.array([row.slot * table.row_length for row in rows])
    num_outputs = np.array([row.num_outputs for row in rows])
    prompt_lengths = np.array([row.position for row in rows]) - num_outputs
    # Only this penalty depends on the prompt.
    repeats = np.array([each.repetition_penalty != 1.0 for each in params])
    outputs = _counts(starts + prompt_lengths, num_outputs, logits, table)
    prompts = _counts(starts, prompt_lengths * repeats, logits, table)
    (of_rows,) = to_device([np.array(penalties, dtype=np.float32)], logits.device)
    repetition, presence, frequency = torch.split(of_rows.to(logits.dtype), 1, dim=1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(prompts + outputs > 0, repeated, logits)
    return logits - frequency * outputs - presence * (outputs > 0)


def _counts(starts: Indices, lengths: Indices, logits: Tensor, table: SlotTable) -> Tensor:
    """Return [num_rows, vocab_size]: how often each token is in `lengths` [num_rows] cells of the table from `starts`.

    The tokens of all rows lie one after the other. In a tensor as wide as the longest row, each short row would take as
    long as the longest one.
    """
    num_tokens, (num_rows, vocab_size) = int(lengths.sum()), logits.shape
    repeats, offsets = to_device([lengths, starts - lengths.cumsum() + lengths], logits.device)
    owners = torch.repeat_interleave(repeats, output_size=num_tokens)  # [num_tokens] index of the token's row
    cells = torch.arange(num_tokens, device=logits.device) + offsets[owners]
    token_ids = table.token_ids[cells].long().clamp_(0, vocab_size - 1)  # in flat cells, others would be the next row's
    counts = torch.zeros(num_rows * vocab_size, dtype=logits.dtype, device=logits.device)
    return counts.scatter_add_(0, owners * vocab_size + token_ids, counts.new_ones(num_tokens)).view_as(logits)
