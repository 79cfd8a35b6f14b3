"""Ban tokens: all but the allowed ones, the last tokens of bad words, stop tokens before `min_tokens`.

At least one token is always left. Where the bans would leave none of the allowed tokens, all allowed tokens stay; where
a request allows no particular tokens, all tokens stay. Ids that the model does not have ban and allow nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from workers.batch import SamplingRow, SlotTable
from workers.device.transfer import to_device


def ban(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Return logits [num_rows, vocab_size], minus infinity for banned tokens; the same tensor if no row bans any."""
    limited = [i for i, row in enumerate(rows) if _is_limited(row)]
    if not limited:
        return logits
    of_rows = [rows[i] for i in limited]
    shape = len(limited), logits.shape[-1]
    left, banned = _allowed(of_rows, shape, logits.device), _banned(of_rows, shape, table)
    both = left & ~banned
    left = torch.where(both.any(dim=-1, keepdim=True), both, left)
    (indices,) = to_device([np.array(limited)], logits.device)
    changed = logits.index_select(0, indices).masked_fill(~left, float("-inf"))
    return logits.index_copy(0, indices, changed)


def _is_limited(row: SamplingRow) -> bool:
    sampling = row.sampling
    return bool(sampling.allowed_token_ids or sampling.bad_words) or row.num_outputs < sampling.min_tokens


def _allowed(rows: list[SamplingRow], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return [num_rows, vocab_size] bool: the tokens that each row allows; all where it names none."""
    vocab_size = shape[1]
    named = [_known(row.sampling.allowed_token_ids, vocab_size) for row in rows]
    cells = [index * vocab_size + token_id for index, token_ids in enumerate(named) for token_id in token_ids]
    names_none = np.array([[not token_ids] for token_ids in named])
    allows_all, indices = to_device([names_none, np.array(cells, dtype=np.int64)], device)
    return allows_all.repeat(1, vocab_size).flatten().index_fill_(0, indices, True).view(shape)


def _banned(rows: list[SamplingRow], shape: tuple[int, int], table: SlotTable) -> Tensor:
    """Return [num_rows, vocab_size] bool: stop tokens before `min_tokens`, and tokens that would complete a bad word.

    The device compares the words' beginnings with the newest tokens. The host does not know those, and reading them
    would wait for the step before.
    """
    num_rows, vocab_size = shape
    cells = [
        index * vocab_size + token_id
        for index, row in enumerate(rows)
        if row.num_outputs < row.sampling.min_tokens
        for token_id in _known(table.slot_assignments[row.slot].stop_token_ids, vocab_size)
    ]
    words = [
        (index * vocab_size + word[-1], row, word[:-1])
        for index, row in enumerate(rows)
        for word in row.sampling.bad_words
        if word[-1] < vocab_size and len(word) <= row.position + 1
    ]
    cells += [cell for cell, _, _ in words]
    longest = max((len(beginning) for _, _, beginning in words), default=0)
    # The cells that a word's beginning is compared with, and the beginning; padding behind shorter ones is ignored.
    compared, expected = np.zeros((2, len(words), longest), dtype=np.int64)
    for number, (_, row, beginning) in enumerate(words):
        stop = row.slot * table.row_length + row.position
        compared[number, : len(beginning)] = np.arange(stop - len(beginning), stop)
        expected[number, : len(beginning)] = beginning
    counts = np.array([[len(beginning)] for _, _, beginning in words], dtype=np.int64).reshape(-1, 1)
    num_certain = len(cells) - len(words)  # bans that do not depend on the newest tokens
    indices, where, beginnings, lengths = to_device(
        [np.array(cells, dtype=np.int64), compared, expected, counts], table.token_ids.device
    )
    is_alike = table.token_ids[where] == beginnings
    ends = (is_alike | (torch.arange(longest, device=indices.device) >= lengths)).all(dim=-1)
    # Several words may end in one token, and any of them bans it. Words that would not be complete write to an extra
    # cell behind the last row.
    extra = num_rows * vocab_size
    indices = torch.cat([indices[:num_certain], torch.where(ends, indices[num_certain:], extra)])
    banned = torch.zeros(extra + 1, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)
    return banned[:extra].view(shape)


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Leave out tokens that the model does not have: a request may name them."""
    return [token_id for token_id in token_ids if token_id < vocab_size]
