"""What moves logits before a token is chosen from them: penalties for repetition, then biases.

All of it is computed anew in each step from the token table, so there are no counts to keep, to move or to lose when a
sequence is preempted. Rows that ask for nothing cost nothing.

Repetition penalty: Keskar et al., "CTRL", 2019, section 4.1, over prompt and output. Presence and frequency penalties:
OpenAI's, over the output alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from servekit.sampling_params import SamplingParams
from workers.batch import SlotTable
from workers.sampler import SamplingRow


def adjust(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Logits [num_rows, vocab_size] as the rows' clients want them bent."""
    penalized = [i for i, row in enumerate(rows) if _is_penalized(row.sampling)]
    biased = [i for i, row in enumerate(rows) if row.sampling.logit_bias]
    if not (penalized or biased):
        return logits
    logits = logits.clone()
    if penalized:
        logits[penalized] = _penalize(logits[penalized], [rows[i] for i in penalized], table)
    for i in biased:
        token_ids, values = zip(*rows[i].sampling.logit_bias, strict=True)
        logits[i, list(token_ids)] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits


def _is_penalized(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def _penalize(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    device = logits.device
    slots = torch.tensor([row.slot for row in rows], device=device)[:, None]
    lengths = torch.tensor([row.position for row in rows], device=device)[:, None]
    prompt_lengths = torch.tensor([row.position - row.num_outputs for row in rows], device=device)[:, None]
    positions = torch.arange(max(row.position for row in rows), device=device)
    # Cells behind a row's own length hold anything; they are masked below.
    token_ids = table.token_ids[slots * table.row_length + positions].long().clamp_(0, logits.shape[-1] - 1)

    def count(counted: Tensor) -> Tensor:
        return torch.zeros_like(logits).scatter_add_(-1, token_ids, counted.to(logits.dtype))

    def column(name: str) -> Tensor:
        values = [getattr(row.sampling, name) for row in rows]
        return torch.tensor(values, dtype=logits.dtype, device=device)[:, None]

    known = positions < lengths
    repetition = column("repetition_penalty")
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(count(known) > 0, repeated, logits)
    outputs = count(known & (positions >= prompt_lengths))
    return logits - column("frequency_penalty") * outputs - column("presence_penalty") * (outputs > 0)
