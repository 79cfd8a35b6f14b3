"""Claims about what the step times of a worker teach."""

from __future__ import annotations

import random

import pytest

from servekit.scheduler.step_time import PositionTimes, StepTimes, bounds_of, non_decreasing, size_class

OVERHEAD_S, PREFILL_S, DECODE_S = 0.02, 100e-6, 400e-6


def play(step_times: StepTimes, num_steps: int, noise: float, factor: float = 1.0) -> None:
    """Steps with a slowly changing number of decodes, and prompts in some of them."""
    rng = random.Random(0)
    num_decodes = 10
    for _ in range(num_steps):
        num_decodes = max(0, num_decodes + rng.randint(-2, 2))
        num_prefill_tokens = rng.choice([0, 0, 50, 300, 512])
        seconds = OVERHEAD_S + PREFILL_S * num_prefill_tokens + DECODE_S * num_decodes
        step_times.observe(num_prefill_tokens, num_decodes, factor * seconds * rng.lognormvariate(0.0, noise))


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.05, 0.35)])
def test_three_parts_of_a_step_are_distinguished(noise: float, error: float) -> None:
    step_times = StepTimes()
    play(step_times, 2000, noise)
    assert step_times.prefill_s == pytest.approx(PREFILL_S, rel=error)
    assert step_times.decode_s == pytest.approx(DECODE_S, rel=error)
    assert step_times.overhead_s == pytest.approx(OVERHEAD_S, rel=error)


def test_a_device_that_becomes_slower_is_learned_anew() -> None:
    step_times = StepTimes()
    play(step_times, 1000, 0.0)
    play(step_times, 1000, 0.0, factor=3.0)
    assert step_times.prefill_s == pytest.approx(3 * PREFILL_S, rel=0.05)
    assert step_times.overhead_s == pytest.approx(3 * OVERHEAD_S, rel=0.05)


def test_without_a_prompt_its_cost_is_unknown_and_decodes_that_never_change_cost_nothing() -> None:
    step_times = StepTimes()
    for _ in range(100):
        step_times.observe(0, 8, 0.03)
    assert (step_times.prefill_s, step_times.decode_s) == (0.0, 0.0)
    assert step_times.overhead_s == step_times.base_s == pytest.approx(0.03)


def test_size_classes_are_in_order_and_at_most_a_32nd_wide() -> None:
    classes = [size_class(number) for number in range(1, 5000)]
    assert classes == sorted(classes) and classes[:63] == list(range(1, 64))
    assert set(classes) == set(range(1, classes[-1] + 1)), "none is left out"
    for size in set(classes):
        members = [number for number, each in enumerate(classes, start=1) if each == size]
        assert members[-1] - members[0] <= members[0] / 32
        assert size == classes[-1] or bounds_of(size) == (members[0], members[-1])


def test_the_time_by_positions_is_flat_where_it_was_measured_flat_and_rises_where_it_rises() -> None:
    times = PositionTimes()
    assert times.seconds_of(1) == times.seconds_of(1000) > 0, "nothing is known"
    times.observe(8, 0.02)
    assert times.seconds_of(1) == times.seconds_of(8) == times.seconds_of(500) == 0.02
    times.observe(12, 0.04)
    times.observe(1, 0.01)
    assert [times.seconds_of(number) for number in (1, 8, 10, 12, 13)] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.04])
    assert times.classes == [1, 8, 12]
    assert [times.seconds_of(number, 0.001) for number in (10, 12, 13, 20)] == pytest.approx([0.03, 0.04, 0.041, 0.048])


def test_below_the_smallest_known_step_each_position_takes_its_time_away_but_not_more_than_its_share() -> None:
    times = PositionTimes()
    times.observe(10, 0.02)
    assert [times.seconds_of(5, position_s) for position_s in (0.0, 0.001, 0.1)] == pytest.approx([0.02, 0.015, 0.01])


def test_a_step_that_was_held_up_is_soon_forgotten() -> None:
    times = PositionTimes()
    times.observe(4, 1.0)  # the first one of its size, as when something is compiled
    for _ in range(8):
        times.observe(4, 0.01)
    assert times.seconds_of(4) < 0.015
    times.observe(4, 0.05)
    assert times.seconds_of(4) < 0.02
    for _ in range(60):
        times.observe(4, 0.03)
    assert times.seconds_of(4) == pytest.approx(0.03, rel=0.05), "but a change that stays is learned"


def test_a_clock_that_stands_still_gives_a_time_that_can_be_divided_by() -> None:
    times = PositionTimes()
    times.observe(3, 0.0)
    assert times.seconds_of(3) > 0


def test_a_class_that_is_seen_often_does_not_look_faster_than_one_that_is_seen_seldom() -> None:
    rng = random.Random(0)
    times = PositionTimes()
    errors = {8: 0.0, 12: 0.0}
    for number in range(4000):
        positions = 12 if number % 20 == 0 else 8
        times.observe(positions, rng.choice([0.01, 0.018]))
        for each in errors:
            errors[each] += times.seconds_of(each) / 0.014 - 1.0
    assert all(abs(error) / 4000 < 0.1 for error in errors.values())


@pytest.mark.parametrize("deviation", [0.05, 0.4])
def test_the_error_of_a_time_is_that_of_the_mean_of_so_many_steps(deviation: float) -> None:
    rng = random.Random(0)
    times, errors, expected = PositionTimes(), [], []
    assert times.error_of(4) == 0.0, "nothing is known"
    for _ in range(2000):
        times.observe(4, 0.01 * (1.0 + deviation * rng.choice([-1.0, 1.0])))
        errors.append(times.seconds_of(4) / 0.01 - 1.0)
        expected.append(times.error_of(4))
    found = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    assert sum(expected) / len(expected) == pytest.approx(found, rel=0.5)
    assert times.error_of(3) == times.error_of(4) == times.error_of(50), "of the nearest known number"
    for _ in range(400):
        times.observe(9, 0.01 * (1.0 + deviation * rng.choice([-1.0, 1.0])))
    assert times.error_of(9) < deviation / 2 < times.error_of(4), "a time of long ago is uncertain"
    assert times.error_of(4) == pytest.approx(deviation, rel=0.5), "but not more than one step"


def test_more_positions_never_take_less_time() -> None:
    times = PositionTimes()
    times.observe(1, 0.05)  # long ago, when the machine was slower
    for _ in range(50):
        times.observe(2, 0.01)
        times.observe(6, 0.02)
    assert times.seconds_of(1) <= times.seconds_of(2) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_the_non_decreasing_values_are_the_nearest_ones(seed: int) -> None:
    """By the formula of minima and maxima (Barlow et al., equation 1.9)."""
    rng = random.Random(seed)
    values = [rng.uniform(0.0, 1.0) for _ in range(rng.randrange(8))]
    weights = [rng.uniform(0.1, 2.0) for _ in values]

    def mean(first: int, last: int) -> float:
        parts = range(first, last + 1)
        return sum(values[each] * weights[each] for each in parts) / sum(weights[each] for each in parts)

    expected = [
        max(min(mean(first, last) for last in range(index, len(values))) for first in range(index + 1))
        for index in range(len(values))
    ]
    assert non_decreasing(values, weights) == pytest.approx(expected)
