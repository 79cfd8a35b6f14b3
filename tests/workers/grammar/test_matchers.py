"""Claims about the time, memory and lexer states of grammars. Masks are compared with those of llguidance alone."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest
from llguidance import LLTokenizer

from servekit.engine.model_files import DEMO_MODEL_PATH
from servekit.protocol import grammar_matcher
from servekit.protocol.grammar_matcher import grammar_tokenizer, matcher_for
from servekit.requests.generation import GrammarKind
from servekit.sandbox.compile_grammar import compile_grammar
from servekit.sandbox.jobs import CompileGrammar, Done
from workers.grammar import matchers as matchers_module
from workers.grammar.cache import CompiledGrammar
from workers.grammar.matchers import GrammarMatchers
from workers.grammar.messages import Ask, AskMasks, Begin, Mask, mask_bytes

VOCAB_SIZE = 2048
NUM_SLOTS = 8
# A lexer that remembers the places of many letters. Each number makes another text of it.
HOSTILE = "start: ({names})*\n{terminals}"
PATTERNS = [f"{chr(ord('a') + index)}.{{{index + 3}}}$" for index in range(16)]
SHARED_SCHEMA = {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": each} for each in PATTERNS]}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return grammar_tokenizer(DEMO_MODEL_PATH / "tokenizer.json", VOCAB_SIZE, [2])


def compiled(tokenizer: LLTokenizer, kind: GrammarKind, text: str) -> str:
    outcome = compile_grammar(CompileGrammar(kind, text), tokenizer)
    assert isinstance(outcome, Done), outcome
    return outcome.text


def hostile(tokenizer: LLTokenizer, number: int) -> str:
    letters = [chr(ord("a") + index // 30) for index in range(300)]
    letters[number] = "k"
    terminals = [f"T{index}: /[a-z]*{letter}[a-z]{{{index % 30}}}/" for index, letter in enumerate(letters)]
    names = "|".join(f"T{index}" for index in range(300))
    text = HOSTILE.format(names=names, terminals="\n".join(terminals))
    return compiled(tokenizer, GrammarKind.EBNF, text)


class Process:
    """The mask process without a process: what it computes, and its memory for masks."""

    def __init__(self, tokenizer: LLTokenizer, max_drafts: int = 0, **limits: Any) -> None:
        self.row_bytes, self.rows_of_slot = mask_bytes(VOCAB_SIZE), 1 + max_drafts
        self.shared = ctypes.create_string_buffer(NUM_SLOTS * self.rows_of_slot * self.row_bytes)
        address = ctypes.addressof(self.shared)
        self.matchers = GrammarMatchers(tokenizer, address, self.row_bytes, max_drafts, **limits)
        self.slots: dict[int, int] = {}
        self.order: list[int] = []  # sequences, as their masks came
        self.errors: dict[int, str] = {}
        self.slow: set[int] = set()
        self.answers: dict[int, Mask] = {}  # the last one of each sequence

    def begin(self, number: int, slot: int, grammar: str, tenant: str = "", group_id: int | None = None) -> None:
        self.slots[number] = slot
        group_id = number if group_id is None else group_id
        self.matchers.accept(AskMasks((), (Begin(number, slot, tenant, group_id, 0),), (grammar,)))

    def ask(self, number: int, *token_ids: int) -> None:
        self.matchers.accept(AskMasks((Ask(number, token_ids),)))

    def work(self) -> None:
        while (sequence := self.matchers.next_sequence()) is not None:
            if (mask := self.matchers.advance(sequence)) is not None:
                self.order.append(mask.sequence)
                self.answers[mask.sequence] = mask
                if mask.error:
                    self.errors[mask.sequence] = mask.error
                if mask.is_slow:
                    self.slow.add(mask.sequence)

    def mask(self, number: int, *token_ids: int) -> int:
        """Ask, work, and return the mask as a number; 0 for an error."""
        self.ask(number, *token_ids)
        self.work()
        return 0 if number in self.errors else self.row(number, 0)

    def row(self, number: int, num_drafts: int) -> int:
        """Return the mask behind so many drafts as a number."""
        begin = (self.slots[number] * self.rows_of_slot + num_drafts) * self.row_bytes
        return int.from_bytes(self.shared.raw[begin : begin + self.row_bytes], "little")

    def ask_drafts(self, number: int, drafts: tuple[int, ...], num_forced: int = 0) -> Mask:
        """Ask for masks behind drafts of the sequence's present position, work, and return the answer."""
        self.matchers.accept(AskMasks((Ask(number, (), len(self.order), drafts, num_forced),)))
        self.work()
        assert self.answers[number].number == len(self.order) - 1
        return self.answers[number]

    def begin_second(self, number: int, slot: int, grammar: str) -> None:
        """Begin a sequence whose grammar has computed masks before: the first mask has none behind drafts."""
        self.begin(1000 + number, slot, grammar)
        assert self.mask(1000 + number)
        self.begin(number, slot, grammar)


def grammars(process: Process) -> dict[tuple[str, str], CompiledGrammar]:
    """Return the grammars by tenant and text."""
    cache = process.matchers._cache
    return {(tenant, each.text): each for tenant in cache._tenants for each in cache.of_tenant(tenant)}


def tokens_of(mask: int) -> list[int]:
    return [token_id for token_id in range(VOCAB_SIZE) if mask >> token_id & 1]


def walk(process: Process, number: int, choose: Callable[[list[int]], int], num_tokens: int) -> list[int]:
    """Follow an answer whose tokens `choose` picks from those that are allowed; return its masks."""
    masks, token_ids = [], []
    for _ in range(num_tokens):
        masks.append(process.mask(number, *token_ids[-1:]))
        allowed = [token_id for token_id in tokens_of(masks[-1]) if token_id != 2]
        if not allowed:
            break
        token_ids.append(choose(allowed))
    return masks


def chooser(seed: int) -> Callable[[list[int]], int]:
    state = seed

    def choose(allowed: list[int]) -> int:
        nonlocal state
        state = (state * 1103515245 + 12345) % 2**31
        return allowed[(state >> 8) % len(allowed)]

    return choose


GRAMMARS = [
    (GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"a": {"type": "string"}}})),
    (GrammarKind.JSON_SCHEMA, json.dumps(SHARED_SCHEMA)),
    (GrammarKind.REGEX, r"\d{4}-[01]\d( [a-z]+)*"),
    (GrammarKind.EBNF, 'start: "(" (start | "x"){0,2} ")"'),
]


@pytest.mark.parametrize("max_grammar_bytes", [matchers_module.MAX_GRAMMAR_BYTES, 2**20])
@pytest.mark.parametrize(("kind", "text"), GRAMMARS)
def test_masks_are_those_of_llguidance_also_where_lexers_are_replaced(
    kind: GrammarKind, text: str, max_grammar_bytes: int, tokenizer: LLTokenizer
) -> None:
    grammar = compiled(tokenizer, kind, text)
    process = Process(tokenizer, max_grammar_bytes=max_grammar_bytes)
    process.begin(1, 0, grammar)
    alone, choose, token_ids = matcher_for(grammar, tokenizer), chooser(3), []
    for _ in range(40):
        mask = process.mask(1, *token_ids[-1:])
        assert mask == int.from_bytes(alone.compute_bitmask(), "little")
        token_ids.append(choose(tokens_of(mask)))
        assert alone.consume_token(token_ids[-1])
        if token_ids[-1] == 2:
            break
    assert not process.errors


def masks_alone(grammar: str, tokenizer: LLTokenizer, token_ids: list[int], drafts: tuple[int, ...]) -> list[int]:
    """Return llguidance's own masks, one behind each draft, as far as the drafts are allowed."""
    alone, masks = matcher_for(grammar, tokenizer), []
    for token_id in token_ids:
        assert alone.consume_token(token_id)
    for draft in drafts:
        if not int.from_bytes(alone.compute_bitmask(), "little") >> draft & 1 or alone.is_stopped():
            break
        assert alone.consume_token(draft)
        masks.append(int.from_bytes(alone.compute_bitmask(), "little"))
    return masks


@pytest.mark.parametrize(("kind", "text"), GRAMMARS)
def test_masks_behind_drafts_are_those_behind_tokens(
    kind: GrammarKind, text: str, tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some drafts continue the answer, until one is random. The masks behind them change no later mask."""
    monkeypatch.setattr(matchers_module, "SLICE_S", 60.0)
    grammar, max_drafts = compiled(tokenizer, kind, text), 4
    process = Process(tokenizer, max_drafts)
    process.begin_second(1, 0, grammar)
    choose, anything = chooser(3), chooser(5)
    token_ids: list[int] = []
    num_allowed = num_cut = 0
    for position in range(25):
        mask = process.mask(1, *token_ids[-1:])
        alone = matcher_for(grammar, tokenizer)
        assert not token_ids or alone.consume_tokens(token_ids)
        assert mask == int.from_bytes(alone.compute_bitmask(), "little"), "drafts changed a later mask"
        for repetition in range(3):
            drafts: list[int] = []
            ahead = alone.deep_copy()
            while len(drafts) < max_drafts + repetition and not ahead.is_stopped():
                allowed = tokens_of(int.from_bytes(ahead.compute_bitmask(), "little"))
                is_right = len(drafts) < (position + repetition) % (max_drafts + 1)
                drafts.append(choose(allowed) if is_right else anything(list(range(3, VOCAB_SIZE))))
                if drafts[-1] == 2 or not ahead.consume_token(drafts[-1]):
                    break
            answer = process.ask_drafts(1, tuple(drafts))
            expected = masks_alone(grammar, tokenizer, token_ids, tuple(drafts[:max_drafts]))
            if 2 in drafts:  # an end may or may not be looked behind
                expected = expected[: answer.num_drafts]
            assert answer.num_drafts == len(expected) and not answer.error
            assert [process.row(1, 1 + index) for index in range(len(expected))] == expected
            assert process.row(1, 0) == mask
            num_allowed += len(expected)
            num_cut += len(expected) < min(len(drafts), max_drafts)
        token_ids.append(choose(tokens_of(mask)))
        if token_ids[-1] == 2:
            break
    assert num_allowed > 10 and num_cut > 3, "too little was tested"


def test_forced_tokens_are_those_of_llguidance_and_their_masks_are_there_if_they_are_wanted(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matchers_module, "SLICE_S", 60.0)
    schema = {"type": "object", "properties": {"a_long_name": {"enum": ["reddish", "green"]}, "b": {"const": "bbb"}}}
    schema |= {"required": ["a_long_name", "b"], "additionalProperties": False}
    grammar, max_drafts = compiled(tokenizer, GrammarKind.JSON_SCHEMA, json.dumps(schema)), 4
    process = Process(tokenizer, max_drafts)
    process.begin_second(1, 0, grammar)
    choose, token_ids, num_forced = chooser(1), [], 0
    while True:
        mask, answer = process.mask(1, *token_ids[-1:]), process.answers[1]
        alone = matcher_for(grammar, tokenizer)
        assert not token_ids or alone.consume_tokens(token_ids)
        forced = tuple(alone.compute_ff_tokens())[:max_drafts]
        assert answer.forced == forced and answer.num_drafts == 0, "their masks were not wanted"
        for wanted in (2, max_drafts):
            answer = process.ask_drafts(1, (), num_forced=wanted)
            expected = masks_alone(grammar, tokenizer, token_ids, forced[:wanted])
            assert answer.num_drafts == len(expected) == len(forced[:wanted])
            assert [process.row(1, 1 + index) for index in range(len(expected))] == expected
        num_forced += bool(forced)
        token_ids.append(forced[0] if forced else choose(tokens_of(mask)))
        if token_ids[-1] == 2:
            break
    assert num_forced > 8


def test_long_texts_that_are_forced_are_not_divided_into_tokens(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, 4)
    for number, length in ((1, 100), (2, 10_000)):
        text = json.dumps(["certainly " * (length // 10)])
        process.begin_second(number, number, compiled(tokenizer, GrammarKind.CHOICE, text))
        process.mask(number)
    assert len(process.answers[1].forced) == 4 and not process.answers[2].forced


def test_drafts_have_a_share_of_the_time_and_never_end_a_request(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, 4)
    process.begin_second(1, 0, compiled(tokenizer, GrammarKind.REGEX, "[a-z]+"))
    process.mask(1)
    group = process.matchers._groups[1]
    used_s = group.used_s
    assert process.ask_drafts(1, (70, 71)).num_drafts == 2
    assert group.drafts_s > 0
    group.drafts_s = 60.0
    assert process.ask_drafts(1, (72, 73)).num_drafts == 0
    assert process.mask(1, 70) and not process.errors
    assert group.used_s < used_s + 1.0


def test_a_grammar_that_fails_behind_drafts_fails_where_it_fails_without_them(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes too ambiguous after some letters."""
    monkeypatch.setattr(matchers_module, "SLICE_S", 60.0)
    limits = grammar_matcher.LLParserLimits(step_max_items=1500, verbose_errors=False)
    monkeypatch.setattr(grammar_matcher, "LIMITS", limits)
    grammar = compiled(tokenizer, GrammarKind.EBNF, "start: s\ns: s s s | s s | /[a-z ]/ |")
    letters = (70,) * 40
    num_masks = []
    for max_drafts in (0, 8):
        process = Process(tokenizer, max_drafts)
        process.begin_second(1, 0, grammar)
        most_drafts = None
        for position in range(len(letters)):
            if not process.mask(1, *letters[max(0, position - 1) : position]):
                break
            if max_drafts:
                answer = process.ask_drafts(1, letters[position:])
                assert not answer.error
                most_drafts = position + answer.num_drafts
        num_masks.append(position)
        assert process.errors
    assert num_masks[0] == num_masks[1] == 1 + most_drafts, "drafts reached the failure, and did not cause it"


def test_no_draft_is_looked_at_with_the_first_mask_or_where_memory_is_scarce(tokenizer: LLTokenizer) -> None:
    """Otherwise drafts could end a grammar for its size, or have it compiled again and again."""
    grammar = compiled(tokenizer, GrammarKind.REGEX, "[a-z]+")
    process = Process(tokenizer, 4, max_grammar_bytes=2**30)
    process.begin(1, 0, grammar)
    process.mask(1)
    assert process.ask_drafts(1, (70, 71)).num_drafts == 0
    process.mask(1, 70)
    assert process.ask_drafts(1, (70, 71)).num_drafts == 2
    process.mask(1, 70)
    process.matchers._max_grammar_bytes = 2 * grammars(process)["", grammar].num_bytes - 2
    assert process.ask_drafts(1, (70, 71)).num_drafts == 0 and not process.errors


def test_nothing_is_compiled_for_drafts_alone(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, 4)
    grammar = compiled(tokenizer, GrammarKind.REGEX, "[a-z]+")
    process.begin_second(1, 0, grammar)
    mask = process.mask(1)
    process.matchers._drop(grammars(process)["", grammar])
    answer = process.ask_drafts(1, (70, 71))
    assert answer.num_drafts == 0 and not answer.error and process.row(1, 0) == mask
    assert grammars(process)["", grammar].root is None


def test_asks_that_come_before_the_answer_are_answered_together(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, 4)
    process.begin_second(1, 0, compiled(tokenizer, GrammarKind.REGEX, "[a-z]+"))
    process.order.clear()
    process.matchers.accept(AskMasks((Ask(1, (70,), 1), Ask(1, (), 2, (71, 72, 3)))))
    process.work()
    assert process.order == [1] and process.answers[1] == Mask(1, number=2, num_drafts=2)


def test_hostile_grammars_stay_within_the_memory_of_all(tokenizer: LLTokenizer) -> None:
    max_bytes = 40 * 2**20
    process = Process(tokenizer, max_bytes=max_bytes, max_grammar_bytes=max_bytes // 2)
    most = 0
    for number in range(10):
        process.begin(number, number % NUM_SLOTS, hostile(tokenizer, number), tenant="a")
        for token_id in (70, 71, 72):
            process.mask(number, token_id)
            most = max(most, process.matchers.num_bytes)
    assert 2 * 2**20 < most <= max_bytes


def test_memory_is_taken_from_the_tenant_that_holds_most(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, max_bytes=24 * 2**20, max_grammar_bytes=20 * 2**20)
    modest = compiled(tokenizer, GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}')
    process.begin(1, 0, modest, tenant="modest")
    process.mask(1)
    kept = grammars(process)["modest", modest].root
    for number in range(2, 12):
        process.begin(number, 1 + number % 4, hostile(tokenizer, number), tenant="greedy")
        process.mask(number, 70)
    dropped = [each for each in grammars(process).values() if each.root is None]
    assert grammars(process)["modest", modest].root is kept
    assert dropped or len(grammars(process)) < 11, "nothing was dropped, so nothing was tested"


def test_an_exhausted_lexer_breaks_no_later_answer_of_its_own_tenant_or_of_another(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer alone needs fewer lexer states than there may be, and all together need more."""
    grammar = compiled(tokenizer, GrammarKind.JSON_SCHEMA, json.dumps(SHARED_SCHEMA))
    limits = grammar_matcher.LLParserLimits(max_lexer_states=20_000, step_lexer_fuel=100_000, verbose_errors=False)
    monkeypatch.setattr(grammar_matcher, "LIMITS", limits)
    process = Process(tokenizer)
    num_rebuilt, root = -1, None
    for number in range(12):
        process.begin(number, 0, grammar, tenant="a")
        walk(process, number, chooser(number), 30)
        num_rebuilt += grammars(process)["a", grammar].root is not root
        root = grammars(process)["a", grammar].root
    assert num_rebuilt > 0, "the lexer was never exhausted, so nothing was tested"
    process.begin(100, 1, grammar, tenant="b")
    walk(process, 100, chooser(5), 30)
    assert not process.errors
    assert grammars(process)["b", grammar].root is not grammars(process)["a", grammar].root


def test_a_grammar_that_alone_needs_more_than_its_bound_fails(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, max_grammar_bytes=2**18)
    process.begin(1, 0, hostile(tokenizer, 1))
    process.mask(1, 70)
    assert "bytes" in process.errors[1] and f"{2**18:,}" in process.errors[1] and "simpler" in process.errors[1]


def test_a_request_that_used_up_its_time_ends_in_all_its_answers_and_no_other(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer)
    grammar = compiled(tokenizer, GrammarKind.REGEX, "[a-z]+")
    for number, group_id in ((1, 7), (2, 7), (3, 8)):
        process.begin(number, number, grammar, group_id=group_id)
        assert process.mask(number)
    process.matchers._groups[7].used_s = 60.0
    for number in (1, 2, 3):
        process.mask(number, 70)
    assert set(process.errors) == {1, 2} and "60.00 s" in process.errors[1]


def test_time_is_counted_for_the_answers_of_a_request_together(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer)
    grammar = compiled(tokenizer, GrammarKind.EBNF, "start: s\ns: s s s | s s | /[a-z ]/ |")
    process.begin(1, 1, grammar, group_id=7)
    process.begin(2, 2, grammar, group_id=7)
    process.mask(1)
    first_s = process.matchers._groups[7].used_s
    process.mask(2)
    assert process.matchers._groups[7].used_s > first_s > 0
    assert process.matchers._groups[7].num_tokens == 0


def test_the_tenant_that_used_least_goes_first_and_then_its_cheapest_grammar(tokenizer: LLTokenizer) -> None:
    """The times are set, because they depend on the machine."""
    process = Process(tokenizer)
    cheap, dear = (compiled(tokenizer, GrammarKind.REGEX, f"[a-z]{{{count}}}") for count in (2, 3))
    for number, (tenant, grammar) in enumerate([("a", dear), ("a", cheap), ("a", dear), ("b", dear), ("b", cheap)]):
        process.begin(number, number, grammar, tenant=tenant)
        process.mask(number)
        grammars(process)[tenant, grammar].mask_s = 1.0 if grammar == dear else 0.1
    process.order.clear()
    process.matchers._usage._used_s = {"a": 1000.0, "b": 1.0}
    for number in range(5):
        process.ask(number)
    process.work()
    assert process.order == [4, 3, 1, 0, 2]


def test_a_slot_that_is_assigned_anew_forgets_what_was_asked_for_before(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer)
    process.begin(1, 0, compiled(tokenizer, GrammarKind.REGEX, "a+"))
    process.ask(1)
    process.begin(2, 0, compiled(tokenizer, GrammarKind.REGEX, "b+"))
    process.ask(2)
    process.work()
    assert process.order == [2]
    assert set(process.matchers._sequences) == set(process.matchers._groups) == {2}
    assert [text for _, text in grammars(process)] == [process.matchers._sequences[2].grammar.text]


def test_room_is_made_at_the_cost_of_the_tenant_that_holds_most(tokenizer: LLTokenizer) -> None:
    process = Process(tokenizer, max_bytes=16 * 2**20, max_grammar_bytes=12 * 2**20)
    process.begin(1, 0, hostile(tokenizer, 1), tenant="greedy")
    process.mask(1, 70)
    greedy_s = process.matchers._usage.used_s("greedy")
    modest = compiled(tokenizer, GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}')
    process.matchers._max_bytes = process.matchers.num_bytes
    process.matchers._usage._decayed_s = float("inf")  # so that nothing is halved meanwhile
    process.begin(2, 1, modest, tenant="modest")
    process.mask(2)
    assert grammars(process)["greedy", hostile(tokenizer, 1)].root is None, "nothing was dropped"
    assert process.matchers._usage.used_s("greedy") > greedy_s
    assert process.matchers._groups[2].used_s < process.matchers._usage.used_s("modest") + 1e-9


def test_a_piece_of_work_that_takes_too_long_makes_its_tenant_slow_and_no_other(tokenizer: LLTokenizer) -> None:
    """All pieces are too long for tenant a, by a limit that changes."""
    process = Process(tokenizer, max_piece_s=float("inf"))
    first, second = (compiled(tokenizer, GrammarKind.REGEX, f"[a-z]{{{count}}}") for count in (2, 3))
    for number, (tenant, grammar) in enumerate([("a", first), ("a", second), ("b", first)]):
        process.begin(number, number, grammar, tenant=tenant)
        assert process.mask(number)
    process.matchers._max_piece_s = 0.0
    process.ask(0)
    process.work()
    process.matchers._max_piece_s = float("inf")
    assert process.slow == {0}
    assert grammars(process)["a", first].root is None and grammars(process)["a", second].root is None
    process.ask(1)
    process.work()
    assert process.slow == {0, 1} and not process.errors
    assert process.mask(2) and process.slow == {0, 1}
