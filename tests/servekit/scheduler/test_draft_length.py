"""Claims about the number of drafts: as many as pay, measured by acceptance and by the time of steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from math import inf
from typing import Any

import pytest

from servekit.protocol.messages import StepResult
from servekit.scheduler.draft_length import (
    CONSIDER_EVERY,
    DECAY,
    EXPLORE_EVERY,
    LARGEST_DEBT,
    MAX_DEBT,
    MAX_EXPLORING,
    MAX_TRIAL_STEPS,
    MIN_TRIAL_STEPS,
    NUM_FIRST_TRIALS,
    NUM_LEVELS,
    PAID_SHARE,
    PROMPT_SHARE,
    DraftLengths,
)
from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import Step
from tests.support.scheduler import make_sequence

PLAIN = 8  # the id of a step that does not explore, and in which drafts are considered


def make_lengths(max_drafts: int, max_steps_in_flight: int = 2) -> DraftLengths:
    """Return draft lengths whose first trials are over."""
    lengths = DraftLengths(max_drafts, max_steps_in_flight)
    lengths.num_explored = NUM_FIRST_TRIALS
    return lengths


def observe(
    lengths: DraftLengths,
    num_decodes: int,
    planned: list[int],
    step_time_s: float,
    draft_time_s: float = 0.0,
    *,
    made: list[int] | None = None,
    num_accepted: int = 0,
    num_prefill_tokens: int = 0,
    step_id: int = PLAIN,
    position_s: float = 0.0,
    draft_prompt_time_s: float = 0.0,
    mean_answer_tokens: float = inf,
    num_ended: int = 0,
) -> None:
    """Let it see a step with these drafts of its first sequences, of which the first spans have the accepted ones.

    The first `num_ended` sequences have ended in the step before.
    """
    step = Step(step_id, 0.0, 0, num_decodes=num_decodes, num_prefill_tokens=num_prefill_tokens)
    step.num_drafts = {index: number for index, number in enumerate(planned) if number}
    for index in range(num_decodes):
        sequence = _decoding(index)
        step.sampled.append((sequence, sequence.incarnation - (index < num_ended)))
    made = planned if made is None else made
    counts = [1] * num_decodes
    for index, number in enumerate(made):
        accepted = min(number, num_accepted)
        counts[index], num_accepted = 1 + accepted, num_accepted - accepted
    num_drafts = (*made, *[0] * (num_decodes - len(made)))
    token_ids = (7,) * sum(counts)
    step.result = StepResult(
        0,
        step_id,
        token_ids,
        0.0,
        counts=tuple(counts),
        num_drafts=num_drafts,
        draft_time_s=draft_time_s,
        draft_prompt_time_s=draft_prompt_time_s,
    )
    lengths.observe(step, step_time_s, position_s, mean_answer_tokens)


@cache
def _decoding(index: int) -> Sequence:
    """Return a sequence of a step. Steps share it: only its incarnation is read, and making one takes time."""
    return make_sequence(index)


def make_drafting(lengths: DraftLengths, acceptances: list[float], max_drafts: int | None = None) -> list[Sequence]:
    sequences = []
    for number, acceptance in enumerate(acceptances):
        sequences.append(make_sequence(number))
        lengths.admit(sequences[-1], max_drafts)
        sequences[-1].acceptance = acceptance
    return sequences


def learn(lengths: DraftLengths, seconds_of: Callable[[int], float], max_positions: int = 600) -> None:
    """Learn what steps take by their positions, where drafts take no time to be made."""
    for num_positions in range(1, max_positions):
        lengths.times.observe(num_positions, seconds_of(num_positions))
    if not lengths.round_times.classes:
        lengths.round_times.observe(1, 0.0)


def chosen(
    lengths: DraftLengths, sequences: list[Sequence], step_id: int = PLAIN, position_s: float = 0.0
) -> list[int]:
    return lengths.choose(sequences, step_id, position_s) or [0] * len(sequences)


def test_where_positions_are_free_every_draft_that_may_be_accepted_is_verified() -> None:
    lengths = make_lengths(7)
    sequences = make_drafting(lengths, [0.9, 0.3, 0.1, 0.0])
    assert chosen(lengths, sequences) == [0, 0, 0, 0], "as long as nothing is known of the times"
    learn(lengths, lambda num_positions: 0.01)
    assert chosen(lengths, sequences) == [7, 7, 7, 0]


def test_where_each_position_takes_its_share_no_draft_pays() -> None:
    lengths = make_lengths(7)
    learn(lengths, lambda num_positions: 1e-3 * num_positions)
    assert chosen(lengths, make_drafting(lengths, [0.95] * 64)) == [0] * 64


def test_the_likelier_a_draft_the_more_are_verified() -> None:
    lengths = make_lengths(7)
    learn(lengths, lambda num_positions: 10e-3 + 0.5e-3 * num_positions)
    good, fair, bad = chosen(lengths, make_drafting(lengths, [0.95, 0.6, 0.2]))
    assert good > fair > bad == 0


def test_the_more_sequences_run_the_fewer_drafts_are_verified() -> None:
    """A step takes 10 ms, and from 32 positions on 0.3 ms for each."""
    lengths = make_lengths(7)
    learn(lengths, lambda num_positions: max(10e-3, 0.3125e-3 * num_positions))
    by_load = [chosen(lengths, make_drafting(lengths, [0.8] * number))[0] for number in (1, 4, 8, 16, 32, 64)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[0] == 7 and by_load[-1] == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_gives_more_tokens_a_second(seed: int) -> None:
    """All choices for three sequences are tried."""
    rng = random.Random(seed)
    lengths = make_lengths(3)
    lengths.num_paying = 64
    lengths.round_times.observe(1, 0.0)
    times_s: list[float] = []
    for num_positions in range(1, 13):  # flat at first, then in steps
        times_s.append((times_s[-1] if times_s else 0.01) * rng.choice([1.0, 1.0, 1.05, 1.3]))
        lengths.times.observe(num_positions, times_s[-1])
    levels = rng.sample(range(NUM_LEVELS), 3)

    def rate(num_drafts: Iterable[int]) -> float:
        num_tokens, num_positions = 0.0, 0
        for level, number in zip(levels, num_drafts, strict=True):
            likelihood = (level + 0.5) / NUM_LEVELS if level else 0.0
            num_tokens += sum(likelihood**position for position in range(number + 1))
            num_positions += 1 + number
        return num_tokens / times_s[num_positions - 1]

    found = chosen(lengths, make_drafting(lengths, [(level + 0.5) / NUM_LEVELS for level in levels]))
    assert rate(found) == pytest.approx(max(map(rate, product(range(4), repeat=3))))


def learn_drafting(lengths: DraftLengths, seconds_of: Callable[[int], float], max_sequences: int = 64) -> None:
    """Learn what a round of the drafter takes by the number of sequences."""
    lengths.round_times.restore([], [], [], 0.0)
    for num_sequences in range(1, max_sequences + 1):
        for num_rounds in (2, 4):
            drafts = [num_rounds] * num_sequences
            model_s = lengths.times.seconds_of(num_sequences + sum(drafts))
            draft_s = num_rounds * seconds_of(num_sequences)
            observe(lengths, num_sequences, drafts, model_s + draft_s, draft_s)
    lengths.debt = 0.0


def test_what_the_drafter_takes_is_no_time_of_the_model() -> None:
    """A round of it takes 2 ms for one sequence, and 3 ms for eight."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 10e-3)
    learn_drafting(lengths, lambda num_sequences: 2e-3 if num_sequences == 1 else 3e-3)
    assert [lengths.times.seconds_of(number) for number in (1, 5, 40)] == pytest.approx([10e-3] * 3)
    assert [lengths.round_times.seconds_of(number) for number in (1, 8)] == pytest.approx([2e-3, 3e-3])


@pytest.mark.parametrize(("drafting_s", "expected"), [(0.0, 7), (1e-3, 4), (4e-3, 1), (7e-3, 0)])
def test_the_longer_a_drafter_takes_the_fewer_drafts_it_makes(drafting_s: float, expected: int) -> None:
    """A step takes 10 ms for any number of positions, and of eight drafts that are made one by one, seven are right.

    The best number is that with the largest (1 + a + … + aᵏ) / (10 ms + k rounds), with a = 0.65.
    """
    lengths = make_lengths(7)
    lengths.num_paying = 64
    learn(lengths, lambda num_positions: 10e-3)
    learn_drafting(lengths, lambda num_sequences: drafting_s)
    acceptance = 10.5 / NUM_LEVELS
    rates = [
        sum(acceptance**position for position in range(number + 1)) / (10e-3 + number * drafting_s)
        for number in range(8)
    ]
    assert rates.index(max(rates)) == expected, "the test's own arithmetic"
    assert chosen(lengths, make_drafting(lengths, [acceptance])) == [expected]


def test_the_first_step_with_drafts_after_one_without_does_not_show_what_a_draft_takes() -> None:
    """A draft model makes up in it for the steps without drafts."""
    lengths = make_lengths(4)
    for draft_time_s in (0.5, 0.002, 0.002):
        observe(lengths, 1, [2], 0.010 + draft_time_s, draft_time_s)
    assert lengths.round_times.seconds_of(1) == pytest.approx(0.001)
    assert lengths.times.seconds_of(3) == pytest.approx(0.010)
    observe(lengths, 1, [], 0.010)
    observe(lengths, 1, [2], 0.510, 0.5)
    assert lengths.round_times.seconds_of(1) == pytest.approx(0.001)


def test_what_the_drafter_takes_for_prompts_is_no_part_of_its_rounds() -> None:
    """Prompts take 40 ms in each fourth step with drafts, however many rounds it has, and a round takes 1 ms."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 10e-3, max_positions=5)
    for number in range(200):
        num_rounds, prompt_s = (1, 2, 4)[number % 3], 0.0 if number % 4 else 40e-3
        draft_s = num_rounds * 1e-3
        step_s = 10e-3 + draft_s + prompt_s
        observe(lengths, 1, [num_rounds], step_s, draft_s, draft_prompt_time_s=prompt_s)
    assert lengths.round_times.seconds_of(1) == pytest.approx(1e-3)
    assert [lengths.times.seconds_of(number) for number in (1, 5)] == pytest.approx([10e-3] * 2)


def play_unexpected_cost(lengths: DraftLengths, prompt_s: float, num_steps: int, num_accepted: int) -> list[int]:
    """Return which of so many steps of 10 ms have drafts, if prompts take `prompt_s` in each one that has.

    The drafts are expected to be accepted.
    """
    learn(lengths, lambda num_positions: 10e-3, max_positions=6)
    (sequence,) = make_drafting(lengths, [0.9])
    found = []
    for step_id in range(num_steps):
        (number,) = chosen(lengths, [sequence], step_id)
        if number:
            found.append(step_id)
        spent_s = prompt_s if number else 0.0
        observe(
            lengths,
            1,
            [min(number, 4)],
            10e-3 + spent_s,
            num_accepted=num_accepted,
            step_id=step_id,
            draft_prompt_time_s=spent_s,
        )
    return found


def test_drafts_end_if_they_cost_more_than_they_gain_however_much_is_expected_of_them() -> None:
    """Of a step without drafts, they take half as much more. They end for long: 1/64 of the steps may be lost.

    When they end, the prompts of the last steps are not charged yet.
    """
    num_steps, num_owed = 5_000, 0.5 / PROMPT_SHARE
    found = play_unexpected_cost(make_lengths(4), 5e-3, num_steps, num_accepted=0)
    assert len(found) * 0.5 < MAX_DEBT + num_owed + num_steps * PAID_SHARE
    assert found[:20] == list(range(20)) and len(found) < 200


def test_what_a_drafter_takes_for_prompts_is_charged_in_full_but_not_at_once() -> None:
    """Forty steps' time, once. If it were added at once, drafts that gain a step's time with each step would end."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 10e-3, max_positions=6)
    charged = 0.0
    for step_id in range(200):
        before = lengths.debt
        prompt_s = 0.0 if step_id else 400e-3
        observe(lengths, 1, [1], 10e-3 + prompt_s, step_id=step_id, draft_prompt_time_s=prompt_s)
        charged += lengths.debt - before + PAID_SHARE
        assert lengths.debt - before < 3.0
        if step_id == 40:
            assert charged > 30.0
    assert charged == pytest.approx(40.0, rel=0.02)


def test_a_draft_that_is_accepted_while_others_wait_gains_less_than_its_share_of_a_step() -> None:
    """Answers of six tokens: a sequence takes part in six steps of nine, so of nine slots, one of six is gained."""
    debts = []
    for mean_answer_tokens in (6.0, 1e9):
        lengths = make_lengths(4)
        learn(lengths, lambda num_positions: 10e-3, max_positions=40)
        lengths.debt = 5.0
        observe(lengths, 32, [1] * 32, 10e-3, num_accepted=32, mean_answer_tokens=mean_answer_tokens)
        debts.append(5.0 - PAID_SHARE - lengths.debt)
    assert debts == pytest.approx([1 / (1 + 3 / 6 * 31 / 32), 1.0])


def test_the_drafters_prompts_are_a_part_of_what_drafts_take() -> None:
    """A draft in each step, all of them right: twice the tokens. A prompt takes the time of two steps."""
    for mean_answer_tokens, expected in ((4.0, 0), (40.0, 1), (1e9, 1)):
        lengths = make_lengths(1)
        learn(lengths, lambda num_positions: 10e-3, max_positions=6)
        lengths.round_times.restore([1], [2e-3], [8.0], 0.0)
        for _ in range(8):
            (sequence,) = make_drafting(lengths, [0.99])
            for number in range(4):
                lengths.is_drafting = True
                lengths.record(sequence, 1, 1, 1)
                prompt_s = 0.0 if number else 20e-3
                observe(lengths, 1, [1], 12e-3 + prompt_s, 2e-3, num_accepted=1, draft_prompt_time_s=prompt_s)
        lengths.debt = lengths.prompt_debt = 0.0
        assert lengths.prompt_s / lengths.num_begun == pytest.approx(20e-3, rel=0.2)
        assert (lengths.choose([sequence], PLAIN, 0.0, 0, mean_answer_tokens) or [0]) == [expected]


def test_the_more_steps_vary_the_more_drafts_must_be_expected_to_gain_before_they_begin_or_end() -> None:
    """By the times they pay by a factor of 1.4, and then of 0.95."""
    for spread, begins, goes_on in ((0.0, 1, 0), (4.0, 0, 1)):
        lengths = make_lengths(1)
        lengths.times.restore([1, 2], [10e-3, 10e-3 * 1.53 / 1.4], [4.0, 4.0], spread)
        lengths.round_times.observe(1, 0.0)
        sequences = make_drafting(lengths, [0.5])
        assert chosen(lengths, sequences) == [begins]
        lengths.times.restore([1, 2], [10e-3, 10e-3 * 1.53 / 0.95], [4.0, 4.0], spread)
        lengths.num_paying = 1
        assert chosen(lengths, sequences) == [goes_on]


def test_next_to_more_sequences_drafts_have_to_begin_anew() -> None:
    """They pay by a factor of 1.1 next to two sequences: enough to go on, and too little to begin."""
    for num_paying, expected in ((1, [0, 0]), (2, [1, 1])):
        lengths = make_lengths(1)
        learn(lengths, lambda num_positions: 10e-3 if num_positions < 3 else 10e-3 * 1.53 / 1.1)
        lengths.num_paying = num_paying
        assert chosen(lengths, make_drafting(lengths, [0.5] * 2)) == expected
        assert lengths.num_paying == (2 if num_paying == 2 else 0)


def test_drafts_go_on_if_they_gain_more_than_they_cost() -> None:
    found = play_unexpected_cost(make_lengths(4), 5e-3, 500, num_accepted=1)
    assert len(found) > 480


def test_the_first_trials_come_soon_and_are_not_charged() -> None:
    """What they take is that of a start: a second each."""
    lengths = DraftLengths(4)
    (sequence,) = make_drafting(lengths, [0.0])
    observe(lengths, 1, [], 10e-3, step_id=0)
    found = []
    for step_id in range(1, 4 * EXPLORE_EVERY):
        (number,) = chosen(lengths, [sequence], step_id)
        found += [step_id] * number
        observe(lengths, 1, [number], 10e-3 + number, 1.0 * number, step_id=step_id)
    every = range(CONSIDER_EVERY, (NUM_FIRST_TRIALS + 1) * CONSIDER_EVERY, CONSIDER_EVERY)
    assert found == [step_id + behind for step_id in every for behind in (0, 1)], "the last one is charged"


def test_drafts_that_are_planned_but_not_made_take_no_time_of_the_model() -> None:
    lengths = make_lengths(4)
    observe(lengths, 2, [4, 4], 0.02, made=[3, 0])
    assert lengths.times.classes == [5]


def test_a_step_that_is_larger_than_all_known_ones_is_tried_if_its_positions_may_pay() -> None:
    """Only steps of up to 32 positions, 10 ms each, came without prefill."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 10e-3, max_positions=33)
    sequences = make_drafting(lengths, [0.8] * 32)
    by_cost = [max(lengths.choose(sequences, PLAIN, position_s), default=0) for position_s in (0.0, 50e-6, 1e-3)]
    assert by_cost == [4, 4, 0]
    assert lengths.choose(sequences[:4], PLAIN, 1e-3) == [4] * 4, "the times of smaller steps are known"


def test_sequences_without_drafts_cost_time_but_get_none() -> None:
    lengths = make_lengths(4)
    lengths.num_paying = 64
    learn(lengths, lambda num_positions: max(10e-3, 1e-3 * num_positions))
    (alone,) = chosen(lengths, make_drafting(lengths, [0.9]))
    without = make_drafting(lengths, [0.9] * 8, max_drafts=0)
    assert all(sequence.max_drafts == 0 for sequence in without)
    assert 0 < chosen(lengths, [*without, *make_drafting(lengths, [0.9])])[-1] < alone


def test_drafts_begin_where_they_pay_clearly_and_end_where_they_do_not_pay() -> None:
    lengths = make_lengths(1)
    learn(lengths, lambda num_positions: 10e-3 * num_positions**0.5)
    for acceptance, begins, goes_on in ((0.3, 0, 0), (0.5, 0, 1), (0.9, 1, 1)):
        sequences = make_drafting(lengths, [acceptance])
        lengths.num_paying = 0
        assert chosen(lengths, sequences) == [begins]
        lengths.num_paying = 64
        assert chosen(lengths, sequences) == [goes_on]


def test_trials_and_steps_without_drafts_do_not_decide_whether_drafts_begin_or_end() -> None:
    """Drafts pay by a factor of 1.1: enough to go on, and too little to begin."""
    for is_worthwhile in (False, True):
        lengths = make_lengths(1)
        learn(lengths, lambda num_positions: 10e-3 if num_positions == 1 else 10e-3 * 1.5 / 1.1)
        lengths.num_paying = int(is_worthwhile)
        (sequence,) = make_drafting(lengths, [0.5])
        planned, seen = [], []
        for step_id in range(1, 3 * EXPLORE_EVERY):
            number = min(1, chosen(lengths, [sequence], step_id)[0])
            planned.append((step_id, number))
            if len(planned) == 2:  # a result comes when the next step is planned
                seen_id, seen_number = planned.pop(0)
                seconds = 10e-3 * (1.5 / 1.1 if seen_number else 1.0)
                observe(lengths, 1, [seen_number], seconds, num_accepted=0, step_id=seen_id)
                lengths.debt = 0.0
                seen.append((seen_id, seen_number))
        rare = {0, 1, 2, 3, EXPLORE_EVERY // 2}
        assert {number for step_id, number in seen if step_id % EXPLORE_EVERY not in rare} == {int(is_worthwhile)}


def test_the_steps_that_a_sequence_waits_for_are_those_in_flight_and_its_prompts() -> None:
    found = []
    for max_steps_in_flight in (1, 4):
        lengths = make_lengths(7, max_steps_in_flight)
        lengths.num_paying = 64
        learn(lengths, lambda num_positions: 10e-3 + 0.4e-3 * num_positions)
        found.append(lengths.choose(make_drafting(lengths, [0.8] * 4), PLAIN, 0.0, 0, 8.0)[0])
    assert found[0] > found[1] > 0


@pytest.mark.parametrize(
    ("step_s", "round_s", "num_drafts", "num_decodes", "is_worthwhile", "is_awaited"),
    [
        (9e-3, 0.0, 3, 2, True, True),
        (7e-3, 0.0, 3, 2, True, False),
        (7e-3, 0.5e-3, 3, 2, True, True),  # three rounds of the drafter are added
        (7e-3, 0.5e-3, 1, 2, True, False),
        (9e-3, 0.0, 3, 1, True, False),  # one sequence alone
        (9e-3, 0.0, 0, 2, True, False),  # without drafts
        (9e-3, 0.0, 3, 2, False, False),  # a trial: drafts are not expected to pay
    ],
)
def test_the_result_of_a_long_step_with_drafts_and_several_sequences_is_awaited(
    step_s: float, round_s: float, num_drafts: int, num_decodes: int, is_worthwhile: bool, is_awaited: bool
) -> None:
    lengths = make_lengths(4)
    lengths.times.observe(num_decodes + num_drafts, step_s)
    lengths.round_times.observe(1, round_s)
    lengths.num_paying = num_decodes if is_worthwhile else 0
    step = Step(PLAIN, 0.0, 0, num_decodes=num_decodes, num_drafts={0: num_drafts} if num_drafts else {})
    assert lengths.is_awaited(step, 0.0) == is_awaited


def test_the_first_sequences_show_the_most() -> None:
    lengths = make_lengths(4)
    for _ in range(3):
        (sequence,) = make_drafting(lengths, [lengths.mean_acceptance])
        lengths.record(sequence, 4, 4, 4)
    assert lengths.mean_acceptance > 0.6
    before = lengths.mean_acceptance
    for _ in range(1000):
        lengths.record(sequence, 4, 0, 0)  # none is found, and each one counts
        lengths.is_drafting = True
    lengths.record(make_drafting(lengths, [1.0])[0], 4, 4, 4)
    assert before > 0.6 and lengths.mean_acceptance < 0.15, "one sequence among many changes little"


def test_short_answers_get_fewer_drafts_because_sequences_wait_for_longer_steps() -> None:
    lengths = make_lengths(7)
    lengths.num_paying = 64
    learn(lengths, lambda num_positions: 10e-3 + 0.4e-3 * num_positions)
    sequences = make_drafting(lengths, [0.8] * 4)
    long, short, shortest = (lengths.choose(sequences, PLAIN, 0.0, 0, mean) or [0] for mean in (1000.0, 8.0, 1.0))
    assert long[0] > short[0] > shortest[0]
    assert lengths.choose(sequences[:1], PLAIN, 0.0, 0, 1.0) == lengths.choose(sequences[:1], PLAIN, 0.0), (
        "a sequence that is alone waits for no step"
    )


def test_drafts_beside_prompts_are_as_dear_as_positions_of_a_step_of_that_size() -> None:
    """Up to 16 positions are free, and each further one takes its share."""
    lengths = make_lengths(4)
    lengths.num_paying = 64
    learn(lengths, lambda num_positions: 1e-3 * max(16, num_positions))
    alone, many = make_drafting(lengths, [0.4]), make_drafting(lengths, [0.4] * 10)
    assert lengths.choose(alone, PLAIN, 0.0) == [4] and lengths.choose(many, PLAIN, 0.0) != []
    assert 0 < lengths.choose(alone, PLAIN, 0.0, num_prefill_tokens=100)[0] < 4
    assert lengths.choose(many, PLAIN, 0.0, num_prefill_tokens=100) == []


def test_a_few_drafts_that_begin_another_tile_of_positions_are_not_free() -> None:
    """With 0.4 billion weights on a CPU, a step of 33 to 48 positions takes a seventh longer than one of 32."""
    lengths = make_lengths(1)
    lengths.num_paying = 64
    for _ in range(10):
        learn(lengths, lambda num_positions: 1e-3 * (62 + 14 * -(-num_positions // 16)))
    assert lengths.choose(make_drafting(lengths, [0.9] * 3 + [0.0] * 29), PLAIN, 0.0) == []
    assert lengths.choose(make_drafting(lengths, [0.9] * 14 + [0.0] * 18), PLAIN, 0.0) == [1] * 14 + [0] * 18


def test_now_and_then_a_step_has_no_drafts_although_they_pay() -> None:
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 0.01)
    sequences = make_drafting(lengths, [0.9])
    without = [step_id for step_id in range(2 * EXPLORE_EVERY) if not lengths.choose(sequences, step_id, 0.0)]
    assert without == [EXPLORE_EVERY // 2, EXPLORE_EVERY + EXPLORE_EVERY // 2]


def test_speculation_that_does_not_pay_is_tried_again_now_and_then() -> None:
    """Two steps in turn, because a draft model makes up in the first for what it has not computed."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 0.01)
    sequences = make_drafting(lengths, [0.0, 0.99])
    explored = [step_id for step_id in range(3 * EXPLORE_EVERY) if chosen(lengths, sequences, step_id) == [1, 5]]
    assert explored == [0, 1, EXPLORE_EVERY, EXPLORE_EVERY + 1, 2 * EXPLORE_EVERY, 2 * EXPLORE_EVERY + 1]


def test_the_number_of_drafts_grows_within_a_few_steps_where_more_positions_cost_little() -> None:
    """Each position takes 6 ms, but as long as no step had as many positions, 30 ms are expected of it."""
    lengths = make_lengths(7)
    (sequence,) = make_drafting(lengths, [0.97])
    numbers = []
    for step_id in range(30):
        (number,) = (min(each, 7) for each in chosen(lengths, [sequence], step_id, position_s=30e-3))
        numbers.append(number)
        lengths.record(sequence, number, number, number)
        observe(lengths, 1, [number], 60e-3 + 6e-3 * (1 + number), num_accepted=number, step_id=step_id)
    assert numbers[12:] == [7] * 18


@pytest.mark.parametrize(("is_right", "num_steps"), [(False, MIN_TRIAL_STEPS), (True, MAX_TRIAL_STEPS)])
def test_a_trial_whose_drafts_are_accepted_is_longer_and_the_next_not_sooner(is_right: bool, num_steps: int) -> None:
    """A second position makes a step four times as long, so drafts do not pay in any case."""
    lengths = make_lengths(7)
    (sequence,) = make_drafting(lengths, [0.97])
    numbers = []
    for step_id in range(EXPLORE_EVERY):
        (number,) = chosen(lengths, [sequence], step_id, position_s=30e-3)
        numbers.append(number)
        accepted = number if is_right else 0
        observe(lengths, 1, [number], 10e-3 * (1 + number) ** 2, num_accepted=accepted, step_id=step_id)
    assert numbers == [1] * num_steps + [0] * (EXPLORE_EVERY - num_steps)


def test_the_more_trying_costs_the_seldomer_it_is_done() -> None:
    """Two steps with drafts took 10 ms each more than without, and 1/64 of the time may be spent on that."""
    lengths = make_lengths(4)
    sequences = make_drafting(lengths, [0.0])
    observe(lengths, 1, [], 10e-3)
    for step_id in range(2):
        assert chosen(lengths, sequences, step_id) == [1]
        observe(lengths, 1, [1], 20e-3, 10e-3, step_id=step_id)
    num_steps = 2
    while chosen(lengths, sequences, num_steps) == [0]:
        observe(lengths, 1, [], 10e-3, step_id=num_steps)
        num_steps += 1
    assert num_steps == 3 * EXPLORE_EVERY, "the first turn after 1.28 s"


def test_a_long_prompt_of_the_drafter_stops_trials_for_a_bounded_time() -> None:
    """It takes as long as 500 steps, 1/64 of which would be 32,000 steps; most of it is charged after the trial."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 10e-3, max_positions=6)
    sequences = make_drafting(lengths, [0.0])
    assert chosen(lengths, sequences, 0) == [1]
    observe(lengths, 1, [1], 5.01, step_id=0, draft_prompt_time_s=5.0)
    paid = LARGEST_DEBT / PAID_SHARE
    for step_id in range(1, int(paid)):
        waits = chosen(lengths, sequences, step_id) == [0]
        assert waits or step_id < MIN_TRIAL_STEPS
        observe(lengths, 1, [], 10e-3, step_id=step_id)
    later = range(int(paid), int(paid) + 4 * EXPLORE_EVERY)  # the prompt is charged over some hundred steps
    is_tried = False
    for step_id in later:
        is_tried = is_tried or chosen(lengths, sequences, step_id) == [1]
        observe(lengths, 1, [], 10e-3, step_id=step_id)
    assert is_tried


def test_under_high_load_only_a_few_sequences_try_drafts() -> None:
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 1e-3 * num_positions)
    sequences = make_drafting(lengths, [0.5] * 20)
    assert lengths.choose(sequences, PLAIN, 0.0) == []
    assert lengths.choose(sequences, EXPLORE_EVERY, 0.0) == [1] * MAX_EXPLORING + [0] * (20 - MAX_EXPLORING)


def test_sequences_that_want_no_drafts_do_not_take_the_place_of_those_that_try_them() -> None:
    """The first six are without drafts by their clients' wish."""
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 1e-3 * num_positions)
    sequences = [*make_drafting(lengths, [0.5] * 6, max_drafts=0), *make_drafting(lengths, [0.5] * 6)]
    assert lengths.choose(sequences, EXPLORE_EVERY, 0.0) == [0] * 6 + [1] * MAX_EXPLORING + [0] * 2


def test_while_no_drafts_pay_it_is_seldom_considered_whether_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 1e-3 * num_positions)
    sequences = make_drafting(lengths, [0.5])
    considered, step_id = set(), 0
    choose_by_level = lengths._choose_by_level

    def watched(*arguments: Any) -> list[int]:
        considered.add(step_id)
        return choose_by_level(*arguments)

    monkeypatch.setattr(lengths, "_choose_by_level", watched)
    for step_id in range(2, EXPLORE_EVERY):
        assert lengths.choose(sequences, step_id, 0.0) == []
    assert considered == set(range(CONSIDER_EVERY, EXPLORE_EVERY, CONSIDER_EVERY))
    lengths = make_lengths(4)
    learn(lengths, lambda num_positions: 1.0)
    lengths.num_paying = 64
    assert lengths.choose(sequences, PLAIN + 1, 0.0) == [4], "in each step, while they pay"


def test_a_step_with_prefill_shows_only_what_the_drafter_takes() -> None:
    lengths = make_lengths(4)
    for _ in range(2):
        observe(lengths, 4, [2] * 4, 0.1, 0.004, num_prefill_tokens=100)
    assert not lengths.times.classes and lengths.round_times.seconds_of(4) == pytest.approx(0.002)


def test_acceptance_follows_the_text() -> None:
    """It falls while drafts are rejected. Then the text becomes repetitive, and two drafts are enough to see it."""
    lengths = make_lengths(4)
    lengths.num_paying = 64
    learn(lengths, lambda num_positions: 0.01)
    (sequence,) = make_drafting(lengths, [0.5])
    for _ in range(30):
        lengths.record(sequence, 4, 4, 0)
    assert sequence.acceptance < 0.02 and chosen(lengths, [sequence]) == [0]
    for _ in range(2):  # the drafts of a trial
        lengths.record(sequence, 1, 1, 1)
    assert sequence.acceptance > 0.2 and chosen(lengths, [sequence]) == [4]
    for _ in range(10):
        lengths.record(sequence, 4, 4, 4)
    assert sequence.acceptance > 0.9
    assert lengths.num_drafted == [42, 40, 40, 40] and lengths.num_accepted == [12, 10, 10, 10]


def test_the_acceptance_is_that_of_single_drafts() -> None:
    """Behind a rejected draft, nothing is learned: at any number of drafts, the same acceptance is found."""
    for max_drafts in (1, 3, 7):
        rng = random.Random(0)
        lengths = make_lengths(max_drafts)
        (sequence,) = make_drafting(lengths, [0.5])
        seen = []
        for _ in range(4000):
            num_accepted = next((n for n in range(max_drafts) if rng.random() >= 0.7), max_drafts)
            lengths.record(sequence, max_drafts, max_drafts, num_accepted)
            seen.append(sequence.acceptance)
        assert sum(seen) / len(seen) == pytest.approx(0.7, abs=0.04)


def test_drafts_that_are_planned_and_not_made_count_as_rejected_but_for_the_first_try() -> None:
    """In the first step with drafts after one without, a draft model may make up for what it has not computed."""
    lengths = make_lengths(4)
    (sequence,) = make_drafting(lengths, [0.5])
    lengths.record(sequence, 4, 0, 0)
    observe(lengths, 1, [4], 0.01, made=[0])
    assert sequence.acceptance == 0.5
    for _ in range(30):
        lengths.record(sequence, 4, 0, 0)
    assert sequence.acceptance < 0.02 and lengths.num_spans == 0, "prompt lookup that finds nothing"
    lengths.record(sequence, 4, 2, 2)
    assert sequence.acceptance > 0.1 and lengths.num_drafted == [1, 1, 0, 0]


def test_drafts_that_are_not_made_because_the_answer_ends_there_are_no_rejected_ones() -> None:
    """A worker makes none from the end of an answer on. That end is a draft as well, and may be wrong."""
    for num_accepted, ends, expected in ((2, True, 6 / 6), (2, False, 6 / 7), (1, True, 5 / 6), (0, True, 4 / 5)):
        lengths = make_lengths(4)
        (sequence,) = make_drafting(lengths, [1.0])
        sequence.acceptance_weight = 4.0 / DECAY
        lengths.record(sequence, 4, 2, num_accepted, ends)
        assert sequence.acceptance == pytest.approx(expected), (num_accepted, ends)


def test_a_sequence_that_ended_in_the_step_before_does_not_show_what_drafts_take() -> None:
    """Its drafts were planned before its end was known, and the worker makes none."""
    lengths = make_lengths(4)
    for _ in range(3):
        observe(lengths, 2, [2, 2], 0.012, 0.002)
    before = lengths.round_times.seconds_of(2)
    observe(lengths, 2, [2, 2], 0.010, 0.0, made=[0, 0], num_ended=2)
    assert not lengths.is_drafting
    for _ in range(3):
        observe(lengths, 2, [2, 2], 0.011, 0.002, made=[0, 2], num_ended=1)
    assert lengths.round_times.seconds_of(2) == before == pytest.approx(0.001)
    assert lengths.round_times.seconds_of(1) == pytest.approx(0.001)


def test_a_new_sequence_is_expected_to_be_like_the_others() -> None:
    lengths = make_lengths(4)
    (sequence,) = make_drafting(lengths, [0.5])
    for _ in range(400):
        lengths.record(sequence, 4, 4, 0)
    another = make_sequence(1)
    lengths.admit(another, None)
    assert another.acceptance < 0.05 and another.max_drafts == 4


def test_spans_with_drafts_are_counted() -> None:
    lengths, sequence = make_lengths(3), make_sequence(1)
    lengths.record(sequence, 3, 3, 1)
    lengths.record(sequence, 1, 1, 1)
    assert (lengths.num_spans, lengths.num_drafted, lengths.num_accepted) == (2, [2, 1, 1], [2, 0, 0])
    assert DraftLengths(0).num_spans == 0


NUM_STEPS = 1_000


class Device:
    """What steps take: a fixed part, more for each position beyond some, and a round of the drafter for each draft.

    A draft model also computes what it has missed while there were no drafts, and that takes time, too.
    """

    def __init__(self, num_free: int, position_s: float, round_s: float) -> None:
        self.num_free, self.position_s, self.round_s = num_free, position_s, round_s

    def model_s(self, num_positions: int) -> float:
        return 5e-3 + self.position_s * max(0, num_positions - self.num_free)

    def draft_s(self, num_drafts: list[int], num_missed: int) -> float:
        if not any(num_drafts):
            return 0.0
        per_sequence_s = self.round_s / 16
        return max(num_drafts) * (self.round_s + per_sequence_s * sum(map(bool, num_drafts))) + (
            self.round_s / 64 * min(256, num_missed)
        )


def speedup(device: Device, num_sequences: int, acceptance: float, max_drafts: int, prefill_share: float) -> float:
    """Play NUM_STEPS steps, in part with prefill, and return tokens per second beside those without drafts."""
    rng = random.Random(0)
    lengths = make_lengths(max_drafts)
    sequences = make_drafting(lengths, [0.5] * num_sequences)
    missed = [0] * num_sequences
    num_tokens = plain_s = time_s = 0.0
    for step_id in range(NUM_STEPS):
        has_prefill = rng.random() < prefill_share
        prefill_s = 64 * max(device.position_s, 1e-6) if has_prefill else 0.0
        chosen_now = chosen(lengths, sequences, step_id, device.position_s)
        planned = [min(each, max_drafts) for each in chosen_now]
        num_accepted = [next((n for n in range(each) if rng.random() >= acceptance), each) for each in planned]
        num_missed = sum(behind for each, behind in zip(planned, missed, strict=True) if each)
        draft_s = device.draft_s(planned, num_missed)
        missed = [0 if each else behind + 1 for each, behind in zip(planned, missed, strict=True)]
        step_s = device.model_s(num_sequences + sum(planned)) + draft_s + prefill_s
        for sequence, each, accepted in zip(sequences, planned, num_accepted, strict=True):
            if each:
                lengths.record(sequence, each, each, accepted)
        observe(
            lengths,
            num_sequences,
            planned,
            step_s,
            draft_s,
            num_accepted=sum(num_accepted),
            num_prefill_tokens=64 * has_prefill,
            step_id=step_id,
            position_s=device.position_s,
        )
        num_tokens += num_sequences + sum(num_accepted)
        time_s += step_s
        plain_s += device.model_s(num_sequences) + prefill_s
    return (num_tokens / time_s) / (NUM_STEPS * num_sequences / plain_s)


DEVICES = {
    "positions are free": Device(1000, 0.0, 0.3e-3),
    "positions take time": Device(0, 0.16e-3, 0.3e-3),
    "positions take time from the ninth on": Device(8, 0.3e-3, 0.3e-3),
    "the drafter is slow": Device(8, 0.1e-3, 6e-3),
    "the drafter takes no time": Device(8, 0.3e-3, 0.0),
}


@pytest.mark.parametrize(("num_sequences", "prefill_share"), [(1, 0.0), (8, 0.0), (32, 0.0), (32, 0.9)])
@pytest.mark.parametrize("device", DEVICES)
def test_at_no_load_speculation_is_slower_than_none(device: str, num_sequences: int, prefill_share: float) -> None:
    """Whether drafts are mostly right, or never.

    The bound is that of the worst case: 32 sequences whose drafts pay a little if they are rightly judged, and each
    sequence is judged by few drafts. All others are above 0.97.
    """
    for acceptance in (0.0, 0.3, 0.9):
        assert speedup(DEVICES[device], num_sequences, acceptance, 4, prefill_share) > 0.96, acceptance


def test_speculation_pays_where_it_can() -> None:
    assert speedup(DEVICES["positions are free"], 1, 0.9, 4, 0.0) > 3
    assert speedup(DEVICES["positions take time"], 1, 0.9, 4, 0.0) > 2
    assert speedup(DEVICES["positions take time from the ninth on"], 1, 0.9, 4, 0.9) > 2
