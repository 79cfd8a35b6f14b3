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
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from servekit.grammar import grammar_tokenizer, matcher_for
from servekit.messages import Seat
from workers.batch import SlotTable
from workers.sampler import SamplingRow
from workers.staging import Mark, on_host, staged

MAX_GRAMMARS_KEPT = 256
INFINITY = float("inf")


@dataclass(slots=True)
class _Follower:
    """One sequence's place in its grammar."""

    seat: Seat
    matcher: LLMatcher
    num_consumed: int = 0  # tokens of the answer


@dataclass(frozen=True, slots=True)
class Lookout:
    """The followers of a step's rows, and the tokens that they have not seen, on their way to the host."""

    followers: dict[int, _Follower]  # by row
    num_unseen: list[int]  # for each of them
    token_ids: Tensor | None  # [sum of num_unseen] int32, when `arrival` is passed; None if there are none
    arrival: Mark | None

    def caught_up(self) -> dict[int, LLMatcher]:
        """Their matchers, each behind every token of its answer so far. Waits for the tokens; once."""
        if self.arrival is not None and self.token_ids is not None:
            self.arrival.wait()
            unseen = iter(self.token_ids.tolist())
            for follower, count in zip(self.followers.values(), self.num_unseen, strict=True):
                for token_id in islice(unseen, count):  # one by one: a matcher that has ended takes an end of sequence
                    follower.matcher.consume_token(token_id)
                follower.num_consumed += count
        return {i: follower.matcher for i, follower in self.followers.items()}


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

    def look(self, rows: list[SamplingRow], table: SlotTable) -> Lookout:
        """Send for the tokens that the rows' matchers have not seen: before the forward pass, so that whoever waits for
        them waits for the step that chose them, while the device computes this one.
        """
        followers = {
            i: self._follower(table.seats[row.slot]) for i, row in enumerate(rows) if row.sampling.grammar is not None
        }
        # Nearly always each lacks one token, the newest; after a preemption, the whole answer; and none of what is
        # executed once more, in pieces.
        ends = [rows[i].slot * table.row_length + rows[i].position for i in followers]
        counts = [max(0, rows[i].num_outputs - follower.num_consumed) for i, follower in followers.items()]
        cells = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        if not any(counts):
            return Lookout(followers, counts, None, None)
        (at,) = staged([np.concatenate(cells)], table.token_ids.device)
        token_ids = on_host(table.token_ids.index_select(0, at))
        return Lookout(followers, counts, token_ids, Mark(at.device))

    def constrain(
        self, logits: Tensor, rows: list[SamplingRow], lookout: Lookout, in_place: bool = False
    ) -> tuple[Tensor, tuple[tuple[int, str], ...]]:
        """Logits [num_rows, vocab_size], minus infinity where a row's grammar does not go on; and (row, what is wrong).

        Where a row's other wishes leave none of the tokens that its grammar allows, the grammar wins. Done in one
        thread and after the forward pass: a thread beside it, and llguidance's own pool, were slower on two cores.
        """
        if not lookout.followers:
            return logits, ()
        matchers = lookout.caught_up()
        num_words = -(-self._vocab_size // 32)
        # One bit for each token that may come; rows without a grammar keep all of theirs.
        bits = np.full((len(rows), num_words), -1, dtype=np.int32)
        address, row_bytes = bits.ctypes.data, 4 * num_words
        for i, matcher in matchers.items():
            matcher.unsafe_compute_mask_ptr(address + i * row_bytes, row_bytes)
        outside = _unpacked(~bits, logits.shape[-1], logits.device)
        constrained = logits.masked_fill_(outside, -INFINITY) if in_place else logits.masked_fill(outside, -INFINITY)
        banning = [i for i in matchers if rows[i].sampling.bans_tokens]
        if banning:
            (at,) = staged([np.array(banning)], logits.device)
            theirs = constrained.index_select(0, at)
            has_none = theirs.amax(dim=-1, keepdim=True) == -INFINITY
            allowed = torch.where(outside.index_select(0, at), -INFINITY, 0.0)
            constrained = constrained.index_copy(0, at, torch.where(has_none, allowed, theirs))
        # A matcher that gave up, because its grammar is too complex at this place, allows what one allows that is done.
        failed = [(i, matcher) for i, matcher in matchers.items() if matcher.is_error()]
        return constrained, tuple((i, matcher.get_error().split("\n")[0]) for i, matcher in failed)

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


def _unpacked(bits: NDArray[np.int32], num_tokens: int, device: torch.device) -> Tensor:
    """[num_rows, num_tokens] bool, of so many bits in words [num_rows, num_words], the lowest first."""
    if device.type == "cpu":
        unpacked = np.unpackbits(bits.view(np.uint8), axis=-1, count=num_tokens, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    # Unpacked there, so that what is brought over is an eighth.
    (packed,) = staged([bits.view(np.uint8)], device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed[..., None].bitwise_right_shift(places) & 1).flatten(1)[:, :num_tokens].bool()
