"""Two claims about drafts, with clients that ask again after each answer: where drafts do not pay, they cost next to
nothing; and where they pay clearly, they begin soon.

If one of them is made true at the cost of the other, for example by fewer trials, this shows it.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from servekit.scheduler.draft_length import MIN_GAIN_TO_BEGIN, DraftLengths
from tests.support.closed_loop import MAX_DRAFTS, Device, Played, play
from tests.support.drafters import FixedDraftLengths

DEVICES = {
    # The demo model and its draft model on two cores of a CPU.
    "CPU": Device(2.4e-3, 0, 0.22e-3, round_s=0.25e-3, row_s=0.05e-3, computed_s=40e-6),
    # A step waits for memory up to eight positions, and for arithmetic from there on.
    "knee": Device(5e-3, 8, 0.3e-3, round_s=0.3e-3, row_s=0.02e-3, computed_s=20e-6),
    "slow drafter": Device(5e-3, 8, 0.1e-3, round_s=6e-3, row_s=0.1e-3, computed_s=60e-6),
    "n-grams": Device(5e-3, 8, 0.3e-3),
    "free positions": Device(5e-3, 1000, 0.0, round_s=0.3e-3, row_s=0.02e-3, computed_s=5e-6),
}
LOADS = (1, 4, 8, 32)
ACCEPTANCES = (0.0, 0.3, 0.6, 0.9)
LEAST = 0.97  # of the tokens a second without drafts
# Where the best fixed number of drafts gives less than so many times the tokens without drafts, drafts may never begin.
CLEAR_GAIN = MIN_GAIN_TO_BEGIN
LEAST_OF_BEST = 0.85
FIRST_STEPS = 64  # in which the first trials are made
MAX_DRAFTS_OF_DEMO = 7
COLD_S = 50e-3  # of each of the first two steps with drafts


def tokens_per_s(device: Device, num_clients: int, acceptance: float, lengths: DraftLengths | None) -> float:
    num_tokens, first_tokens = 4_000 if num_clients < 32 else 24_000, FIRST_STEPS * num_clients
    played = play(device, num_clients, acceptance, lengths, num_tokens=num_tokens, first_tokens=first_tokens)
    return played.tokens_per_s


def check(device: Device, num_clients: int, acceptance: float) -> None:
    plain, found, *fixed = (
        tokens_per_s(device, num_clients, acceptance, lengths)
        for lengths in (
            None,
            DraftLengths(MAX_DRAFTS),
            *(FixedDraftLengths(MAX_DRAFTS, lambda _, number=number: number) for number in (1, 2, MAX_DRAFTS)),
        )
    )
    assert found > LEAST * plain, f"{found / plain:.3f} of the tokens without drafts"
    if max(fixed) > CLEAR_GAIN * plain:
        assert found > LEAST_OF_BEST * max(fixed), f"{found / max(fixed):.3f} of the tokens with the best number"


@pytest.mark.parametrize(("num_clients", "acceptance"), [(1, 0.9), (4, 0.3), (8, 0.0)])
def test_with_the_demo_model_drafts_pay_or_cost_next_to_nothing(num_clients: int, acceptance: float) -> None:
    check(DEVICES["CPU"], num_clients, acceptance)


@pytest.mark.long
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("num_clients", LOADS)
@pytest.mark.parametrize("device", DEVICES)
def test_on_any_device_drafts_pay_or_cost_next_to_nothing(device: str, num_clients: int, acceptance: float) -> None:
    check(DEVICES[device], num_clients, acceptance)


# The demo model in a server that shares two cores with its clients: the times of steps vary as much as they are long.
SHARED_CORES = Device(0.42e-3, 0, 0.07e-3, round_s=0.045e-3, row_s=0.02e-3, computed_s=15e-6)
NOISE = 0.8
SHORT_ANSWERS = (*range(4, 18), *range(4, 18), 110)  # tokens; most of them are its answers to short questions
LEAST_WITH_SHORT_ANSWERS = 0.985


@pytest.mark.parametrize(("num_clients", "requests_per_round"), [(8, None), (8, 32), (32, 128)])
def test_short_answers_and_varying_steps_are_not_slower_with_drafts(
    num_clients: int, requests_per_round: int | None
) -> None:
    """Nearly all drafts are right, but next to eight or more sequences they do not pay; at the end of a round they do.

    Three errors make drafts look better than they are. The largest of several noisy estimates is too large. The time of
    the draft model's prompts is not counted; this matters most where the load rises and falls. And tokens are counted
    in full that are gained while other sequences wait.
    """

    def play_with(lengths: DraftLengths | None, seed: int) -> float:
        return play(
            SHARED_CORES,
            num_clients,
            0.85,
            lengths,
            num_tokens=600 * num_clients,
            first_tokens=FIRST_STEPS * num_clients,
            prompt_tokens=20,
            answer_tokens=SHORT_ANSWERS,
            requests_per_round=requests_per_round,
            max_drafts=MAX_DRAFTS_OF_DEMO,
            noise=NOISE,
            seed=seed,
        ).tokens_per_s

    ratios = [play_with(DraftLengths(MAX_DRAFTS_OF_DEMO), seed) / play_with(None, seed) for seed in range(3)]
    assert mean(ratios) > LEAST_WITH_SHORT_ANSWERS, ratios


@pytest.mark.long
@pytest.mark.parametrize("num_clients", LOADS)
@pytest.mark.parametrize("device", DEVICES)
def test_drafts_cost_next_to_nothing_where_steps_vary(device: str, num_clients: int) -> None:
    for acceptance in ACCEPTANCES:
        plain, found = (
            play(
                DEVICES[device],
                num_clients,
                acceptance,
                lengths,
                num_tokens=4_000 if num_clients < 32 else 24_000,
                first_tokens=FIRST_STEPS * num_clients,
                noise=NOISE,
            ).tokens_per_s
            for lengths in (None, DraftLengths(MAX_DRAFTS))
        )
        assert found > LEAST * plain, f"{acceptance}: {found / plain:.3f} of the tokens without drafts"


# On these devices, steps with drafts are long enough to be awaited.
LONG_STEPS = {
    "limited by memory": Device(20e-3, 64, 0.1e-3, idle_s=0.4e-3),
    "limited by arithmetic": Device(10e-3, 8, 0.3e-3, idle_s=0.4e-3),
}


@pytest.mark.parametrize("num_clients", [4, 8])
@pytest.mark.parametrize("device", LONG_STEPS)
def test_where_steps_are_long_a_first_token_comes_as_soon_as_without_drafts(device: str, num_clients: int) -> None:
    """Drafts make steps longer, so a request would wait longer for two steps with drafts than for two without."""

    def play_with(lengths: DraftLengths | None) -> Played:
        num_tokens, first_tokens = 1_000 * num_clients, FIRST_STEPS * num_clients
        return play(
            LONG_STEPS[device],
            num_clients,
            0.9,
            lengths,
            num_tokens=num_tokens,
            first_tokens=first_tokens,
            max_drafts=7,
        )

    plain, found = play_with(None), play_with(DraftLengths(7))
    assert found.ttft_s < 1.1 * plain.ttft_s, f"{found.ttft_s / plain.ttft_s:.2f} of the time without drafts"
    assert found.tokens_per_s > LEAST * plain.tokens_per_s and found.num_drafted > 0


def steps_until_drafts(drafting: list[bool], first: int = 0) -> int:
    """How many steps pass, from the `first` one on, before 24 of 32 steps have drafts."""
    return next(
        (number for number in range(len(drafting) - first) if sum(drafting[first + number :][:32]) >= 24), len(drafting)
    )


# Where 0.9 of the drafts are accepted, they give at least 1.25 times the tokens here.
PAYING = [("CPU", 1), ("CPU", 4), ("knee", 1), ("knee", 4), ("n-grams", 8), ("free positions", 8)]


@pytest.mark.parametrize(("device", "num_clients"), PAYING)
def test_a_server_that_has_just_started_makes_drafts_within_its_first_steps(device: str, num_clients: int) -> None:
    """Its drafter is slow at first: it compiles, and reads its weights."""
    cold = replace(DEVICES[device], cold_s=COLD_S)
    found = play(cold, num_clients, 0.9, DraftLengths(MAX_DRAFTS), num_tokens=150 * num_clients)
    assert steps_until_drafts(found.drafting) < FIRST_STEPS


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("device", "num_clients"), PAYING)
def test_drafts_begin_soon_after_texts_have_become_predictable(device: str, num_clients: int, seed: int) -> None:
    """At first no draft is accepted, and there are only trials."""
    change = 600 * num_clients  # tokens, and as many steps as one client has tokens
    drafting = play(
        DEVICES[device],
        num_clients,
        lambda num_answered: 0.0 if num_answered < change else 0.9,
        DraftLengths(MAX_DRAFTS),
        num_tokens=2 * change,
        seed=seed,
    ).drafting
    assert 0 < sum(drafting[FIRST_STEPS:600]) < 600 / 16
    assert steps_until_drafts(drafting, first=600) < 320
