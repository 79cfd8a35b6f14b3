"""Ban tokens: all but the allowed ones, the last tokens of bad words, stop tokens before `min_tokens`.

At least one token is always left. If the bans would leave none of the allowed tokens, all allowed tokens stay. If a
request does not limit the allowed tokens, all tokens stay. Ids that the model does not have ban and allow nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from workers.batch import Indices, SamplingRow, SlotTable
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
    names_none = np.array([[not row.sampling.allowed_token_ids] for row in rows])
    named = {i: row.sampling.allowed_token_ids for i, row in enumerate(rows) if row.sampling.allowed_token_ids}
    names_none[[i for i, token_ids in named.items() if not len(_known(token_ids, vocab_size))]] = True
    allows_all, indices = to_device([names_none, _cells(named, vocab_size)], device)
    return allows_all.repeat(1, vocab_size).flatten().index_fill_(0, indices, True).view(shape)


def _banned(rows: list[SamplingRow], shape: tuple[int, int], table: SlotTable) -> Tensor:
    """Return [num_rows, vocab_size] bool: stop tokens before `min_tokens`, and tokens that would complete a bad word.

    The device compares the words' beginnings with the newest tokens. The host does not know those, and reading them
    would wait for the step before.
    """
    num_rows, vocab_size = shape
    early = {
        i: table.slot_assignments[row.slot].stop_token_ids
        for i, row in enumerate(rows)
        if row.num_outputs < row.sampling.min_tokens
    }
    certain = _cells(early, vocab_size)  # bans that do not depend on the newest tokens
    num_certain, bad_words = len(certain), _bad_words(rows, vocab_size, table.row_length)
    indices, where, beginnings, words = to_device(
        [np.concatenate([certain, bad_words.cells]), *bad_words[1:]], table.token_ids.device
    )
    differs = (table.token_ids[where] != beginnings).int()
    num_different = torch.zeros(len(bad_words.cells), dtype=torch.int32, device=indices.device)
    ends = num_different.scatter_add_(0, words, differs) == 0
    # Several words may end in one token, and any of them bans it. Words that would not be complete write to an extra
    # cell after the last row.
    extra = num_rows * vocab_size
    indices = torch.cat([indices[:num_certain], torch.where(ends, indices[num_certain:], extra)])
    banned = torch.zeros(extra + 1, dtype=torch.bool, device=indices.device).index_fill_(0, indices, True)
    return banned[:extra].view(shape)


class _BadWords(NamedTuple):
    """The bad words of all rows: the cell that each would ban, and the beginnings that must precede it for that.

    The tokens of all beginnings lie one after the other, so that one long word does not make short ones cost as much.
    """

    cells: Indices  # [num_words], of [num_rows, vocab_size]
    compared: Indices  # [num_tokens], where the newest tokens are in the table
    beginnings: Indices  # [num_tokens]
    words: Indices  # [num_tokens], index of the word whose beginning the token is in


def _bad_words(rows: list[SamplingRow], vocab_size: int, row_length: int) -> _BadWords:
    """Return the bad words that may be complete with the next token.

    The answers to one request have the same words, at most 128 with 1,024 tokens. So rows with the same words are
    computed together. One by one, 128 rows would take longer than the model's step.
    """
    rows_of: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for index, row in enumerate(rows):
        if row.sampling.bad_words:
            rows_of.setdefault(row.sampling.bad_words, []).append(index)
    none = np.zeros(0, dtype=np.int64)
    found, num_words = [_BadWords(none, none, none, none)], 0
    for words, indices in rows_of.items():
        flat = _flat(words)
        positions = np.array([[rows[index].position] for index in indices])
        ends = np.array([[rows[index].slot * row_length] for index in indices]) + positions
        cells = np.array([[index * vocab_size] for index in indices]) + flat.last
        # Words that the model or the answer is too short for ban nothing: their cell is after the last row.
        is_possible = (flat.last < vocab_size) & (flat.lengths <= positions)
        cells = np.where(is_possible, cells, len(rows) * vocab_size)
        compared = np.maximum(ends - flat.distances, 0)
        numbers = num_words + len(flat.last) * np.arange(len(indices))[:, None] + flat.words
        beginnings = np.broadcast_to(flat.beginnings, compared.shape)
        found.append(_BadWords(cells.ravel(), compared.ravel(), beginnings.ravel(), numbers.ravel()))
        num_words += cells.size
    return _BadWords(*map(np.concatenate, zip(*found, strict=True)))


class _FlatWords(NamedTuple):
    """Some words, without the rows that have them."""

    last: Indices  # [num_words] token
    lengths: Indices  # [num_words] of the beginnings
    beginnings: Indices  # [num_tokens]
    distances: Indices  # [num_tokens] before the end, from 1
    words: Indices  # [num_tokens]


@lru_cache(maxsize=256)
def _flat(words: tuple[tuple[int, ...], ...]) -> _FlatWords:
    lengths = np.array([len(word) - 1 for word in words], dtype=np.int64)
    distances = [distance for word in words for distance in range(len(word) - 1, 0, -1)]
    return _FlatWords(
        np.array([word[-1] for word in words], dtype=np.int64),
        lengths,
        np.array([token_id for word in words for token_id in word[:-1]], dtype=np.int64),
        np.array(distances, dtype=np.int64),
        np.arange(len(words)).repeat(lengths),
    )


def _cells(token_ids_of: Mapping[int, tuple[int, ...]], vocab_size: int) -> Indices:
    """Return the cells of [num_rows, vocab_size] that rows, given by their index, name by token id."""
    cells = [index * vocab_size + _known(token_ids, vocab_size) for index, token_ids in token_ids_of.items()]
    return np.concatenate([np.zeros(0, dtype=np.int64), *cells])


@lru_cache(maxsize=256)
def _known(token_ids: tuple[int, ...], vocab_size: int) -> Indices:
    """Leave out tokens that the model does not have: a request may name them. Answers to one request name the same."""
    named = np.array(token_ids, dtype=np.int64)
    return named[named < vocab_size]
