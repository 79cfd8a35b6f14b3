"""Fit the times of a simulated model to steps that were measured.

The model is linear in a step's work, so this is a least-squares problem. Times cannot be negative. Errors count
relative to a step's time: 1 ms too much for a decode of 3 ms is as bad as 100 ms too much for a prompt of 300 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from servekit.latency.step_size import BREAKPOINTS, tokens_beyond_breakpoints
from servekit.protocol.messages import StepPlan
from servekit.simulation.model import SimulatedModel, num_attention_pairs

TIMES = (
    *("step_s", "prefill_s", "decode_s", "context_s", "attention_s"),
    *(f"beyond{point}_s" for point in BREAKPOINTS),
)
MAX_RATIO = 10.0  # a step that took longer than this times what the others say was held up by something else
NUM_WEIGHTINGS = 4  # the weights depend on the predictions, and these on the weights


class MeasuredStep(Struct, frozen=True):
    """What a step computed, and how long it took."""

    work: tuple[float, ...]  # what each of TIMES is multiplied by
    duration_s: float

    @classmethod
    def of(cls, plan: StepPlan, duration_s: float) -> MeasuredStep:
        """Count the work of a plan."""
        num_chunks = len(plan.chunks)
        work = (
            1.0,
            float(plan.num_tokens - num_chunks),
            float(num_chunks),
            float(sum(chunk.start for chunk in plan.chunks)),
            num_attention_pairs(plan),
            *map(float, tokens_beyond_breakpoints(plan.num_tokens)),
        )
        return cls(work, duration_s)


class StepTimeFit(Struct, frozen=True):
    """A fitted model, and how well it describes the steps that it was fitted to."""

    model: SimulatedModel
    median_relative_error: float  # of one step, absolute
    num_steps: int
    num_outliers: int  # steps that were left out


def fit_step_times(steps: Sequence[MeasuredStep]) -> StepTimeFit:
    """Fit a model to measured steps without drafts. There must be at least one; the more they differ, the better."""
    assert steps, "nothing was measured"
    work = np.array([step.work for step in steps])
    seconds = np.array([step.duration_s for step in steps])
    times, kept = _fit(work, seconds, np.full(len(seconds), seconds.mean())), np.ones(len(seconds), bool)
    for _ in range(NUM_WEIGHTINGS):
        expected = _positive(work @ times)
        kept = seconds <= MAX_RATIO * expected
        times = _fit(work[kept], seconds[kept], expected[kept])
    errors = np.abs(seconds / _positive(work @ times) - 1.0)[kept]
    model = SimulatedModel(**dict(zip(TIMES, times.tolist(), strict=True)))
    return StepTimeFit(model, float(np.median(errors)), len(steps), int((~kept).sum()))


def _positive(expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keep predictions away from 0, because errors are divided by them."""
    floor: NDArray[np.float64] = np.maximum(expected, 1e-3 * expected.max() + 1e-12)
    return floor


def _fit(work: NDArray[np.float64], seconds: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of the errors relative to `expected`, without negative times.

    Errors are not relative to what was measured: results of two steps may be read at once, so that one of them seems
    to take no time, and the other one twice as long. The most negative time is left out, then the next one.
    """
    rows, wanted = work / expected[:, None], seconds / expected
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)  # the columns differ by many orders of magnitude
    rows /= scales
    kept = [column for column in range(work.shape[1]) if rows[:, column].any()]
    while True:  # a single time is never negative: all work and all durations are positive
        solution = np.linalg.lstsq(rows[:, kept], wanted, rcond=1e-9)[0]
        if (solution >= 0.0).all():
            break
        del kept[int(solution.argmin())]
    times = np.zeros(work.shape[1])
    times[kept] = solution / scales[kept]
    return times


def as_spec(model: SimulatedModel) -> str:
    """Write the times of a model as `sim:SPEC`, as `--model` takes it."""
    times = [
        f"{name.removesuffix('_s')}={1e6 * getattr(model, name):.6f}".rstrip("0").rstrip(".") + "us"
        for name in TIMES
        if getattr(model, name)
    ]
    return "sim:" + (",".join(times) or "instant")
