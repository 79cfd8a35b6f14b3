"""Claims about fitted step times."""

from __future__ import annotations

import random
from operator import mul

import pytest

from servekit.protocol.messages import ScheduledChunk, StepPlan
from servekit.simulation.model import SimulatedModel, parse_simulated
from servekit.simulation.step_time_fit import TIMES, MeasuredStep, as_spec, fit_step_times

MODEL = SimulatedModel(
    step_s=2e-3,
    prefill_s=10e-6,
    decode_s=200e-6,
    context_s=0.4e-6,
    attention_s=20e-9,
    beyond16_s=8e-6,
    beyond64_s=5e-6,
    beyond256_s=7e-6,
)


def steps(rng: random.Random, num_steps: int = 400) -> list[MeasuredStep]:
    """Steps of one to eight decodes, half of them with a chunk of a prompt, that take what MODEL says."""
    made = []
    for step_id in range(num_steps):
        chunks = [ScheduledChunk(slot, rng.randrange(1, 2000), 1, (), (), True) for slot in range(rng.randrange(1, 9))]
        if rng.random() < 0.5:
            chunks.append(ScheduledChunk(9, rng.randrange(2000), rng.randrange(2, 500), (), (), False))
        plan = StepPlan(0, step_id, (), tuple(chunks))
        made.append(MeasuredStep.of(plan, MODEL.duration_s(plan)))
    return made


def test_exact_steps_give_the_times_that_they_were_made_with() -> None:
    fit = fit_step_times(steps(random.Random(1)))
    for name in TIMES:
        assert getattr(fit.model, name) == pytest.approx(getattr(MODEL, name), rel=1e-6), name
    assert fit.median_relative_error < 1e-9 and (fit.num_steps, fit.num_outliers) == (400, 0)


def test_steps_that_were_held_up_and_results_that_were_read_together_change_little() -> None:
    rng = random.Random(2)
    measured = steps(rng)
    for index in range(0, 400, 40):  # ten times as long and more
        measured[index] = MeasuredStep(measured[index].work, 1.0)
    for index in range(5, 399, 20):  # the second of two results that were read at once
        first, second = measured[index : index + 2]
        measured[index] = MeasuredStep(first.work, first.duration_s + second.duration_s - 1e-5)
        measured[index + 1] = MeasuredStep(second.work, 1e-5)
    fit = fit_step_times(measured)
    assert fit.num_outliers == 10
    others = steps(random.Random(3))
    times = [getattr(fit.model, name) for name in TIMES]
    fitted_s = sum(sum(map(mul, step.work, times)) for step in others)
    assert fitted_s == pytest.approx(sum(step.duration_s for step in others), rel=0.05)


def test_no_time_is_negative() -> None:
    """Larger steps that take less time: a line through them would have a negative slope."""
    measured = [
        MeasuredStep.of(StepPlan(0, 0, (), (ScheduledChunk(0, 0, num_tokens, (), (), True),)), 1.0 / num_tokens)
        for num_tokens in range(1, 50)
    ]
    model = fit_step_times(measured).model
    assert all(getattr(model, name) >= 0.0 for name in TIMES) and model.prefill_s == 0.0


def test_a_fitted_model_can_be_written_as_a_setting() -> None:
    for name in TIMES:
        assert getattr(parse_simulated(as_spec(MODEL)), name) == pytest.approx(getattr(MODEL, name), rel=1e-3), name
    assert as_spec(SimulatedModel()) == "sim:instant"
