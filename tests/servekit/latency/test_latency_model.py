"""Claims about the fitted step times, against times that are known."""

from __future__ import annotations

import random

import pytest

from servekit.latency.latency_model import LatencyModel, StepWork
from servekit.protocol.messages import ScheduledChunk, StepPlan

TRUE_S = (4e-3, 40e-6, 30e-9, 150e-6, 80e-9, 2e-3, 0.0, 0.0, 0.0)


def seconds_of(work: StepWork, times_s: tuple[float, ...] = TRUE_S) -> float:
    return sum(amount * time_s for amount, time_s in zip(work.amounts(), times_s, strict=True))


def some_work(rng: random.Random) -> StepWork:
    num_decodes, num_prefill = rng.randrange(1, 33), rng.choice([0, 0, 0, rng.randrange(1, 257)])
    num_pairs, num_kv_tokens = num_prefill * rng.uniform(0.5, 800.0), num_decodes * rng.randrange(20, 900)
    return StepWork(num_prefill, num_pairs, num_decodes, num_kv_tokens, int(rng.random() < 0.1))


def fit(model: LatencyModel, rng: random.Random, num_steps: int, noise: float, factor: float = 1.0) -> None:
    for _ in range(num_steps):
        work = some_work(rng)
        held_up_s = 0.2 if noise and rng.random() < 0.01 else 0.0
        model.observe(work, factor * seconds_of(work) * rng.lognormvariate(0.0, noise) + held_up_s)


def mean_error(model: LatencyModel, rng: random.Random, factor: float = 1.0) -> float:
    works = [some_work(rng) for _ in range(200)]
    return sum(abs(model.seconds_of(work) / (factor * seconds_of(work)) - 1.0) for work in works) / len(works)


def test_the_times_of_a_linear_device_are_found() -> None:
    model, rng = LatencyModel(), random.Random(0)
    fit(model, rng, 500, noise=0.0)
    assert model.coefficients_s == pytest.approx(TRUE_S, rel=0.02, abs=1e-6)
    assert model.relative_error < 0.01 and model.slowdown == pytest.approx(1.0, abs=0.01)


def test_times_are_predicted_in_spite_of_noise_and_of_steps_that_were_held_up() -> None:
    model, rng = LatencyModel(), random.Random(1)
    fit(model, rng, 1000, noise=0.05)
    assert mean_error(model, rng) < 0.25  # one step in a hundred takes 0.2 s more: that is in `slowdown`
    times_s = [each * model.slowdown for each in model.coefficients_s]
    assert times_s[0] + 16 * times_s[3] == pytest.approx((TRUE_S[0] + 16 * TRUE_S[3]) * model.slowdown, rel=0.05)
    assert 0.02 < model.relative_error < 0.5


def test_no_time_is_negative() -> None:
    model, rng = LatencyModel(), random.Random(2)
    for _ in range(300):
        model.observe(some_work(rng), rng.uniform(1e-3, 2e-3))
        assert min(model.coefficients_s) >= 0.0


def test_a_worker_that_is_twice_as_slow_is_learned_within_a_few_hundred_steps() -> None:
    model, rng = LatencyModel(), random.Random(3)
    fit(model, rng, 3000, noise=0.02)
    fit(model, rng, 200, noise=0.0, factor=2.0)
    assert mean_error(model, rng, factor=2.0) < 0.1


@pytest.mark.parametrize("num_free", [12, 60, 280])
def test_a_device_that_multiplies_while_it_reads_the_weights_is_predicted(num_free: int) -> None:
    """So many tokens take no longer than the weights, which are read in 5 ms."""

    def seconds_of(work: StepWork) -> float:
        num_tokens = work.num_prefill_tokens + work.num_decode_tokens
        return 3e-4 + 5e-3 * max(1.0, num_tokens / num_free)

    model, rng = LatencyModel(), random.Random(10)
    errors = []
    for number in range(2000):
        work = StepWork(rng.choice([0, rng.randrange(1, 600)]), 0.0, rng.randrange(1, 33), 0)
        if number >= 500:
            errors.append(abs(model.seconds_of(work) / seconds_of(work) - 1.0))
        model.observe(work, seconds_of(work) * rng.lognormvariate(0.0, 0.02))
    assert sum(errors) / len(errors) < 0.04  # 0.07 with a line alone


def test_what_one_size_of_steps_cannot_show_counts_for_the_step() -> None:
    model = LatencyModel()
    for _ in range(100):
        model.observe(StepWork(0, 0.0, 1, 100), 5e-3)
    assert model.seconds_of(StepWork(0, 0.0, 8, 800)) == pytest.approx(5e-3, rel=0.02)


def test_results_that_come_together_do_not_mislead() -> None:
    """One step seems to take no time, and the other one twice as long."""
    model, rng = LatencyModel(), random.Random(4)
    for _ in range(400):
        first, second = some_work(rng), some_work(rng)
        if rng.random() < 0.1:
            model.observe(first, 0.0)
            model.observe(second, seconds_of(first) + seconds_of(second))
        else:
            model.observe(first, seconds_of(first))
            model.observe(second, seconds_of(second))
    assert mean_error(model, rng) < 0.1


def test_the_times_are_told_in_microseconds_and_short() -> None:
    model, rng = LatencyModel(), random.Random(6)
    fit(model, rng, 500, noise=0.0)
    info = model.info()
    assert info["prefill_token_us"] == pytest.approx(40.0, rel=0.05) and info["num_steps"] == 500
    assert all(len(f"{value:g}") <= 10 for value in info.values())


def test_a_slow_first_step_is_forgotten_soon() -> None:
    """It compiles kernels, for example."""
    model, rng = LatencyModel(), random.Random(5)
    model.observe(some_work(rng), 30.0)
    fit(model, rng, 150, noise=0.0)
    assert mean_error(model, rng) < 0.15


def test_nothing_is_predicted_before_a_step_was_measured() -> None:
    model = LatencyModel()
    assert not model.is_known and model.seconds_of(StepWork(1, 0.5, 0, 0)) == 0.0


def test_the_work_of_a_plan_is_counted() -> None:
    chunks = (
        ScheduledChunk(0, 100, 1, (), (), True),  # a decode
        ScheduledChunk(1, 50, 3, (), (), True, 2),  # a decode with two drafts
        ScheduledChunk(2, 32, 16, (), (), False),  # a part of a prompt
        ScheduledChunk(3, 0, 1, (), (), False),
    )
    assert StepWork.of(StepPlan(0, 0, (), chunks, ())) == StepWork(17, 16 * 40.0 + 0.5, 4, 101 + 53)


def test_a_spell_of_slow_steps_is_expected_to_go_on_and_to_end() -> None:
    model, rng = LatencyModel(), random.Random(7)
    fit(model, rng, 1000, noise=0.02)
    fit(model, rng, 20, noise=0.02, factor=1.3)
    work = some_work(rng)
    assert model.seconds_of(work, 0) == pytest.approx(1.3 * seconds_of(work), rel=0.06)
    ahead_s = [model.seconds_of(work, number) for number in (0, 5, 50, 500)]
    assert ahead_s == sorted(ahead_s, reverse=True) and ahead_s[-1] == pytest.approx(model.seconds_of(work))


def test_one_step_that_was_held_up_hardly_shows_in_the_next_one() -> None:
    model, rng = LatencyModel(), random.Random(8)
    fit(model, rng, 1000, noise=0.0)
    work = some_work(rng)
    model.observe(work, 0.5)
    assert model.seconds_of(work, 0) == pytest.approx(seconds_of(work), rel=0.04)


def test_what_cannot_be_fitted_is_still_followed() -> None:
    model, rng = LatencyModel(), random.Random(9)
    fit(model, rng, 500, noise=0.0)
    times_s, num_steps = model.coefficients_s, model.num_steps
    for _ in range(40):
        work = some_work(rng)
        model.follow(work, 1.5 * seconds_of(work))
    assert model.seconds_of(work, 0) == pytest.approx(1.5 * seconds_of(work), rel=0.05)
    assert (model.coefficients_s, model.num_steps) == (times_s, num_steps)


def test_a_step_resumes_if_the_worker_was_idle_before() -> None:
    plan = StepPlan(0, 0, (), (ScheduledChunk(0, 100, 1, (), (), True),), ())
    assert [StepWork.of(plan, idle_s).num_resumes for idle_s in (0.0, 1e-3, 0.1)] == [0, 0, 1]
