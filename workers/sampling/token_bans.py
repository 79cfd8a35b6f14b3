"""Ban tokens: all but the allowed ones, the last tokens of bad words, stop tokens before `min_tokens`.

At least one token is always left. Where the bans would leave none of the allowed tokens, all allowed tokens stay; where
a request allows no particular tokens, all tokens stay. Ids that the model does not have ban and allow nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
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
    bad_words = _bad_words(rows, vocab_size, table.row_length)
    num_certain = len(cells)  # bans that do not depend on the newest tokens
    indices, where, beginnings, lengths = to_device(
        [np.concatenate([np.array(cells, dtype=np.int64), bad_words.cells]), *bad_words[1:]], table.token_ids.device
    )
    longest = beginnings.shape[1]
    is_alike = table.token_ids[where] == beginnings
    ends = (is_alike | (torch.arange(longest, device=indices.device) >= lengths)).all(dim=-1)
    # Several words may end in one token, and any of them bans it. Words that would not be complete write to an extra
    # cell behind the last row.
    extra = num_rows * vocab_size
    indices = torch.cat([indices[:num_certain], torch.where(ends, indices[num_certain:], extra)])
    banned = torch.zeros(extra + 1, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)
    return banned[:extra].view(shape)


class _BadWords(NamedTuple):
    """The bad words of all rows: the cell that each would ban, and the beginning that must precede it for that."""

    cells: NDArray[np.int64]  # [num_words], of [num_rows, vocab_size]
    compared: NDArray[np.int64]  # [num_words, longest], where the newest tokens are in the table
    beginnings: NDArray[np.int64]  # [num_words, longest]; padding behind shorter ones is ignored
    lengths: NDArray[np.int64]  # [num_words, 1], of the beginnings


def _bad_words(rows: list[SamplingRow], vocab_size: int, row_length: int) -> _BadWords:
    """Return the bad words that may be complete with the next token.

    The answers to one request have the same words, at most 64. So rows with the same words are computed together. One
    by one, 128 rows would take longer than the model's step.
    """
    rows_of: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row.sampling.bad_words:
            rows_of.setdefault(row.sampling.bad_words, []).append(index)
    longest = max((len(word) - 1 for words in rows_of for word in words), default=0)
    columns, found = np.arange(longest), [_no_words(longest)]
    for words, indices in rows_of.items():
        last, beginnings, lengths = _padded(words)
        beginnings = np.pad(beginnings, ((0, 0), (0, longest - beginnings.shape[1])))
        positions = np.array([rows[index].position for index in indices])
        starts = np.array([rows[index].slot * row_length for index in indices])
        of_row, word = np.nonzero((last < vocab_size) & (lengths <= positions[:, None]))
        behind = (starts + positions)[of_row, None] - lengths[word, None] + columns
        compared = np.where(columns < lengths[word, None], behind, 0)
        cells = np.array(indices)[of_row] * vocab_size + last[word]
        found.append(_BadWords(cells, compared, beginnings[word], lengths[word, None]))
    return _BadWords(*map(np.concatenate, zip(*found, strict=True)))


def _no_words(longest: int) -> _BadWords:
    none = np.zeros((0, longest), dtype=np.int64)
    return _BadWords(np.zeros(0, dtype=np.int64), none, none, np.zeros((0, 1), dtype=np.int64))


@lru_cache(maxsize=256)
def _padded(
    words: tuple[tuple[int, ...], ...],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return of each word the last token [num_words], the beginning [num_words, longest] and its length [num_words]."""
    lengths = np.array([len(word) - 1 for word in words], dtype=np.int64)
    beginnings = np.zeros((len(words), lengths.max()), dtype=np.int64)
    for number, word in enumerate(words):
        beginnings[number, : len(word) - 1] = word[:-1]
    return np.array([word[-1] for word in words], dtype=np.int64), beginnings, lengths


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """Leave out tokens that the model does not have: a request may name them."""
    return [token_id for token_id in token_ids if token_id < vocab_size]
