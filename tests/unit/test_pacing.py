"""Claims about steps that are cut to keep streams fluent."""

from __future__ import annotations

import random

import pytest

from servekit.pacing import LEAST_PREFILL, Pacer

BASE_S, TOKEN_S = 0.008, 25e-6


def play(pacer: Pacer, num_steps: int, token_s: float = TOKEN_S, noise: float = 0.0, seed: int = 0) -> list[float]:
    """Steps with as much prefill as the pacer allows; how long each took."""
    rng = random.Random(seed)
    seconds = []
    for _ in range(num_steps):
        num_tokens = min(pacer.prefill_limit(), rng.choice([0, 50, 100_000]))
        duration_s = (BASE_S + token_s * num_tokens) * rng.lognormvariate(0.0, noise)
        pacer.observe(num_tokens, 8, duration_s)
        seconds.append(duration_s)
    return seconds


def test_without_a_target_there_is_no_limit() -> None:
    pacer = Pacer(None, 2048)
    play(pacer, 10)
    assert pacer.prefill_limit() == 2048


def test_it_begins_small_and_soon_uses_all_the_time_there_is() -> None:
    pacer = Pacer(0.020, 2048)
    assert pacer.prefill_limit() == LEAST_PREFILL
    seconds = play(pacer, 200)
    assert max(seconds[20:]) <= 0.020 and max(seconds) <= 0.025
    assert pacer.prefill_limit() == pytest.approx((0.020 - BASE_S) / TOKEN_S, rel=0.05)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_no_more_than_one_step_in_a_hundred_is_late_however_times_scatter(noise: float) -> None:
    pacer = Pacer(0.030, 4096)
    play(pacer, 2000, noise=noise)
    late = [seconds for seconds in play(pacer, 20_000, noise=noise, seed=1) if seconds > 0.030]
    assert len(late) <= 200
    assert pacer.prefill_limit() > 100, "and it is not kept by doing nothing"


def test_it_follows_when_prefill_becomes_dearer_and_cheaper() -> None:
    pacer = Pacer(0.020, 4096)
    for token_s in (TOKEN_S, 4 * TOKEN_S, TOKEN_S / 4):
        play(pacer, 3000, token_s)  # the margin that the surprise cost comes back slowly
        assert pacer.prefill_limit() == pytest.approx((0.020 - BASE_S) / token_s, rel=0.15)


def test_a_target_that_cannot_be_met_still_lets_prompts_through() -> None:
    pacer = Pacer(0.004, 2048)
    play(pacer, 200)
    assert pacer.prefill_limit() == LEAST_PREFILL
    assert pacer.is_out_of_reach and not Pacer(0.1, 2048).is_out_of_reach


def test_a_quiet_span_does_not_make_it_forget_what_prefill_costs() -> None:
    """While nobody asks, more and more streams run and steps grow longer; then a long prompt comes."""
    pacer = Pacer(0.015, 2048)
    for _ in range(50):
        pacer.observe(50, 4, BASE_S + 50 * TOKEN_S)
        pacer.observe(min(200, pacer.prefill_limit()), 4, BASE_S + min(200, pacer.prefill_limit()) * TOKEN_S)
    for i in range(300):
        pacer.observe(0, 20, BASE_S + 0.002 * i / 300)
    assert pacer.prefill_limit() <= (0.015 - BASE_S - 0.002) / TOKEN_S * 1.05
