"""Constrain answers to grammars: which tokens may come next, for the rows whose requests have a grammar.

A matcher follows its grammar with the tokens of the answer. It is derived from the token table like everything else:
before a token is chosen, it consumes the tokens that the table has and that it has not consumed. That is the token of
the step before or, after a preemption, the whole answer so far. Grammars: llguidance, chosen in
docs/structured_output.md.
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

from servekit.protocol.grammar_matcher import grammar_tokenizer, matcher_for
from servekit.protocol.messages import SlotAssignment
from workers.batch import SamplingRow, SlotTable
from workers.device.transfer import DeviceEvent, to_device, to_host

MAX_GRAMMARS_KEPT = 256
INFINITY = float("inf")


@dataclass(slots=True)
class _GrammarState:
    """One sequence's place in its grammar."""

    assignment: SlotAssignment
    matcher: LLMatcher
    num_consumed: int = 0  # tokens of the answer


@dataclass(frozen=True, slots=True)
class GrammarBatch:
    """The grammar states of a step's rows, and the tokens that they have not consumed, on their way to the host."""

    states: dict[int, _GrammarState]  # by row
    num_unseen: list[int]  # for each of them
    token_ids: Tensor | None  # [sum of num_unseen] int32, once `arrival` is complete; None if there are none
    arrival: DeviceEvent | None

    def advance(self) -> dict[int, LLMatcher]:
        """Let each matcher consume its unseen tokens, and return the matchers by row.

        Waits for the tokens. May be called once.
        """
        if self.arrival is not None and self.token_ids is not None:
            self.arrival.wait()
            unseen = iter(self.token_ids.tolist())
            for state, count in zip(self.states.values(), self.num_unseen, strict=True):
                for token_id in islice(unseen, count):  # one by one: a matcher that has ended takes an end of sequence
                    state.matcher.consume_token(token_id)
                state.num_consumed += count
        return {i: state.matcher for i, state in self.states.items()}


class GrammarMatchers:
    """The matchers of the sequences in their slots, and the grammars compiled lately."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._states: dict[int, _GrammarState] = {}  # by slot
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The model's tokenizer, as llguidance reads it."""
        return grammar_tokenizer(self._tokenizer_file, self._vocab_size, self._eos_token_ids)

    def warm_up(self) -> None:
        """Read the tokenizer before the first request: for a large vocabulary it takes half a second.

        Where llguidance cannot use the tokenizer, the sandbox reports it to the operator and to clients, and no request
        with a grammar reaches the worker.
        """
        with contextlib.suppress(ValueError, KeyError, OSError):
            _ = self.tokenizer

    def begin(self, rows: list[SamplingRow], table: SlotTable) -> GrammarBatch:
        """Start copying the tokens that the rows' matchers have not consumed.

        Called before the forward pass is launched: waiting for the copy then waits for the step that chose those
        tokens, while the device computes this one.
        """
        states = {
            i: self._state(table.slot_assignments[row.slot])
            for i, row in enumerate(rows)
            if row.sampling.grammar is not None
        }
        # Nearly always each lacks one token, the newest; after a preemption, the whole answer; and none where a step
        # is executed again in parts.
        ends = [rows[i].slot * table.row_length + rows[i].position for i in states]
        counts = [max(0, rows[i].num_outputs - state.num_consumed) for i, state in states.items()]
        if not any(counts):
            return GrammarBatch(states, counts, None, None)
        cells = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        (indices,) = to_device([np.concatenate(cells)], table.token_ids.device)
        token_ids = to_host(table.token_ids.index_select(0, indices))
        return GrammarBatch(states, counts, token_ids, DeviceEvent(indices.device))

    def constrain(
        self, logits: Tensor, rows: list[SamplingRow], grammars: GrammarBatch, in_place: bool = False
    ) -> tuple[Tensor, tuple[tuple[int, str], ...]]:
        """Set logits [num_rows, vocab_size] to minus infinity for tokens that a row's grammar does not allow next.

        Returns the logits, and (row, error) for each matcher that failed. Where a row's other parameters leave none of
        the tokens that its grammar allows, the grammar wins. Masks are computed in one thread and after the forward
        pass: a thread beside it, and llguidance's own pool, were slower on two cores.
        """
        if not grammars.states:
            return logits, ()
        matchers = grammars.advance()
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
            (indices,) = to_device([np.array(banning)], logits.device)
            of_banning = constrained.index_select(0, indices)
            has_none = of_banning.amax(dim=-1, keepdim=True) == -INFINITY
            allowed = torch.where(outside.index_select(0, indices), -INFINITY, 0.0)
            constrained = constrained.index_copy(0, indices, torch.where(has_none, allowed, of_banning))
        # A matcher fails where its grammar is too complex at this place. It then allows what a finished one allows.
        failed = [(i, matcher) for i, matcher in matchers.items() if matcher.is_error()]
        return constrained, tuple((i, matcher.get_error().split("\n")[0]) for i, matcher in failed)

    def _state(self, assignment: SlotAssignment) -> _GrammarState:
        """Return the state of the sequence that has the slot now; at the grammar's start if it is new there."""
        state = self._states.get(assignment.slot)
        if state is None or state.assignment is not assignment:
            assert assignment.sampling.grammar is not None
            state = _GrammarState(assignment, self._matcher(assignment.sampling.grammar))
            self._states[assignment.slot] = state
        return state

    def _matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the grammar's start. Copies of a compiled matcher share what they can."""
        if grammar not in self._compiled:
            self._compiled[grammar] = matcher_for(grammar, self.tokenizer)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_GRAMMARS_KEPT:
            self._compiled.popitem(last=False)
        return self._compiled[grammar].deep_copy()


def _unpacked(bits: NDArray[np.int32], num_tokens: int, device: torch.device) -> Tensor:
    """Return [num_rows, num_tokens] bool, given that many bits in words [num_rows, num_words], the lowest first."""
    if device.type == "cpu":
        unpacked = np.unpackbits(bits.view(np.uint8), axis=-1, count=num_tokens, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    # Unpacked on the device: an eighth of the bytes to copy.
    (packed,) = to_device([bits.view(np.uint8)], device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed[..., None].bitwise_right_shift(places) & 1).flatten(1)[:, :num_tokens].bool()
