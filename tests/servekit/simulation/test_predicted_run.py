"""Claims about predictions, against a service in virtual time whose steps have noise and whose lengths are hidden.

The predictor learns from one workload, and predicts for another one, of which it learns neither how long steps take nor
how long answers become. Only its bands follow their outcomes, as they always do.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from statistics import median

import pytest
from msgspec.structs import replace

from servekit.latency.latency_predictor import LatencyPredictor
from servekit.protocol.messages import StepPlan
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.workload_manager import WorkloadManager
from servekit.simulation.model import SimulatedModel
from servekit.simulation.predicted_run import PredictedArrival, PredictedRun, RequestOutcome

MODEL = SimulatedModel(step_s=5e-3, prefill_s=50e-6, decode_s=200e-6, context_s=100e-9, attention_s=20e-9)
CONFIG = SchedulerConfig(
    num_blocks=2048,
    block_size=16,
    max_model_len=2048,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_steps_in_flight=2,
)
CAPACITY = 19.0  # requests/s of the unseen workload that this service computes at most
LOADS = [0.3, 0.6, 0.85, 1.1]


def noisy(seed: int) -> Callable[[StepPlan], float]:
    """Step times with 5 % of noise, and with one step in 200 that is held up."""
    rng = random.Random(seed)

    def duration_s(plan: StepPlan) -> float:
        held_up_s = 0.02 if rng.random() < 0.005 else 0.0
        return MODEL.duration_s(plan) * rng.lognormvariate(0.0, 0.05) + held_up_s

    return duration_s


def requests(seed: int, number: int, rate: float, prompt: int, answer: int) -> list[PredictedArrival]:
    """Random arrivals, and lengths of long-tailed distributions with these medians."""
    rng = random.Random(seed)
    arrivals, at_s = [], 0.0
    for _ in range(number):
        at_s += rng.expovariate(rate)
        prompt_length = min(1000, max(4, round(prompt * rng.lognormvariate(0.0, 0.7))))
        num_tokens = min(512, max(2, round(answer * rng.lognormvariate(0.0, 0.6))))
        arrivals.append(PredictedArrival(at_s, prompt_length, num_tokens, 512))
    return arrivals


@pytest.fixture(scope="module")
def fitted() -> LatencyPredictor:
    """A predictor that has seen another workload: longer prompts, at first at a low load, then in an overload."""
    predictor = LatencyPredictor()
    arrivals = requests(1, 200, 9.0, 250, 80)
    began_s = arrivals[-1].at_s
    arrivals += [replace(each, at_s=began_s + each.at_s) for each in requests(5, 300, 18.0, 250, 80)]
    PredictedRun(CONFIG, arrivals, noisy(1), predictor, predict_every=4).play()
    return predictor


def play(fitted: LatencyPredictor, load: float, number: int, predict_every: int) -> list[RequestOutcome]:
    predictor = LatencyPredictor(learns=False)
    predictor.take_over(deepcopy(fitted))
    later_s = 1e4  # than all that it was fitted to
    arrivals = [replace(each, at_s=later_s + each.at_s) for each in requests(2, number, load * CAPACITY, 120, 80)]
    run = PredictedRun(CONFIG, arrivals, noisy(2), predictor, predict_every=predict_every)
    return [outcome for outcome in run.play() if outcome.prediction is not None]


def errors_and_coverage(outcomes: list[RequestOutcome]) -> tuple[float, float]:
    """The median of the relative errors of the time to the first token, and the share of outcomes in their bands."""
    errors, num_inside = [], 0
    for outcome in outcomes:
        prediction = outcome.prediction
        assert prediction is not None
        measured_s = outcome.first_token_s - prediction.predicted_s
        errors.append(abs(prediction.first_token.median_s / measured_s - 1.0))
        num_inside += prediction.first_token.low_s <= measured_s <= prediction.first_token.high_s
    return median(errors), num_inside / len(outcomes)


@pytest.mark.parametrize("load", LOADS)
def test_first_tokens_are_predicted_for_a_workload_that_was_not_seen(fitted: LatencyPredictor, load: float) -> None:
    """In an overload, so many requests come that most of them wait for several others."""
    outcomes = play(fitted, load, *((700, 14) if load > 1.0 else (250, 2)))
    error, coverage = errors_and_coverage(outcomes)
    print(f"load {load}: {len(outcomes)} requests, median error {error:.1%}, {coverage:.0%} in the band")
    assert error <= 0.10
    assert 0.72 <= coverage <= 0.88


def goodput(
    admits: Callable[[LatencyPredictor], Callable[[WorkloadManager], bool]], slo_s: float
) -> tuple[float, float]:
    """The requests per second whose first token came within `slo_s`, at 1.5 times the capacity; and the refused share.

    The predictor knows nothing when the run begins.
    """
    predictor = LatencyPredictor()
    arrivals = requests(3, 1200, 1.5 * CAPACITY, 120, 80)
    run = PredictedRun(CONFIG, arrivals, noisy(3), predictor, predict_every=0, admits=admits(predictor))
    outcomes = run.play()
    num_good = sum(outcome.ttft_s <= slo_s for outcome in outcomes)
    return num_good / arrivals[-1].at_s, sum(outcome.is_refused for outcome in outcomes) / len(outcomes)


def test_a_limit_of_waiting_time_gives_a_better_goodput_in_an_overload_than_a_count() -> None:
    def within_5_s(predictor: LatencyPredictor) -> Callable[[WorkloadManager], bool]:
        return lambda manager: predictor.waiting_time.seconds(manager, manager.num_waiting) <= 5.0

    by_count, _ = goodput(lambda _: lambda manager: manager.num_waiting < 4096, slo_s=6.0)
    by_time, refused = goodput(within_5_s, slo_s=6.0)
    assert by_time > 0.9 * CAPACITY > 1.5 * by_count
    assert 0.2 < refused < 0.4
