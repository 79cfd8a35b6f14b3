"""Tokens that may not come next: all but the allowed ones, the ends of bad words, stop tokens before `min_tokens`.

Something is always left to choose from. Where the bans would leave none of the allowed tokens, the allowed ones win;
likewise, where nothing is named as allowed, all tokens. Ids that the model does not have ban and allow nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from workers.batch import SlotTable
from workers.sampler import SamplingRow
from workers.staging import staged


def ban(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Logits [num_rows, vocab_size], minus infinity where a row's next token may not be."""
    limited = [i for i, row in enumerate(rows) if _is_limited(row)]
    if not limited:
        return logits
    of_rows = [rows[i] for i in limited]
    shape = len(limited), logits.shape[-1]
    left, banned = _allowed(of_rows, shape, logits.device), _banned(of_rows, shape, table)
    both = left & ~banned
    left = torch.where(both.any(dim=-1, keepdim=True), both, left)
    (at,) = staged([np.array(limited)], logits.device)
    bent = logits.index_select(0, at).masked_fill(~left, float("-inf"))
    return logits.index_copy(0, at, bent)


def _is_limited(row: SamplingRow) -> bool:
    sampling = row.sampling
    return bool(sampling.allowed_token_ids or sampling.bad_words) or row.num_outputs < sampling.min_tokens


def _allowed(rows: list[SamplingRow], shape: tuple[int, int], device: torch.device) -> Tensor:
    """[num_rows, vocab_size]: the tokens that each row names as allowed; all of them where it names none."""
    vocab_size = shape[1]
    named = [_known(row.sampling.allowed_token_ids, vocab_size) for row in rows]
    cells = [index * vocab_size + token_id for index, token_ids in enumerate(named) for token_id in token_ids]
    names_none = np.array([[not token_ids] for token_ids in named])
    all_of_them, at = staged([names_none, np.array(cells, dtype=np.int64)], device)
    return all_of_them.repeat(1, vocab_size).flatten().index_fill_(0, at, True).view(shape)


def _banned(rows: list[SamplingRow], shape: tuple[int, int], table: SlotTable) -> Tensor:
    """[num_rows, vocab_size]: stop tokens before `min_tokens`, and those that would end a bad word.

    Which words are about to end is for the device to see: the host does not know the newest tokens, and to ask for them
    is to wait for the step before.
    """
    num_rows, vocab_size = shape
    cells = [
        index * vocab_size + token_id
        for index, row in enumerate(rows)
        if row.num_outputs < row.sampling.min_tokens
        for token_id in _known(table.seats[row.slot].stop_token_ids, vocab_size)
    ]
    words = [
        (index * vocab_size + word[-1], row, word[:-1])
        for index, row in enumerate(rows)
        for word in row.sampling.bad_words
        if word[-1] < vocab_size and len(word) <= row.position + 1
    ]
    cells += [cell for cell, _, _ in words]
    longest = max((len(beginning) for _, _, beginning in words), default=0)
    # What a word's beginning is compared with, and what is compared: two shorter ones differ in nothing behind them.
    looked_at, expected = np.zeros((2, len(words), longest), dtype=np.int64)
    for number, (_, row, beginning) in enumerate(words):
        stop = row.slot * table.row_length + row.position
        looked_at[number, : len(beginning)] = np.arange(stop - len(beginning), stop)
        expected[number, : len(beginning)] = beginning
    counts = np.array([[len(beginning)] for _, _, beginning in words], dtype=np.int64).reshape(-1, 1)
    certain = len(cells) - len(words)
    at, where, beginnings, lengths = staged(
        [np.array(cells, dtype=np.int64), looked_at, expected, counts], table.token_ids.device
    )
    is_alike = table.token_ids[where] == beginnings
    ends = (is_alike | (torch.arange(longest, device=at.device) >= lengths)).all(dim=-1)
    # Several words may end in one token, and any of them bans it: those that do not end go to a cell behind the last.
    nowhere = num_rows * vocab_size
    at = torch.cat([at[:certain], torch.where(ends, at[certain:], nowhere)])
    banned = torch.zeros(nowhere + 1, dtype=torch.bool, device=at.device).index_fill_(0, at, True)
    return banned[:nowhere].view(shape)


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """A client may name tokens that the model does not have."""
    return [token_id for token_id in token_ids if token_id < vocab_size]
