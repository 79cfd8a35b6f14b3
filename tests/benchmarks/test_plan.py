"""Claims about how the benchmark of `servekit plan` calibrates."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from benchmarks.plan import SETTINGS, VaryingSteps, admissions_when_idle_s, cut_out, demand, scaled_to, slower
from servekit.laboratory.batching import MODES
from servekit.laboratory.timeline import RequestTimeline, Timeline
from servekit.laboratory.virtual_run import VirtualRun
from servekit.protocol.messages import ScheduledChunk, StepPlan
from servekit.simulation.model import SimulatedModel
from servekit.simulation.step_time_fit import MeasuredStep

MODEL = SimulatedModel(step_s=3e-3, prefill_s=150e-6, decode_s=100e-6, context_s=100e-9)


def test_only_requests_that_came_when_all_before_them_had_ended_show_how_long_an_admission_takes() -> None:
    timeline = Timeline()
    # Arrival, admission and end. The first two come together, and the fourth and the fifth while the third one runs.
    lives = [(0, 0.9, 5), (0, 0.8, 3), (6, 6.1, 9), (7, 7.7, 8), (8.5, 8.6, 8.9), (9.5, 9.7, 10)]
    for number, times_s in enumerate(lives):
        arrival_s, admitted_s, ended_s = times_s
        timeline.requests[number] = RequestTimeline(
            sequence_id=number, arrival_s=arrival_s, num_prompt_tokens=1, admitted_s=admitted_s, ended_s=ended_s
        )
    assert admissions_when_idle_s(timeline) == pytest.approx([0.1, 0.2])


def played(model: SimulatedModel) -> Timeline:
    return VirtualRun(demand(8.0, 6.0, seed=1), MODES["chunked"], SETTINGS, model).play()


def measured(timeline: Timeline, noise: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(0)
    return [
        MeasuredStep.of(step.plan, (step.done_s - step.began_s) * rng.lognormvariate(0.0, noise))
        for step in timeline.steps
    ]


def test_memory_and_multiplications_are_scaled_apart() -> None:
    later = SimulatedModel(step_s=3.9e-3, prefill_s=120e-6, decode_s=130e-6, context_s=130e-9)
    scaled = scaled_to(measured(played(later), noise=0.05), MODEL)
    assert scaled.step_s == pytest.approx(3.9e-3, rel=0.02)
    assert scaled.prefill_s == pytest.approx(120e-6, rel=0.03)
    assert slower(played(later), scaled) == pytest.approx(0.0, abs=0.01)


def test_a_plans_steps_vary_like_measured_ones_and_those_with_prompts_by_themselves() -> None:
    decode = StepPlan(0, 0, (), (ScheduledChunk(0, 100, 1, (), (), True),), ())
    prompt = StepPlan(0, 0, (), (ScheduledChunk(0, 0, 50, (), (), True),), ())
    steps = [MeasuredStep.of(decode, MODEL.duration_s(decode) * ratio) for ratio in (0.5, 0.9, 1.6)]
    steps += [MeasuredStep.of(prompt, MODEL.duration_s(prompt) * ratio) for ratio in (3.0, 4.0)]
    varying = VaryingSteps(MODEL, steps, MODEL, seed=0)
    decodes, prompts = (
        {round(varying.duration_s(plan) / MODEL.duration_s(plan), 6) for _ in range(100)} for plan in (decode, prompt)
    )
    assert decodes == {0.5, 0.9, 1.6} and prompts == {3.0, 4.0}
    slow = VaryingSteps(SimulatedModel(step_s=6e-3), steps, MODEL, seed=0)
    assert mean(slow.duration_s(decode) for _ in range(3000)) == pytest.approx(6e-3, rel=0.05)


def test_each_workload_of_a_session_has_its_own_requests_and_steps() -> None:
    whole = played(MODEL)
    end_s = max(request.ended_s for request in whole.requests.values())
    first, second = cut_out(whole, 0.0, end_s / 2), cut_out(whole, end_s / 2, end_s + 1.0)
    assert {**first.requests, **second.requests} == whole.requests and not first.requests.keys() & second.requests
    assert max(each.arrival_s for each in first.requests.values()) < end_s / 2
    assert [*first.steps, *second.steps] == whole.steps
