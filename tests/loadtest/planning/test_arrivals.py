"""Test intended starts: they have the named distributions, and only the seed changes them."""

from __future__ import annotations

from collections.abc import Callable
from math import erf

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.planning.arrivals import Open, Times, parse_arrivals
from loadtest.planning.plan import Plan
from loadtest.planning.planner import make_plan, shares

KOLMOGOROV_99 = 1.63  # sqrt(n) times the distance is below this for 99 of 100 samples (Massey, 1951)


def starts_s(text: str, most: int = 10**7, duration_s: float | None = None, seed: int = 1) -> Times:
    arrivals = parse_arrivals(text)
    assert isinstance(arrivals, Open)
    return arrivals.starts_s(np.random.default_rng(seed), most, arrivals.end_s(duration_s))


def kolmogorov(sample: Times, distribution: Callable[[Times], Times]) -> float:
    """sqrt(n) times the largest distance between what is and what should be."""
    expected = distribution(np.sort(sample))
    places = np.arange(len(sample) + 1) / len(sample)
    distance = max(np.max(places[1:] - expected), np.max(expected - places[:-1]))
    return float(np.sqrt(len(sample)) * distance)


def exponential(gaps_s: Times) -> Times:
    return 1 - np.exp(-gaps_s)


def erlang_2(gaps_s: Times) -> Times:
    return 1 - np.exp(-2 * gaps_s) * (1 + 2 * gaps_s)


def half_normal_squared(gaps_s: Times) -> Times:
    """Of shape 1/2 and mean 1: the square of a normal number."""
    return np.array([erf(value) for value in np.sqrt(gaps_s / 2)])


def assert_counts(times_s: Times, boundaries_s: list[float], expected: list[float]) -> None:
    """Poisson counts, which are within 4 standard deviations but once in ten thousand times."""
    counts, _ = np.histogram(times_s, boundaries_s)
    assert np.all(np.abs(counts - expected) <= 4 * np.sqrt(expected)), f"{counts} for {expected}"


def test_constant_starts_are_multiples_of_the_gap() -> None:
    assert starts_s("constant:4", duration_s=2.0).tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert starts_s("constant:10", most=3).tolist() == [0, 0.1, 0.2]
    assert len(starts_s("constant:0.1", duration_s=30.5)) == 4


@pytest.mark.parametrize(
    ("text", "distribution", "shape"),
    [
        ("poisson:5", exponential, 1.0),
        ("gamma:5,1", exponential, 1.0),
        ("gamma:5,2", erlang_2, 2.0),
        ("gamma:5,0.5", half_normal_squared, 0.5),
    ],
)
def test_gaps_have_the_named_distribution(text: str, distribution: Callable[[Times], Times], shape: float) -> None:
    for seed in range(3):
        gaps = np.diff(starts_s(text, most=20_001, seed=seed)) * 5
        assert kolmogorov(gaps, distribution) < KOLMOGOROV_99
        assert np.mean(gaps) == pytest.approx(1, abs=0.03)
        assert np.var(gaps) == pytest.approx(1 / shape, rel=0.08)
        assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03, "they do not know of each other"


def test_gaps_are_not_stretched_to_fill_the_duration() -> None:
    """A Poisson count varies as much as its mean; of stretched gaps there would always be as many."""
    counts = [len(starts_s("poisson:10", duration_s=20.0, seed=seed)) for seed in range(400)]
    assert np.mean(counts) == pytest.approx(200, abs=3)
    assert 0.8 < np.var(counts) / np.mean(counts) < 1.2
    last = [20 - starts_s("poisson:10", duration_s=20.0, seed=seed)[-1] for seed in range(400)]
    assert kolmogorov(np.array(last) * 10, exponential) < KOLMOGOROV_99, "the last one is as far from the end as any"


@pytest.mark.parametrize(("first", "last"), [(10.0, 90.0), (90.0, 10.0), (0.0, 100.0), (100.0, 0.0), (50.0, 50.0)])
def test_the_rate_of_a_ramp_is_linear(first: float, last: float) -> None:
    times_s = starts_s(f"ramp:{first:g}-{last:g}", duration_s=400.0)
    boundaries_s = np.linspace(0, 400, 9)
    expected = [400 / 8 * (first + (last - first) * (window + 0.5) / 8) for window in range(8)]
    assert_counts(times_s, boundaries_s.tolist(), expected)
    share = times_s / 400
    assert (
        kolmogorov(share, lambda at: (first * at + (last - first) * at**2 / 2) / ((first + last) / 2)) < KOLMOGOROV_99
    )
    assert np.all(np.diff(times_s) >= 0)


def test_a_level_ramp_is_poisson() -> None:
    np.testing.assert_allclose(starts_s("ramp:7-7", duration_s=50.0), starts_s("poisson:7", duration_s=50.0))


def test_steps_share_the_duration_or_have_seconds_of_their_own() -> None:
    shared = starts_s("steps:10,40,20", duration_s=300.0)
    assert_counts(shared, [0, 100, 200, 300], [1000, 4000, 2000])
    own = starts_s("steps:10@200,40@50,20@50")
    assert_counts(own, [0, 200, 250, 300], [2000, 2000, 1000])
    assert own[-1] < 300
    assert starts_s("steps:10@200,40@50", duration_s=30.0)[-1] < 30
    for window_s in ((0, 100), (100, 200), (200, 300)):
        inside = shared[(shared >= window_s[0]) & (shared < window_s[1])]
        assert kolmogorov((inside - window_s[0]) / 100, lambda at: at) < KOLMOGOROV_99, "even within a step"


@pytest.mark.parametrize("text", ["steps:0@5,100@5,0@5,100@5,0@5", "steps:0,100,0,100,0"])
def test_in_a_pause_nothing_starts(text: str) -> None:
    times_s = starts_s(text, duration_s=25.0)
    counts, _ = np.histogram(times_s, [0, 5, 10, 15, 20, 25])
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0] and np.all(counts[[1, 3]] > 400)


RANDOM_ONES = ["poisson:30", "gamma:30,0.5", "ramp:10-50", "steps:10,50"]


@pytest.mark.parametrize("text", ["constant:30", *RANDOM_ONES])
def test_both_limits_hold_and_more_requests_leave_the_first_ones(text: str) -> None:
    every = starts_s(text, duration_s=600.0)
    assert len(every) > 16_000, "more than are drawn at once"
    assert starts_s(text, most=100, duration_s=600.0).tolist() == every[:100].tolist()
    assert starts_s(text, most=10**6, duration_s=600.0).tolist() == every.tolist()
    assert every[-1] < 600


@pytest.mark.parametrize("text", RANDOM_ONES)
def test_the_seed_decides(text: str) -> None:
    first, again, other = (starts_s(text, duration_s=10.0, seed=seed) for seed in (4, 4, 5))
    assert first.tolist() == again.tolist() != other.tolist()


def test_at_twice_the_rate_the_same_luck_comes_twice_as_fast() -> None:
    np.testing.assert_allclose(starts_s("poisson:10", most=500), 2 * starts_s("poisson:20", most=500))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("poison:5", "unknown form; use closed:N"),
        ("poisson:", "`` is not a number"),
        ("poisson:fast", "`fast` is not a number"),
        ("poisson:0", "must be from 1e-06 to 1,000,000"),
        ("poisson:nan", "is nan"),
        ("constant:-1", "is -1"),
        ("closed:0", "from 1 to 1,000,000"),
        ("closed:2.5", "whole number"),
        ("gamma:5", "two numbers"),
        ("gamma:5,0", "the shape is 0"),
        ("ramp:5", "two numbers"),
        ("ramp:0-0", "every rate is 0"),
        ("steps:0,0", "every rate is 0"),
        ("steps:5@10,6", "with every rate or with none"),
        ("steps:5@0", "a step's seconds is 0"),
        ("burst:5", "unknown form; use closed:N"),
        ("trace:0", "the speed-up is 0"),
    ],
)
def test_invalid_arrivals_are_refused_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(LoadTestError) as error:
        parse_arrivals(text)
    assert says in str(error.value) and text in str(error.value)


def test_rates_that_change_over_the_duration_need_one() -> None:
    for text in ("ramp:1-2", "steps:1,2"):
        with pytest.raises(LoadTestError, match="duration"):
            make_plan(text, "queries", num_requests=10)


def test_another_workload_does_not_move_the_starts_nor_another_rate_the_prompts() -> None:
    plans = [make_plan("poisson:10", each, seed=3, num_requests=200) for each in ("queries", "random", "prefix")]
    times_s = [[request.intended_s for request in plan.requests] for plan in plans]
    assert times_s[0] == times_s[1] == times_s[2]
    slower = make_plan("gamma:1,2", "random", seed=3, num_requests=200)
    assert [each.prompt for each in slower.requests] == [each.prompt for each in plans[1].requests]
    assert plans[1] == make_plan("poisson:10", "random", seed=3, num_requests=200)
    assert plans[1] != make_plan("poisson:10", "random", seed=4, num_requests=200)


def test_a_plan_ends_with_its_number_or_its_duration_whichever_is_first() -> None:
    assert len(make_plan("constant:10", "queries", num_requests=30, duration_s=5.0).requests) == 30
    plan = make_plan("constant:10", "queries", num_requests=70, duration_s=5.0)
    assert len(plan.requests) == 50 and plan.duration_s == 5.0
    assert make_plan("steps:5@2,10@3", "queries").duration_s == 5.0
    assert make_plan("burst", "queries", num_requests=3).requests[-1].intended_s == 0.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"arrivals": "poisson:5"}, "never end"),
        ({"arrivals": "burst"}, "never end"),
        ({"arrivals": "closed:5"}, "a closed loop needs --requests"),
        ({"arrivals": "closed:5", "duration_s": 5.0}, "a closed loop needs --requests"),
        ({"arrivals": "poisson:5", "duration_s": 0.0}, "above 0"),
        ({"arrivals": "poisson:5", "num_requests": 0}, "--requests 0 is not within 1 to"),
        ({"arrivals": "poisson:5", "num_requests": 5, "seed": -1}, "--seed -1 is below 0"),
        ({"arrivals": "poisson:5", "num_requests": 5, "characters_per_token": 0.0}, "--characters-per-token 0.0"),
        ({"arrivals": "poisson:0.001", "duration_s": 0.1}, "start no request"),
        ({"arrivals": "poisson:1e6", "duration_s": 5.2}, "more than 5,000,000"),
        ({"arrivals": "trace", "num_requests": 5}, "trace:FILE"),
    ],
)
def test_endless_and_empty_plans_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(LoadTestError, match=says):
        make_plan(workload="queries", **arguments)  # type: ignore[arg-type]


def assert_dealt(plan: Plan, dealt: list[Plan]) -> None:
    """Every request has gone to one process, in order, and its turn before it too."""
    assert sorted(each.index for share in dealt for each in share.requests) == list(range(len(plan.requests)))
    for share in dealt:
        indices = [each.index for each in share.requests]
        assert indices == sorted(indices)
        assert {each.follows for each in share.requests} - {None} <= set(indices)


def test_each_process_sees_a_thinned_version_of_the_same_arrivals() -> None:
    plan = make_plan("poisson:40", "queries", seed=2, num_requests=8001)
    dealt = shares(plan, 4)
    assert_dealt(plan, dealt)
    assert [len(share.requests) for share in dealt] == [2001, 2000, 2000, 2000]
    for share in dealt:
        gaps = np.diff([each.intended_s for each in share.requests if each.intended_s is not None]) * 10
        assert np.mean(gaps) == pytest.approx(1, abs=0.04)
        assert np.var(gaps) == pytest.approx(1 / 4, rel=0.1), "of every fourth Poisson start: Erlang's of shape 4"
        assert share.num_clients is None


@pytest.mark.parametrize(
    ("num_clients", "num_processes", "clients"), [(10, 4, [3, 3, 2, 2]), (8, 2, [4, 4]), (2, 3, [1, 1, 0])]
)
def test_clients_and_their_requests_are_split_alike(num_clients: int, num_processes: int, clients: list[int]) -> None:
    plan = make_plan(f"closed:{num_clients}", "queries", num_requests=400 * num_clients)
    dealt = shares(plan, num_processes)
    assert_dealt(plan, dealt)
    assert [share.num_clients for share in dealt] == clients
    assert [len(share.requests) for share in dealt] == [400 * each for each in clients]
    assert all(each.intended_s is None for each in plan.requests)


@pytest.mark.parametrize("arrivals", ["closed:7", "poisson:10"])
def test_the_turns_of_a_conversation_stay_together(arrivals: str) -> None:
    plan = make_plan(arrivals, "conversation:turns=uniform:1-5", num_requests=500)
    dealt = shares(plan, 3)
    assert_dealt(plan, dealt)
    assert all(len(share.requests) > 100 for share in dealt)


def test_one_process_has_the_whole_plan() -> None:
    plan = make_plan("closed:7", "queries", num_requests=20)
    assert shares(plan, 1) == [plan]
