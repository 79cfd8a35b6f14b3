"""Tokens that may not come next: all but the allowed ones, the ends of bad words, stop tokens before `min_tokens`.

Something is always left to choose from. Where the bans would leave none of the allowed tokens, the allowed ones win;
likewise, where nothing is named as allowed, all tokens. Ids that the model does not have ban and allow nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from workers.batch import SlotTable
from workers.sampler import SamplingRow


def ban(logits: Tensor, rows: list[SamplingRow], table: SlotTable) -> Tensor:
    """Logits [num_rows, vocab_size], minus infinity where a row's next token may not be."""
    limited = [i for i, row in enumerate(rows) if _is_limited(row)]
    if not limited:
        return logits
    vocab_size = logits.shape[-1]
    # On the host, and brought over at once: most entries come from there.
    allowed = torch.ones(len(limited), vocab_size, dtype=torch.bool)
    banned = torch.zeros_like(allowed)
    tails = _tails([rows[i] for i in limited], table)
    for index, i in enumerate(limited):
        row, sampling = rows[i], rows[i].sampling
        inside = _known(sampling.allowed_token_ids, vocab_size)
        if inside:
            allowed[index] = False
            allowed[index, inside] = True
        if row.num_outputs < sampling.min_tokens:
            banned[index, _known(table.seats[row.slot].stop_token_ids, vocab_size)] = True
        ends = [word[-1] for word in sampling.bad_words if _ends_with(tails[index], word[:-1])]
        banned[index, _known(ends, vocab_size)] = True
    left = allowed & ~banned
    left = torch.where(left.any(dim=-1, keepdim=True), left, allowed).to(logits.device)
    logits = logits.clone()
    logits[limited] = logits[limited].masked_fill(~left, float("-inf"))
    return logits


def _is_limited(row: SamplingRow) -> bool:
    sampling = row.sampling
    return bool(sampling.allowed_token_ids or sampling.bad_words) or row.num_outputs < sampling.min_tokens


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """A client may name tokens that the model does not have."""
    return [token_id for token_id in token_ids if token_id < vocab_size]


def _tails(rows: list[SamplingRow], table: SlotTable) -> list[list[int]]:
    """Each row's last tokens, prompt and output alike, as many as the longest bad word looks back at."""
    longest = max((len(word) - 1 for row in rows for word in row.sampling.bad_words), default=0)
    if not longest:
        return [[] for _ in rows]
    device = table.token_ids.device
    positions = torch.tensor([row.position for row in rows], device=device)[:, None] + torch.arange(-longest, 0).to(
        device
    )
    slots = torch.tensor([row.slot for row in rows], device=device)[:, None]
    token_ids = table.token_ids[slots * table.row_length + positions.clamp(min=0)].tolist()
    return [tail[max(0, longest - row.position) :] for tail, row in zip(token_ids, rows, strict=True)]


def _ends_with(tail: list[int], beginning: tuple[int, ...]) -> bool:
    return not beginning or tuple(tail[-len(beginning) :]) == beginning
