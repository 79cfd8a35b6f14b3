"""Follow answers in their grammars, one small piece of work after the other, within budgets of time and memory.

A sequence's matcher is derived from its tokens. So compiled grammars and matchers are a cache. They may be dropped, for
memory or because a lexer is exhausted. When they are needed, they are made again from the grammar's text and tokens.

Copies of a compiled grammar share its lexer, whose states accumulate with what the answers contain. It is shared by
answers of one tenant only, and replaced by a fresh one when it fails or becomes too large.
"""

from __future__ import annotations

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush

from llguidance import LLMatcher, LLTokenizer

from servekit.protocol.grammar_matcher import matcher_for
from workers.grammar.budgets import GroupBudget, TenantUsage
from workers.grammar.cache import CompiledGrammar, GrammarCache
from workers.grammar.memory import allocated_bytes, return_freed_memory
from workers.grammar.messages import Ask, AskMasks, Begin, Mask, num_common

MAX_BYTES = 256 * 2**20  # of all grammars and matchers in a process
MAX_GRAMMAR_BYTES = 128 * 2**20  # of one compiled grammar and its matchers
TRIM_BYTES = 32 * 2**20  # if at least this much is freed at once, memory is returned to the system
SLICE_S = 0.002  # of work on one sequence, before another one is chosen; one mask or compilation is not divided
# Shorter work cannot allocate more than some kilobytes. They are counted with the next piece of work that is measured.
MEASURED_S = 20e-6
# If a grammar forces a longer text, its tokens are not used as drafts: finding them takes 1 to 4 µs for each byte.
MAX_FORCED_BYTES = 1024


@dataclass(eq=False, slots=True)
class SequenceState:
    """The state of one answer in this process."""

    number: int
    slot: int
    group_id: int
    grammar: CompiledGrammar
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    num_consumed: int = 0  # by the grammar's matcher of this sequence, if there is one
    ask: Ask | None = None  # the last one; None before the first
    is_waiting: bool = False  # whether the answer to it is due
    is_slow: bool = False  # another process follows it, because its tenant is slow
    is_masked: bool = False  # the mask of the next token is in the shared memory
    masked_drafts: tuple[int, ...] = ()  # and those after these drafts
    forced: tuple[int, ...] = ()  # the tokens that the grammar forces next, if that is known

    @property
    def expected_s(self) -> float:
        """The expected time of the next piece of work; infinite if the grammar must be compiled first."""
        return float("inf") if self.grammar.root is None else self.grammar.mask_s


class GrammarMatchers:
    """All sequences of a worker that have a grammar.

    `accept` takes what a step asks for. `advance` does a piece of the work, for the tenant that has used least lately.
    `masks_address` is that of the masks, of `mask_bytes` each: by slot one for the next token, and one after each of
    `max_drafts` drafts. A tenant with a piece of work of more than `max_piece_s` is slow: its sequences are given up
    here.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        masks_address: int,
        mask_bytes: int,
        max_drafts: int = 0,
        clock: Callable[[], float] = time.monotonic,
        max_bytes: int = MAX_BYTES,
        max_grammar_bytes: int = MAX_GRAMMAR_BYTES,
        max_piece_s: float = float("inf"),
    ) -> None:
        self._tokenizer = tokenizer
        self._masks_address = masks_address
        self._mask_bytes = mask_bytes
        self._max_drafts = max_drafts
        self._clock = clock
        self._max_bytes = max_bytes
        self._max_grammar_bytes = max_grammar_bytes
        self._max_piece_s = max_piece_s
        self._sequences: dict[int, SequenceState] = {}  # by number
        self._slots: dict[int, SequenceState] = {}
        self._cache = GrammarCache()
        self._groups: dict[int, GroupBudget] = {}
        self._group_sizes: defaultdict[int, int] = defaultdict(int)
        # Of each tenant, a heap of (a mask's time, place in the order of asking, sequence).
        self._waiting: dict[str, list[tuple[float, int, SequenceState]]] = {}
        self._num_asked = 0
        self._usage = TenantUsage()
        self._used_s = time.process_time()  # of this process, up to the end of the last work; each reading takes 1 µs
        self._base_bytes = self._measured_bytes = allocated_bytes()

    @property
    def num_bytes(self) -> int:
        """Bytes of all grammars and matchers, as they were last measured."""
        return self._measured_bytes - self._base_bytes

    # -- what the worker asks for ---------------------------------------------------------------------------------

    def accept(self, message: AskMasks) -> None:
        """Take what a step asks for."""
        for begin in message.begins:
            self._begin(begin, message.grammars[begin.grammar])
        for ask in message.asks:
            self._ask(ask)
        self._read_used_s()

    def _begin(self, begin: Begin, text: str) -> None:
        if begin.slot in self._slots:
            self._end(self._slots[begin.slot])
        grammar = self._cache.acquire(begin.tenant, text)
        sequence = SequenceState(begin.sequence, begin.slot, begin.group_id, grammar)
        self._sequences[begin.sequence] = self._slots[begin.slot] = sequence
        self._groups.setdefault(begin.group_id, GroupBudget())
        self._group_sizes[begin.group_id] += 1

    def _end(self, sequence: SequenceState) -> None:
        del self._sequences[sequence.number], self._slots[sequence.slot]
        sequence.is_waiting = False
        with self._charging(sequence.grammar.tenant):
            self._drop_matcher(sequence)
            self._cache.release(sequence.grammar)
        self._group_sizes[sequence.group_id] -= 1
        if not self._group_sizes[sequence.group_id]:
            del self._group_sizes[sequence.group_id], self._groups[sequence.group_id]

    def _ask(self, ask: Ask) -> None:
        sequence, token_ids = self._sequences[ask.sequence], ask.token_ids
        sequence.ask = ask
        if token_ids:
            sequence.token_ids.extend(token_ids)
            self._groups[sequence.group_id].num_tokens += len(token_ids)
            sequence.is_masked, sequence.masked_drafts = False, ()
            if sequence.forced:
                is_as_forced = sequence.forced[: len(token_ids)] == token_ids
                sequence.forced = sequence.forced[len(token_ids) :] if is_as_forced else ()
        if not sequence.is_waiting:
            sequence.is_waiting = True
            self._enqueue(sequence)

    def _enqueue(self, sequence: SequenceState) -> None:
        self._num_asked += 1
        entry = (sequence.grammar.mask_s, self._num_asked, sequence)
        heappush(self._waiting.setdefault(sequence.grammar.tenant, []), entry)

    # -- the work -------------------------------------------------------------------------------------------------

    def next_sequence(self) -> SequenceState | None:
        """Take the next sequence to work on from its queue, and return it; None if no sequence waits.

        The tenant that has used least processor time lately goes first; of its sequences, that with the cheapest masks.
        """
        while self._waiting:
            tenant = min(self._waiting, key=self._usage.used_s) if len(self._waiting) > 1 else next(iter(self._waiting))
            queue = self._waiting[tenant]
            _, _, sequence = heappop(queue)
            if not queue:
                del self._waiting[tenant]
            if sequence.is_waiting:
                return sequence
        return None

    def advance(self, sequence: SequenceState) -> Mask | None:
        """Do a piece of the work for a sequence. Returns its mask or its error; None if there is more to do."""
        if sequence.is_slow:
            return self._finish(sequence)
        group, grammar = self._groups[sequence.group_id], sequence.grammar
        if refusal := group.refusal:
            return self._finish(sequence, refusal)
        is_done, error = self._work(sequence, grammar)
        used_s = self._read_used_s()
        group.used_s += used_s
        if is_done and self._max_drafts and used_s < SLICE_S and group.allows_drafts:
            self._look_ahead(sequence, grammar)
            drafts_s = self._read_used_s()
            group.drafts_s += drafts_s
            used_s += drafts_s
        if is_done:
            grammar.mask_s = (grammar.mask_s + used_s) / 2
        self._usage.charge(grammar.tenant, used_s, self._clock())
        if used_s > MEASURED_S:
            self._measure(grammar)
            if grammar.num_bytes > self._max_grammar_bytes:
                # The matcher is made again from the text and the tokens. This does not help if one mask alone needs
                # that much.
                if grammar.num_masks <= 1:
                    error = (
                        f"it takes {grammar.num_bytes:,} bytes to follow it; the limit is {self._max_grammar_bytes:,}: "
                        "make it simpler, or ask for a shorter answer"
                    )
                self._drop(grammar)
            self._make_room(grammar)
        if used_s > self._max_piece_s:
            self._give_up(grammar.tenant)
        if not (is_done or error):
            self._enqueue(sequence)
            return None
        return self._finish(sequence, error)

    def _give_up(self, tenant: str) -> None:
        """Follow no sequence of a slow tenant any longer, and free its memory. Those that wait are answered in turn."""
        for sequence in self._sequences.values():
            if sequence.grammar.tenant == tenant:
                sequence.is_slow = True
        for grammar in self._cache.of_tenant(tenant):
            self._drop(grammar)

    def _finish(self, sequence: SequenceState, error: str = "") -> Mask:
        ask = sequence.ask
        assert ask is not None
        sequence.is_waiting = False
        if error:
            self._drop_matcher(sequence)
        forced, masked = sequence.forced[: self._max_drafts], sequence.masked_drafts
        num_drafts = num_common(masked, ask.drafts or forced) if masked else 0
        return Mask(sequence.number, error, sequence.is_slow, ask.number, num_drafts, forced)

    def _read_used_s(self) -> float:
        """Return the processor time since the last reading."""
        before_s, self._used_s = self._used_s, time.process_time()
        return self._used_s - before_s

    def _work(self, sequence: SequenceState, grammar: CompiledGrammar) -> tuple[bool, str]:
        """Compile, consume tokens and compute the mask, as far as the slice of time allows.

        Returns whether the mask is there, and an error.
        """
        if sequence.is_masked:  # a dropped matcher is not made again for drafts
            return True, ""
        root = grammar.root or matcher_for(grammar.text, self._tokenizer)
        is_new = grammar.root is None
        self._cache.use(grammar, root)
        if is_new and root.is_error():
            return False, self._failure(grammar, root)
        if is_new and time.process_time() - self._used_s > SLICE_S:
            return False, ""
        matcher = grammar.matchers.get(sequence.number)
        if matcher is None:
            matcher = grammar.matchers[sequence.number] = root.deep_copy()
            sequence.num_consumed = 0
        token_ids = sequence.token_ids
        while sequence.num_consumed < len(token_ids):
            # Tokens are consumed one by one, because a matcher that has ended accepts an end of sequence.
            matcher.consume_token(token_ids[sequence.num_consumed])
            sequence.num_consumed += 1
            if not sequence.num_consumed % 16 and time.process_time() - self._used_s > SLICE_S:
                return False, ""
        self._compute_mask(sequence, matcher, 0)
        if not matcher.is_error():
            sequence.is_masked = True
            return True, ""
        return False, self._failure(grammar, matcher)

    def _compute_mask(self, sequence: SequenceState, matcher: LLMatcher, num_drafts: int) -> None:
        """Write the mask of the token that comes next in the matcher, which has consumed this many drafts."""
        row = sequence.slot * (1 + self._max_drafts) + num_drafts
        matcher.unsafe_compute_mask_ptr(self._masks_address + row * self._mask_bytes, self._mask_bytes)
        sequence.grammar.num_masks += 1

    def _look_ahead(self, sequence: SequenceState, grammar: CompiledGrammar) -> None:
        """Find the tokens that the grammar forces, and compute the masks after drafts, within the slice of time.

        The matcher consumes the drafts for that, and is rolled back. An error that a draft causes is no error of the
        answer: the matcher is dropped, and made again from the answer's tokens.

        Drafts must not make a grammar fail that would not fail without them. So there is no look ahead with the first
        mask of a fresh lexer, which decides whether a grammar that is too large fails. And a grammar of more than half
        of its bound has none, because it might be compiled again and again.
        """
        ask, matcher = sequence.ask, grammar.matchers.get(sequence.number)
        assert ask is not None
        if matcher is None or grammar.num_masks <= 1 or grammar.num_bytes > self._max_grammar_bytes // 2:
            return
        if not sequence.forced and 0 < len(matcher.compute_ff_bytes()) <= MAX_FORCED_BYTES:
            sequence.forced = tuple(matcher.compute_ff_tokens())
        drafts = ask.drafts[: self._max_drafts] or sequence.forced[: min(ask.num_forced, self._max_drafts)]
        num_masked, num_consumed = num_common(sequence.masked_drafts, drafts), 0
        while num_masked < len(drafts) and time.process_time() - self._used_s <= SLICE_S:
            # A matcher that has stopped accepts only an end of sequence, which it cannot roll back.
            if matcher.is_stopped() or matcher.try_consume_tokens([drafts[num_consumed]]) != 1:
                break
            num_consumed += 1
            if num_consumed > num_masked:  # the worker may be reading the masks that exist already
                self._compute_mask(sequence, matcher, num_consumed)
                if matcher.is_error():
                    break
                num_masked = num_consumed
        sequence.masked_drafts = drafts[:num_masked]
        if matcher.is_error() or (num_consumed and not matcher.rollback(num_consumed)):
            self._drop_matcher(sequence)

    def _failure(self, grammar: CompiledGrammar, matcher: LLMatcher) -> str:
        """Return why a matcher failed; empty if the cause may be what other answers left in the shared lexer."""
        error = matcher.get_error().split("\n")[0]
        if error.startswith("lexer error") and grammar.num_masks > 1:
            self._drop(grammar)
            return ""
        return error

    # -- memory ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _charging(self, tenant: str) -> Iterator[None]:
        """Count the processor time of the block for the tenant.

        This does not count against the request's own budget.
        """
        started_s = time.process_time()
        yield
        self._usage.charge(tenant, time.process_time() - started_s, self._clock())

    def _measure(self, grammar: CompiledGrammar) -> None:
        """Attribute to a grammar what was allocated since the last time."""
        now_bytes = allocated_bytes()
        self._cache.add_bytes(grammar, now_bytes - self._measured_bytes)
        self._measured_bytes = now_bytes

    def _drop_matcher(self, sequence: SequenceState) -> None:
        if sequence.grammar.matchers.pop(sequence.number, None) is not None:
            self._measure(sequence.grammar)

    def _drop(self, *grammars: CompiledGrammar) -> None:
        with self._freeing(grammars[0].tenant):
            for grammar in grammars:
                self._cache.drop(grammar)

    @contextmanager
    def _freeing(self, tenant: str) -> Iterator[None]:
        """Measure what the block frees, and count the time for the tenant: it may be half a millisecond."""
        before_bytes = self._measured_bytes
        with self._charging(tenant):
            yield
            self._measured_bytes = allocated_bytes()
            if before_bytes - self._measured_bytes > TRIM_BYTES:
                return_freed_memory()

    def _make_room(self, kept: CompiledGrammar) -> None:
        """Drop grammars until the rest is within bounds: of the tenant that holds most, the one not used for longest.

        `kept` stays, because it is within its own bound. The tenant that holds most at the beginning is charged for all
        of this.
        """
        while (excess_bytes := self.num_bytes - self._max_bytes) > 0:
            grammar = self._cache.least_recent(kept)
            if grammar is None:
                return
            with self._freeing(grammar.tenant):
                while grammar is not None and excess_bytes > 0:
                    excess_bytes -= grammar.num_bytes
                    self._cache.drop(grammar)
                    grammar = self._cache.least_recent(kept)
