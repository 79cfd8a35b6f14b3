"""What the model itself thinks of tokens: logarithms of its probabilities, for sampled tokens and for a prompt's.

They are of the raw logits, in float32: no temperature, penalty or ban has touched them. Rows that ask for none cost
nothing. A prompt's logits are never there all at once: they are computed for so many positions at a time as fit into
MOST_LOGITS.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from servekit.messages import PromptLogprobs, TokenLogprobs
from workers.batch import PromptRow, SlotTable
from workers.sampler import SamplingRow
from workers.staging import on_host, staged

LOWEST = -9999.0  # what minus infinity becomes, which JSON has no word for
MOST_LOGITS = 2**24  # elements, at once: 64 MiB in float32, and as much again for what becomes of them


def sampled_logprobs(
    logits: Tensor, token_ids: Tensor, rows: list[SamplingRow]
) -> Callable[[], tuple[TokenLogprobs | None, ...]]:
    """Of `token_ids` [num_rows], given raw logits [num_rows, vocab_size]; None where nobody asks, () if none does.

    What is returned here and below may be called when a mark is passed that was set after this.
    """
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not asking:
        return tuple
    num_top = [rows[i].sampling.logprobs or 0 for i in asking]
    (at,) = staged([np.array(asking)], logits.device)
    tell = _logprobs(logits.index_select(0, at), token_ids.index_select(0, at), num_top)

    def tell_all() -> tuple[TokenLogprobs | None, ...]:
        told: list[TokenLogprobs | None] = [None] * len(rows)
        for i, logprobs in zip(asking, tell(), strict=True):
            told[i] = logprobs
        return tuple(told)

    return tell_all


def prompt_logprobs(
    rows: list[PromptRow], table: SlotTable, head: Callable[[Tensor], Tensor], vocab_size: int
) -> Callable[[], tuple[PromptLogprobs, ...]]:
    """Of the prompt tokens that the rows' logits foretell.

    `head` gives logits [num_indices, vocab_size] in float32 for indices of the step's flat tokens.
    """
    cells = [row.slot * table.row_length + row.start for row in rows]
    indices, foretold = staged(
        [
            np.concatenate([np.arange(row.first, row.first + row.num_tokens) for row in rows]),
            np.concatenate([np.arange(cell, cell + row.num_tokens) for cell, row in zip(cells, rows, strict=True)]),
        ],
        table.token_ids.device,
    )
    token_ids = table.token_ids[foretold].long()
    num_top = [row.num_top for row in rows for _ in range(row.num_tokens)]
    size = max(1, MOST_LOGITS // vocab_size)
    chunks = [slice(begin, begin + size) for begin in range(0, len(indices), size)]
    tellers = [_logprobs(head(indices[chunk]), token_ids[chunk], num_top[chunk]) for chunk in chunks]

    def tell_all() -> tuple[PromptLogprobs, ...]:
        rest = chain.from_iterable(tell() for tell in tellers)
        return tuple(PromptLogprobs(row.row, row.start, tuple(islice(rest, row.num_tokens))) for row in rows)

    return tell_all


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: list[int]) -> Callable[[], list[TokenLogprobs]]:
    """For each row of logits [num_rows, vocab_size]: of its token, and of as many of the likeliest as `num_top` has."""
    # NaN would be a broken model's; JSON has no word for that either.
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(LOWEST, LOWEST, LOWEST).clamp_(min=LOWEST)
    chosen = on_host(logprobs.gather(-1, token_ids[:, None])[:, 0])
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    top_ids, top_values = on_host(top.indices), on_host(top.values)

    def tell() -> list[TokenLogprobs]:
        told = zip(chosen.tolist(), top_ids.tolist(), top_values.tolist(), num_top, strict=True)
        return [
            TokenLogprobs(logprob, tuple(zip(likeliest[:count], values[:count], strict=True)))
            for logprob, likeliest, values, count in told
        ]

    return tell
