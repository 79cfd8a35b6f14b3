"""Answers that follow a grammar: which tokens may come next, for the rows whose clients ask for one.

A matcher walks along its grammar with the tokens of the answer. It is derived from the token table like everything
else: before a token is chosen it consumes what the table has and it has not seen, be that the token of the step before
or, after a preemption, the whole answer so far. Grammars: llguidance, chosen in docs/structured_output.md.
"""

from __future__ import annotations

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
        """Read when it is first wanted: for a large vocabulary that takes half a second."""
        return grammar_tokenizer(self._tokenizer_file, self._vocab_size, self._eos_token_ids)

    def constrain(
        self, logits: Tensor, rows: list[SamplingRow], table: SlotTable
    ) -> tuple[Tensor, tuple[tuple[int, str], ...]]:
        """Logits [num_rows, vocab_size], minus infinity where a row's grammar does not go on; and (row, what is wrong).

        Where a row's other wishes leave none of the tokens that its grammar allows, the grammar wins.
        """
        followed = [i for i, row in enumerate(rows) if row.sampling.grammar is not None]
        if not followed:
            return logits, ()
        words = -(-self._vocab_size // 32)
        masks = np.zeros((len(followed), words), dtype=np.int32)
        failures = []
        for index, i in enumerate(followed):
            matcher = self._caught_up(rows[i], table)
            matcher.unsafe_compute_mask_ptr(masks[index].ctypes.data, 4 * words)
            # A matcher that gave up, for a grammar that is too complex at this place, answers like one that is done.
            if matcher.is_error():
                failures.append((i, matcher.get_error().split("\n")[0]))
        bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=logits.shape[-1], bitorder="little")
        allowed = torch.from_numpy(bits).view(torch.bool).to(logits.device)
        wished = logits[followed]
        left = wished.masked_fill(~allowed, float("-inf"))
        nothing_left = left.isneginf().all(dim=-1, keepdim=True)
        logits = logits.clone()
        logits[followed] = torch.where(nothing_left, torch.where(allowed, 0.0, float("-inf")), left)
        return logits, tuple(failures)

    def _caught_up(self, row: SamplingRow, table: SlotTable) -> LLMatcher:
        """The row's matcher, behind every token of its answer so far."""
        seat = table.seats[row.slot]
        follower = self._followers.get(row.slot)
        if follower is None or follower.seat is not seat:
            assert seat.sampling.grammar is not None
            follower = self._followers[row.slot] = _Follower(seat, self._matcher(seat.sampling.grammar))
        begin = row.slot * table.row_length + seat.prompt_length
        unseen = table.token_ids[begin + follower.num_consumed : begin + row.num_outputs].tolist()
        follower.matcher.consume_tokens(unseen)
        follower.num_consumed = row.num_outputs
        return follower.matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        """At the grammar's beginning. Copies of one that was compiled share what they can."""
        if grammar not in self._compiled:
            self._compiled[grammar] = matcher_for(grammar, self.tokenizer)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_GRAMMARS_KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[grammar].deep_copy()
