"""Claims about the lengths of answers that have not ended."""

from __future__ import annotations

import random

import pytest

from servekit.latency.answer_lengths import UNKNOWN_LENGTH, AnswerLengths

SHARES = [(number + 0.5) / 200 for number in range(200)]


def mean_draw(lengths: AnswerLengths, num_made: int, max_tokens: int) -> float:
    return sum(lengths.draw(num_made, max_tokens, share) for share in SHARES) / len(SHARES)


def test_lengths_are_drawn_from_recent_ones() -> None:
    lengths = AnswerLengths()
    for length in (10, 20, 30, 40):
        lengths.record(length, is_cut=False)
    assert [lengths.draw(0, 100, share) for share in (0.1, 0.3, 0.6, 0.9)] == [10, 20, 30, 40]
    assert lengths.mean == 25


def test_only_recent_answers_count() -> None:
    lengths = AnswerLengths()
    for _ in range(100):
        lengths.record(1000, is_cut=False)
    for number in range(AnswerLengths.NUM_REMEMBERED):
        lengths.record(10 + number % 2 * 20, is_cut=False)
    assert lengths.mean == 20
    assert {lengths.draw(0, 10_000, share) for share in SHARES} == {10, 30}


def test_an_answer_that_goes_on_is_longer_than_what_it_has() -> None:
    lengths = AnswerLengths()
    for length in (10, 20, 30, 40):
        lengths.record(length, is_cut=False)
    assert {lengths.draw(20, 100, share) for share in SHARES} == {30, 40}


def test_max_tokens_cuts_answers() -> None:
    lengths = AnswerLengths()
    lengths.record(50, is_cut=False)
    assert lengths.draw(0, 30, 0.5) == 30
    assert lengths.draw(30, 31, 0.5) == 31


def test_cut_answers_count_as_longer() -> None:
    """Half of the answers are cut at 20. Those that are not have a mean of 40 beyond that."""
    rng = random.Random(0)
    lengths = AnswerLengths()
    for number in range(500):
        length = 1 + int(rng.expovariate(1 / 40))
        lengths.record(min(length, 20) if number % 2 else length, is_cut=bool(number % 2 and length > 20))
    assert mean_draw(lengths, 0, 1000) == pytest.approx(40, rel=0.15)


def test_answers_that_are_always_cut_are_expected_to_be_cut() -> None:
    lengths = AnswerLengths()
    for _ in range(5):
        lengths.record(64, is_cut=True)
    assert {lengths.draw(0, 300, share) for share in SHARES} == {300}


def test_without_answers_a_constant_chance_to_end_is_assumed() -> None:
    lengths = AnswerLengths()
    assert mean_draw(lengths, 0, 10**6) == pytest.approx(UNKNOWN_LENGTH, rel=0.05)
    assert lengths.draw(7, 8, 0.0) == 8


def test_an_answer_longer_than_all_others_goes_on_for_about_as_long_as_those_took() -> None:
    lengths = AnswerLengths()
    for length in (10, 10, 30):
        lengths.record(length, is_cut=False)
    assert mean_draw(lengths, 100, 10**6) == pytest.approx(100 + 50 / 3, rel=0.05)
