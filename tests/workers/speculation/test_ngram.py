"""Claims about prompt lookup: it finds what a search finds, forgets what is void, and its memory is bounded."""

from __future__ import annotations

import random
import sys

import pytest

from servekit.protocol.messages import SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from workers.speculation.drafter import DraftRequest
from workers.speculation.ngram import FEW, LENGTHS, IndexedText, NgramDrafter

MAX_BYTES_PER_TOKEN = 40
MIN_BYTES = 8 * 1024  # of an index of a short text


def expected(tokens: list[int], max_tokens: int) -> tuple[int, ...]:
    """The continuation that a search from the end finds."""
    for length in LENGTHS:
        newest = tokens[-length:]
        for begin in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[begin - length : begin] == newest:
                found = tokens[begin : begin + max_tokens]
                while len(found) < max_tokens:
                    found += found[: max_tokens - len(found)]
                return tuple(found)
    return ()


def followers(tokens: list[int], length: int) -> set[int]:
    """The tokens that have followed the `length` newest ones."""
    newest = tokens[-length:]
    return {tokens[end] for end in range(length, len(tokens)) if tokens[end - length : end] == newest}


@pytest.mark.parametrize("at_once", [1, 5, FEW, 300])
def test_continuation_is_what_followed_the_newest_tokens_last_time(at_once: int) -> None:
    rng = random.Random(at_once)
    tokens: list[int] = []
    text, num_found, num_lost = IndexedText(), 0, 0
    while len(tokens) < 1500:
        # Pieces of the text so far, between random tokens.
        begin = rng.randrange(len(tokens) + 1)
        piece = tokens[begin : begin + rng.randrange(1, 30)] if rng.random() < 0.5 else []
        piece += [rng.randrange(2**31 - 1) if rng.random() < 0.3 else rng.randrange(40) for _ in range(at_once)]
        text.replace(len(tokens), tuple(piece))
        tokens += piece
        found, wanted = text.continuation(6), expected(tokens, 6)
        num_found += bool(found)
        if found != wanted:  # an n-gram with the same place has replaced the newest one
            num_lost += 1
            assert found == () or found[0] in followers(tokens, LENGTHS[-1])
    assert num_found > 5 or at_once == 300
    assert num_lost <= num_found / 20 + 1


def test_text_that_repeats_itself_goes_on_so() -> None:
    text = IndexedText()
    text.replace(0, (7, 8, 9, 1, 2, 3, 1, 2, 3, 1, 2))
    assert text.continuation(7) == (3, 1, 2, 3, 1, 2, 3)
    text.replace(11, (5, 5, 5, 5, 5, 5))
    assert text.continuation(4) == (5, 5, 5, 5)


def test_newest_occurrence_wins_over_older_ones() -> None:
    text = IndexedText()
    text.replace(0, (1, 2, 3, 4, 50, 1, 2, 3, 4, 60, 61, 1, 2, 3, 4))
    assert text.continuation(2) == (60, 61)


@pytest.mark.parametrize("num_kept", [0, 3, 5, 8])
def test_void_tokens_are_never_continued(num_kept: int) -> None:
    text = IndexedText()
    text.replace(0, (1, 2, 3, 4, 90, 91, 1, 2, 3, 4, 92))
    text.continuation(3)  # enters them
    text.replace(num_kept, (1, 2, 3, 4, 5, 6, 1, 2, 3, 4))
    assert text.continuation(2) == (5, 6)


def test_nothing_is_guessed_without_an_earlier_occurrence() -> None:
    text = IndexedText()
    assert text.continuation(3) == ()
    text.replace(0, (1,))
    assert text.continuation(3) == ()
    text.replace(1, tuple(range(2, 400)))
    assert text.continuation(3) == ()


def test_tokens_in_a_gap_are_unknown() -> None:
    text = IndexedText()
    text.replace(100, (1, 2, 3, 4))
    text.replace(104, (5, 1, 2, 3, 4))
    assert text.continuation(1) == (5,)


@pytest.mark.parametrize("num_tokens", [1_000, 100_000])
def test_memory_is_bounded_by_the_number_of_tokens(num_tokens: int) -> None:
    rng = random.Random(1)
    text = IndexedText()
    for start in range(0, num_tokens, 1000):
        text.replace(start, tuple(rng.randrange(50_000) for _ in range(1000)))
        text.continuation(4)
    num_bytes = sum(sys.getsizeof(part) for part in (text._tokens, *text._indexes))
    assert num_bytes <= MIN_BYTES + MAX_BYTES_PER_TOKEN * num_tokens


def test_each_ngram_is_entered_once_however_long_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    num_entered = 0
    enter = IndexedText._enter

    def counting(self: IndexedText, index: object, length: int, first: int, stop: int) -> None:
        nonlocal num_entered
        num_entered += max(0, stop - first)
        enter(self, index, length, first, stop)  # type: ignore[arg-type]

    monkeypatch.setattr(IndexedText, "_enter", counting)
    text = IndexedText()
    text.replace(0, tuple(range(20_000)))
    text.continuation(4)
    of_prompt, num_entered = num_entered, 0
    assert of_prompt <= len(LENGTHS) * 20_000
    for position in range(20_000, 20_200):
        text.replace(position, (position % 7,))
        text.continuation(4)
    assert num_entered <= len(LENGTHS) * 200


def test_slot_that_is_assigned_anew_knows_nothing_of_its_former_sequence() -> None:
    drafter = NgramDrafter()
    assign = StepPlan(0, 0, (SlotAssignment(3, SamplingParams(max_tokens=1)),), ())
    drafter.begin(assign)
    drafter.commit(3, 0, (1, 2, 3, 4, 5, 1, 2, 3, 4))
    assert drafter.propose([DraftRequest(3, 9, 2)]) == [(5, 1)]
    drafter.begin(assign)
    drafter.commit(3, 0, (1, 2, 3, 4))
    assert drafter.propose([DraftRequest(3, 4, 2)]) == [()]


def test_text_before_the_sequence_is_continued_until_the_sequence_says_otherwise() -> None:
    text = IndexedText((5, 6, 7, 8, 9))
    text.replace(0, (1, 2, 6, 7))
    assert text.continuation(2) == (8, 9)
    text.replace(4, (3, 4, 6, 7))
    assert text.continuation(2) == (3, 4)
