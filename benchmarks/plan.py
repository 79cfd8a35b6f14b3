"""Compare what a plan expects of a service with what a real engine does: throughput, ITL and TTFT at four loads.

The engine serves a Llama of 84 million random weights. The step times are fitted to another workload: chat messages
that come at once, and some at random times and a low load. It is played before and after each load, because a machine
is not equally fast for minutes: the times of a load are those that fit all calibrations, times the ratio by which the
two around it were slower. Requests of a plan (random arrivals, log-normal lengths) are played with the real model, and
in virtual time, with the same scheduler. The loads are parts of the rate that the plan expects the engine to serve at
most. `steps` says how much longer the steps of a run took than the plan's step times say: this part of the error comes
from step times, and the rest from the simulation.

    python -m benchmarks.plan

It takes seven minutes. Run nothing else meanwhile: another program makes steps longer than they were before.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from benchmarks.progress import progress, tell
from benchmarks.random_llama import SMALL_SHAPE, make_random_llama
from servekit.laboratory.batching import MODES
from servekit.laboratory.real_run import RealRun
from servekit.laboratory.summary import Summary, summarise
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.virtual_run import LabSettings, VirtualRun
from servekit.laboratory.workload import LabRequest, Workload
from servekit.laboratory.workload_generator import make_workload
from servekit.planning.capacity import LOADS, SATURATING_RATE, steady_rate
from servekit.planning.demand import Demand, make_requests
from servekit.simulation.model import SimulatedModel
from servekit.simulation.step_time_fit import TIMES, MeasuredStep, as_spec, fit_step_times

MODEL_FOLDER = Path("build/small-llama")
MODE = MODES["chunked"]
SETTINGS = LabSettings(num_slots=8, num_kv_tokens=8192, max_model_len=512, chunk_tokens=128, has_prefix_cache=False)
DEMAND = Demand(prompt_tokens=100, output_tokens=60, max_length=500, num_requests=100)
CALIBRATION_SEED, SPARSE_SEED = 1000, 500  # the second one is added to the first
NUM_AT_ONCE = 32  # messages of a calibration that come at once
NUM_SPARSE, SPARSE_FROM_S, SPARSE_RATE = 20, 8.0, 2.0  # and those at a low load: from when on, and how many per second
AIMS = {"tokens_per_s": 0.03, "itl_p50_s": 0.05, "ttft_p50_s": 0.10}
MAX_TOKEN_ID = 240  # prompts are made of tokens that every vocabulary has


def play(workload: Workload, settings: LabSettings, model: str) -> Timeline:
    return asyncio.run(RealRun(workload, MODE, settings, model).play())


def calibrate(model: str, seed: int) -> tuple[list[MeasuredStep], list[float]]:
    """Measure steps of full batches and of small ones, and how long requests take to come to an idle scheduler.

    Small batches come as they do in a service: at random times, with answers of full length. Short answers with a pause
    before each one would not do. Most of their steps are among the first after a pause, and these are slower.
    """
    at_once = make_workload("chat", NUM_AT_ONCE, seed, float("inf")).requests
    sparse = make_workload("chat", NUM_SPARSE, seed + SPARSE_SEED, SPARSE_RATE).requests
    later = tuple(LabRequest(SPARSE_FROM_S + each.arrival_s, each.prompt, each.num_output_tokens) for each in sparse)
    timeline = play(Workload("calibration", (*at_once, *later)), SETTINGS, model)
    steps = [MeasuredStep.of(step.plan, step.done_s - step.began_s) for step in timeline.steps]
    return steps, admissions_when_idle_s(timeline)


def admissions_when_idle_s(timeline: Timeline) -> list[float]:
    """How long those requests took to come to the scheduler that came when all before them had ended."""
    first, *others = sorted(timeline.requests.values(), key=lambda each: each.arrival_s)
    admissions_s, ended_s = [], first.ended_s
    for each in others:
        if each.arrival_s > ended_s and each.admitted_s is not None:
            admissions_s.append(each.admitted_s - each.arrival_s)
        ended_s = max(ended_s, each.ended_s)
    return admissions_s


def slower(timeline: Timeline, model: SimulatedModel) -> float:
    """How much longer the steps of a run took in all than a model says: 0.1 for a tenth."""
    return (
        sum(step.done_s - step.began_s for step in timeline.steps)
        / sum(model.duration_s(step.plan) for step in timeline.steps)
        - 1.0
    )


def scaled_to(steps: list[MeasuredStep], model: SimulatedModel) -> SimulatedModel:
    """Return the model with all times multiplied, so that these steps take as long in all as they took."""
    times = [getattr(model, name) for name in TIMES]
    expected_s = sum(sum(map(operator.mul, step.work, times)) for step in steps)
    ratio = sum(step.duration_s for step in steps) / expected_s
    return replace(model, **{name: ratio * seconds for name, seconds in zip(TIMES, times, strict=True)})


def demand(rate: float, seconds: float, seed: int) -> Workload:
    """Make a plan's requests for so many seconds, with prompts that the model can read."""
    number = max(40, round(rate * seconds))
    made = make_requests(
        Demand(
            prompt_tokens=DEMAND.prompt_tokens,
            output_tokens=DEMAND.output_tokens,
            max_length=DEMAND.max_length,
            num_requests=number,
        ),
        rate,
        seed,
    )
    return Workload(
        made.name,
        tuple(
            LabRequest(
                each.arrival_s,
                tuple(40 + (each.prompt[0] * 7 + at * at) % (MAX_TOKEN_ID - 40) for at in range(len(each.prompt))),
                each.num_output_tokens,
            )
            for each in made.requests
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: a Llama of random weights")
    parser.add_argument("--folder", type=Path, default=MODEL_FOLDER, help="where the Llama is kept")
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=50.0, help="of each load")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    name = options.model or str(make_random_llama(options.folder, SMALL_SHAPE))
    steps, admissions_s = calibrate(name, CALIBRATION_SEED)
    calibrations = [steps]
    model = fit_step_times(steps).model
    at_once = make_requests(DEMAND, SATURATING_RATE, options.seed + 1)
    max_rate = steady_rate(VirtualRun(at_once, MODE, SETTINGS, model).play())
    tell(f"step times: {as_spec(model)}; the plan expects {max_rate:.2f} requests/s at most")
    workloads, played = [], []
    for number, load in enumerate(progress(options.loads, "loads", lambda each: f"load {each:g}")):
        workloads.append(demand(load * max_rate, options.seconds, options.seed))
        played.append(play(workloads[-1], SETTINGS, name))
        steps, more_s = calibrate(name, CALIBRATION_SEED + number + 1)
        calibrations.append(steps)
        admissions_s += more_s
    fit = fit_step_times([step for steps in calibrations for step in steps])
    models = [scaled_to([*before, *after], fit.model) for before, after in pairwise(calibrations)]
    settings = replace(SETTINGS, admission_s=median(admissions_s or [0.0]))
    tell(f"step times in the end: {as_spec(fit.model)}; median error of one step: {fit.median_relative_error:.1%}")
    tell(f"a request comes to an idle scheduler after {1e3 * settings.admission_s:.2f} ms\n")
    tell("| load | requests | steps | tokens/s | planned | off | ITL p50 | planned | off | TTFT p50 | planned | off |")
    tell("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    is_within = True
    for load, workload, timeline, model in zip(options.loads, workloads, played, models, strict=True):
        real = summarise(timeline, settings.num_slots)
        planned = summarise(VirtualRun(workload, MODE, settings, model).play(), settings.num_slots)
        cells = [f"{load:g}", f"{len(workload.requests)}", f"{slower(timeline, model):+.1%}"]
        for figure, aim in AIMS.items():
            error = getattr(planned, figure) / getattr(real, figure) - 1.0
            is_within = is_within and abs(error) <= aim
            cells += [as_text(real, figure), as_text(planned, figure), f"{error:+.1%}"]
        tell(f"| {' | '.join(cells)} |")
    aims = ", ".join(f"{figure} {aim:.0%}" for figure, aim in AIMS.items())
    tell(f"\nall within the aims ({aims}): {'yes' if is_within else 'no'}")


def as_text(summary: Summary, name: str) -> str:
    value = getattr(summary, name)
    return f"{value:.0f}" if name == "tokens_per_s" else f"{1e3 * value:.2f} ms"


if __name__ == "__main__":
    main()
