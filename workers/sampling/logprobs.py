"""Compute logprobs: logarithms of the model's own probabilities, for sampled tokens and for a prompt's.

They are of the raw logits, in float32, before temperature, penalties and bans. Rows that ask for none cost nothing. A
prompt's logits never exist all at once: they are computed for as many positions at a time as fit into MAX_LOGITS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from servekit.protocol.messages import PromptLogprobs, TokenLogprobs
from workers.batch import PromptLogprobsChunk, SamplingRow, SlotTable
from workers.device.transfer import to_device, to_host

MIN_LOGPROB = -9999.0  # used for minus infinity, which JSON cannot express
MAX_LOGITS = 2**24  # elements, at once: 64 MiB in float32, and as much again for their logprobs


@dataclass(frozen=True, slots=True)
class _PendingLogprobs:
    """Logprobs of some tokens, on their way to the host."""

    chosen: Tensor  # [num_tokens] of the tokens themselves
    top_ids: Tensor  # [num_tokens, max of num_top] the most probable tokens, in falling order
    top_values: Tensor  # and their logprobs
    num_top: list[int]  # for each token, how many of them its client wants

    def read(self) -> list[TokenLogprobs]:
        columns = zip(self.chosen.tolist(), self.top_ids.tolist(), self.top_values.tolist(), self.num_top, strict=True)
        return [TokenLogprobs.of(logprob, ids[:count], values[:count]) for logprob, ids, values, count in columns]


@dataclass(frozen=True, slots=True)
class PendingSampledLogprobs:
    """Logprobs of a step's sampled tokens, on their way to the host.

    `read` may be called once a DeviceEvent is complete that was recorded after this was made.
    """

    num_rows: int
    indices: list[int]  # of the rows that ask for logprobs
    logprobs: _PendingLogprobs  # one for each of them

    def read(self) -> tuple[TokenLogprobs | None, ...]:
        """Return one entry for each row; None for rows that want no logprobs."""
        of_rows: list[TokenLogprobs | None] = [None] * self.num_rows
        for index, logprobs in zip(self.indices, self.logprobs.read(), strict=True):
            of_rows[index] = logprobs
        return tuple(of_rows)


@dataclass(frozen=True, slots=True)
class PendingPromptLogprobs:
    """Logprobs of prompt tokens, on their way to the host; `read` as for PendingSampledLogprobs."""

    chunks: list[PromptLogprobsChunk]
    parts: list[_PendingLogprobs]  # the chunks' positions one after the other, cut into parts of bounded size

    def read(self) -> tuple[PromptLogprobs, ...]:
        """Return one entry for each chunk."""
        logprobs = chain.from_iterable(part.read() for part in self.parts)
        return tuple(
            PromptLogprobs(chunk.index, chunk.start, tuple(islice(logprobs, chunk.num_tokens))) for chunk in self.chunks
        )


def sampled_logprobs(logits: Tensor, token_ids: Tensor, rows: list[SamplingRow]) -> PendingSampledLogprobs | None:
    """Return the logprobs of `token_ids` [num_rows], given raw logits [num_rows, vocab_size]; None if no row asks."""
    indices = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not indices:
        return None
    num_top = [rows[i].sampling.logprobs or 0 for i in indices]
    (asking,) = to_device([np.array(indices)], logits.device)
    logprobs = _logprobs(logits.index_select(0, asking), token_ids.index_select(0, asking), num_top)
    return PendingSampledLogprobs(len(rows), indices, logprobs)


def prompt_logprobs(
    chunks: list[PromptLogprobsChunk], table: SlotTable, head: Callable[[Tensor], Tensor], vocab_size: int
) -> PendingPromptLogprobs:
    """Return the logprobs of the prompt tokens that the chunks' logits predict.

    `head` returns logits [num_indices, vocab_size] in float32 for indices of the step's flat tokens.
    """
    cells = [chunk.slot * table.row_length + chunk.start for chunk in chunks]
    indices, predicted = to_device(
        [
            np.concatenate([np.arange(chunk.first, chunk.first + chunk.num_tokens) for chunk in chunks]),
            np.concatenate(
                [np.arange(cell, cell + chunk.num_tokens) for cell, chunk in zip(cells, chunks, strict=True)]
            ),
        ],
        table.token_ids.device,
    )
    token_ids = table.token_ids[predicted].long()
    num_top = [chunk.num_top for chunk in chunks for _ in range(chunk.num_tokens)]
    size = max(1, MAX_LOGITS // vocab_size)
    parts = [slice(begin, begin + size) for begin in range(0, len(indices), size)]
    return PendingPromptLogprobs(
        chunks, [_logprobs(head(indices[part]), token_ids[part], num_top[part]) for part in parts]
    )


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: list[int]) -> _PendingLogprobs:
    """Return, for each row of logits [num_rows, vocab_size], its token's logprob and those of `num_top` tokens."""
    # NaN comes from a broken model; JSON cannot express that either.
    logprobs = torch.log_softmax(logits, dim=-1).nan_to_num_(MIN_LOGPROB, MIN_LOGPROB, MIN_LOGPROB)
    logprobs = logprobs.clamp_(min=MIN_LOGPROB)
    chosen = to_host(logprobs.gather(-1, token_ids[:, None])[:, 0])
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return _PendingLogprobs(chosen, to_host(top.indices), to_host(top.values), num_top)
