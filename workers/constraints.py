"""Answers that follow a grammar: which tokens may come next, for the rows whose clients ask for one.

A matcher walks along its grammar with the tokens of the answer. It is derived from the token table like everything
else: before a token is chosen it consumes what the table has and it has not seen, be that the token of the step before
or, after a preemption, the whole answer so far. Grammars: llguidance, chosen in docs/structured_output.md.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from servekit.grammar import grammar_tokenizer, matcher_for
from servekit.messages import Seat
from workers.batch import SlotTable
from workers.sampler import SamplingRow

MAX_GRAMMARS_KEPT = 256
INFINITY = float("inf")


@dataclass(slots=True)
class _Follower:
    """One sequence's place in its grammar."""

    seat: Seat
    matcher: LLMatcher
    num_consumed: int = 0  # tokens of the answer


class Constraints:
    """The matchers of the sequences in their seats, and the grammars compiled lately."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._followers: dict[int, _Follower] = {}  # by slot
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        return grammar_tokenizer(self._tokenizer_file, self._vocab_size, self._eos_token_ids)

    def warm_up(self) -> None:
        """Read the tokenizer, which takes half a second for a large vocabulary, before anybody waits for it.

        Where llguidance cannot use it the sandbox says so, to the operator and to who asks; nobody gets here then.
        """
        with contextlib.suppress(ValueError, KeyError, OSError):
            _ = self.tokenizer

    def constrain(
        self, logits: Tensor, rows: list[SamplingRow], table: SlotTable, in_place: bool = False
    ) -> tuple[Tensor, tuple[tuple[int, str], ...]]:
        """Logits [num_rows, vocab_size], minus infinity where a row's grammar does not go on; and (row, what is wrong).

        Where a row's other wishes leave none of the tokens that its grammar allows, the grammar wins. Done in one
        thread and after the forward pass: a thread beside it, and llguidance's own pool, were slower on two cores.
        """
        followed = [i for i, row in enumerate(rows) if row.sampling.grammar is not None]
        if not followed:
            return logits, ()
        matchers = self._caught_up([rows[i] for i in followed], table)
        num_words = -(-self._vocab_size // 32)
        # One bit for each token that may come; rows without a grammar keep all of theirs.
        bits = np.full((len(rows), num_words), -1, dtype=np.int32)
        address, row_bytes = bits.ctypes.data, 4 * num_words
        for i, matcher in zip(followed, matchers, strict=True):
            matcher.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
        unpacked = np.unpackbits((~bits).view(np.uint8), axis=-1, count=logits.shape[-1], bitorder="little")
        outside = torch.from_numpy(unpacked).view(torch.bool).to(logits.device)
        constrained = logits.masked_fill_(outside, -INFINITY) if in_place else logits.masked_fill(outside, -INFINITY)
        for i in followed:
            if rows[i].sampling.bans_tokens and constrained[i].amax() == -INFINITY:
                constrained[i] = torch.where(outside[i], -INFINITY, 0.0)
        # A matcher that gave up, because its grammar is too complex at this place, allows what one allows that is done.
        failed = [(i, matcher) for i, matcher in zip(followed, matchers, strict=True) if matcher.is_error()]
        return constrained, tuple((i, matcher.get_error().split("\n")[0]) for i, matcher in failed)

    def _caught_up(self, rows: list[SamplingRow], table: SlotTable) -> list[LLMatcher]:
        """The rows' matchers, each behind every token of its answer so far."""
        # Nearly always each lacks one token, the newest: one look at the table for all of them.
        cells = [row.slot * table.row_length + row.position - 1 for row in rows]
        newest = table.token_ids[torch.tensor(cells, device=table.token_ids.device)].tolist()
        matchers = []
        for row, cell, token_id in zip(rows, cells, newest, strict=True):
            follower = self._follower(table.seats[row.slot])
            matchers.append(follower.matcher)
            num_missed = row.num_outputs - follower.num_consumed - 1
            if num_missed > 0:
                follower.matcher.consume_tokens(table.token_ids[cell - num_missed : cell].tolist())
            if num_missed >= 0:
                follower.matcher.consume_token(token_id)
                follower.num_consumed = row.num_outputs
        return matchers

    def _follower(self, seat: Seat) -> _Follower:
        """Of whoever sits there now."""
        follower = self._followers.get(seat.slot)
        if follower is None or follower.seat is not seat:
            assert seat.sampling.grammar is not None
            follower = self._followers[seat.slot] = _Follower(seat, self._matcher(seat.sampling.grammar))
        return follower

    def _matcher(self, grammar: str) -> LLMatcher:
        """At the grammar's beginning. Copies of one that was compiled share what they can."""
        if grammar not in self._compiled:
            self._compiled[grammar] = matcher_for(grammar, self.tokenizer)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_GRAMMARS_KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[grammar].deep_copy()
