"""Claims about prefill that is limited by the inter-token target."""

from __future__ import annotations

import random

import pytest

from servekit.scheduler.prefill_limiter import MIN_PREFILL_TOKENS, PrefillLimiter

BASE_S, TOKEN_S = 0.008, 25e-6


def play(
    limiter: PrefillLimiter, num_steps: int, token_s: float = TOKEN_S, noise: float = 0.0, seed: int = 0
) -> list[float]:
    """Play steps with as much prefill as the limiter allows; return how long each took, in seconds."""
    rng = random.Random(seed)
    seconds = []
    for _ in range(num_steps):
        num_tokens = min(limiter.prefill_limit(), rng.choice([0, 50, 100_000]))
        duration_s = (BASE_S + token_s * num_tokens) * rng.lognormvariate(0.0, noise)
        limiter.observe(num_tokens, 8, duration_s)
        seconds.append(duration_s)
    return seconds


def test_without_a_target_there_is_no_limit() -> None:
    limiter = PrefillLimiter(None, 2048)
    play(limiter, 10)
    assert limiter.prefill_limit() == 2048


def test_prefill_starts_small_and_soon_uses_the_whole_target() -> None:
    limiter = PrefillLimiter(0.020, 2048)
    assert limiter.prefill_limit() == MIN_PREFILL_TOKENS
    seconds = play(limiter, 200)
    assert max(seconds[20:]) <= 0.020 and max(seconds) <= 0.025
    assert limiter.prefill_limit() == pytest.approx((0.020 - BASE_S) / TOKEN_S, rel=0.05)


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_at_most_one_step_in_a_hundred_misses_the_target_at_any_noise(noise: float) -> None:
    limiter = PrefillLimiter(0.030, 4096)
    play(limiter, 2000, noise=noise)
    late = [seconds for seconds in play(limiter, 20_000, noise=noise, seed=1) if seconds > 0.030]
    assert len(late) <= 200
    assert limiter.prefill_limit() > 100, "the target is not met by doing nothing"


def test_the_limit_follows_the_cost_of_prefill() -> None:
    limiter = PrefillLimiter(0.020, 4096)
    for token_s in (TOKEN_S, 4 * TOKEN_S, TOKEN_S / 4):
        play(limiter, 3000, token_s)  # the margin, reduced by the sudden change, recovers slowly
        assert limiter.prefill_limit() == pytest.approx((0.020 - BASE_S) / token_s, rel=0.15)


def test_prompts_make_progress_at_a_target_that_cannot_be_met() -> None:
    limiter = PrefillLimiter(0.004, 2048)
    play(limiter, 200)
    assert limiter.prefill_limit() == MIN_PREFILL_TOKENS
    assert limiter.is_out_of_reach and not PrefillLimiter(0.1, 2048).is_out_of_reach


def test_the_cost_of_prefill_is_remembered_over_steps_without_prefill() -> None:
    """Without new prompts, more and more streams run and steps become longer; then a long prompt arrives."""
    limiter = PrefillLimiter(0.015, 2048)
    for _ in range(50):
        limiter.observe(50, 4, BASE_S + 50 * TOKEN_S)
        limiter.observe(min(200, limiter.prefill_limit()), 4, BASE_S + min(200, limiter.prefill_limit()) * TOKEN_S)
    for i in range(300):
        limiter.observe(0, 20, BASE_S + 0.002 * i / 300)
    assert limiter.prefill_limit() <= (0.015 - BASE_S - 0.002) / TOKEN_S * 1.05
