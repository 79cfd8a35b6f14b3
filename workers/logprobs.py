"""What the model itself thinks of tokens: logarithms of its probabilities, for sampled tokens and for a prompt's.

They are of the raw logits, in float32: no temperature, penalty or ban has touched them. Rows that ask for none cost
nothing. A prompt's logits are never there all at once: they are computed for so many positions at a time as fit into
MOST_LOGITS.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from servekit.messages import PromptLogprobs, TokenLogprobs
from workers.batch import PromptRow, SlotTable
from workers.sampler import SamplingRow

LOWEST = -9999.0  # what minus infinity becomes, which JSON has no word for
MOST_LOGITS = 2**24  # elements, at once: 64 MiB in float32, and as much again for what becomes of them


def sampled_logprobs(logits: Tensor, token_ids: Tensor, rows: list[SamplingRow]) -> tuple[TokenLogprobs | None, ...]:
    """Of `token_ids` [num_rows], given raw logits [num_rows, vocab_size]; None where nobody asks, () if none does."""
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not asking:
        return ()
    told: list[TokenLogprobs | None] = [None] * len(rows)
    num_top = [rows[i].sampling.logprobs or 0 for i in asking]
    for i, logprobs in zip(asking, _logprobs(logits[asking], token_ids[asking], num_top), strict=True):
        told[i] = logprobs
    return tuple(told)


def prompt_logprobs(
    rows: list[PromptRow], table: SlotTable, head: Callable[[Tensor], Tensor], vocab_size: int
) -> tuple[PromptLogprobs, ...]:
    """Of the prompt tokens that the rows' logits foretell.

    `head` gives logits [num_indices, vocab_size] in float32 for indices of the step's flat tokens.
    """
    device = table.token_ids.device
    indices = torch.cat([torch.arange(row.first, row.first + row.num_tokens) for row in rows]).to(device)
    cells = [row.slot * table.row_length + row.start for row in rows]
    foretold = torch.cat([torch.arange(cell, cell + row.num_tokens) for cell, row in zip(cells, rows, strict=True)])
    token_ids = table.token_ids[foretold.to(device)].long()
    num_top = [row.num_top for row in rows for _ in range(row.num_tokens)]
    told: list[TokenLogprobs] = []
    size = max(1, MOST_LOGITS // vocab_size)
    for begin in range(0, len(indices), size):
        chunk = slice(begin, begin + size)
        told += _logprobs(head(indices[chunk]), token_ids[chunk], num_top[chunk])
    rest = iter(told)
    return tuple(PromptLogprobs(row.row, row.start, tuple(islice(rest, row.num_tokens))) for row in rows)


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of logits [num_rows, vocab_size]: of its token, and of as many of the likeliest as `num_top` has."""
    # NaN would be a broken model's; JSON has no word for that either.
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(LOWEST, LOWEST, LOWEST).clamp_(min=LOWEST)
    chosen = logprobs.gather(-1, token_ids[:, None])[:, 0].tolist()
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    told = zip(chosen, top.indices.tolist(), top.values.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(likeliest[:count], values[:count], strict=True)))
        for logprob, likeliest, values, count in told
    ]
