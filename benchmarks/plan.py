"""Compare what a plan expects of a service with what a real engine does: throughput, ITL and TTFT at four loads.

The engine serves a Llama of 84 million random weights. Requests of a plan (random arrivals, log-normal lengths) are
played with the real model, and in virtual time, with the same scheduler. The loads are parts of the rate that the plan
expects the engine to serve at most. The step times are fitted to other requests: chat messages that come at once, and
then at three rates. These are played before and after each load, by the same worker, because a machine is not
equally fast for minutes. The times of a load are those that fit all calibrations, times two ratios: how much slower
memory was in those before and after it, and how much slower multiplications were.

The simulated steps vary as those of the calibrations do: each takes its time, times the error of a random one of them.
`steps` says how much longer the steps of a run took in all than its step times say: this part of the error comes from
step times, and the rest from the simulation. `TTFT per 1 %` says by how much the planned TTFT changes if all steps
take one percent longer: in an overload the line follows from a small difference of two rates.

A second table plans with the same times, scaled to every other step of the load itself. These times are not known
beforehand; the table shows what is left of the errors when the speed of the machine is known.

    python -m benchmarks.plan

It takes six minutes. Run nothing else meanwhile: another program makes steps longer than they were before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np
from msgspec.structs import replace

from benchmarks.progress import tell
from benchmarks.random_llama import SMALL_SHAPE, make_random_llama
from servekit.laboratory.batching import MODES
from servekit.laboratory.real_run import RealRun
from servekit.laboratory.summary import summarise
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.virtual_run import LabSettings, VirtualRun
from servekit.laboratory.workload import LabRequest, Workload
from servekit.laboratory.workload_generator import make_workload
from servekit.planning.capacity import LOADS, SATURATING_RATE, steady_rate
from servekit.planning.demand import Demand, make_requests
from servekit.protocol.messages import StepPlan
from servekit.simulation.model import SimulatedModel
from servekit.simulation.step_time_fit import TIMES, MeasuredStep, as_spec, fit_step_times

MODEL_FOLDER = Path("build/small-llama")
MODE = MODES["chunked"]
SETTINGS = LabSettings(num_slots=8, num_kv_tokens=8192, max_model_len=512, chunk_tokens=128, has_prefix_cache=False)
DEMAND = Demand(prompt_tokens=100, output_tokens=60, max_length=500, num_requests=100)
CALIBRATION_SEED = 1000
SEEDS = (0, 1, 2)  # of the errors of single steps in a plan
NUM_AT_ONCE = 16  # messages of a calibration that come at once
FIRST_RATE = 15.0  # requests per second: what the engine serves at most, for the first calibration
CALIBRATION_S = 4.0  # at each of these parts of the highest rate
CALIBRATION_LOADS = (0.15, 0.5, 0.9)
READING = ("step_s", "decode_s", "context_s")  # those of TIMES that wait for memory
AIMS = {"tokens_per_s": 0.03, "itl_p50_s": 0.05, "ttft_p50_s": 0.10}
MAX_TOKEN_ID = 240  # prompts are made of tokens that every vocabulary has
MAX_RATIO = 5.0  # a step that took longer than this times what was expected says nothing about memory


def play(workload: Workload, settings: LabSettings, model: str) -> Timeline:
    return asyncio.run(RealRun(workload, MODE, settings, model).play())


class Session:
    """Workloads that one worker computes one after the other."""

    def __init__(self, model: SimulatedModel) -> None:
        """`model` says roughly how long a workload takes: the next one begins after that."""
        self._model = model
        self._workloads: list[Workload] = []
        self._begins_s = [0.0]

    @property
    def duration_s(self) -> float:
        return self._begins_s[-1]

    def add(self, workload: Workload) -> None:
        planned = VirtualRun(workload, MODE, SETTINGS, self._model).play()
        lasts_s = max(request.ended_s for request in planned.requests.values())
        self._workloads.append(workload)
        self._begins_s.append(self._begins_s[-1] + 1.07 * lasts_s + 0.5)

    def play(self, model: str) -> list[Timeline]:
        """Return what became of each workload."""
        requests = [
            LabRequest(begins_s + each.arrival_s, each.prompt, each.num_output_tokens)
            for workload, begins_s in zip(self._workloads, self._begins_s, strict=False)
            for each in workload.requests
        ]
        whole = play(Workload("session", tuple(requests)), SETTINGS, model)
        first_s = min(each.arrival_s for each in whole.requests.values())
        return [cut_out(whole, first_s + begin_s, first_s + end_s) for begin_s, end_s in pairwise(self._begins_s)]


def cut_out(whole: Timeline, begin_s: float, end_s: float) -> Timeline:
    """Return the part of a timeline with what came in this time."""
    part, margin_s = Timeline(), 1e-6  # arrivals are sums of floats
    part.requests = {
        sequence_id: each
        for sequence_id, each in whole.requests.items()
        if begin_s - margin_s <= each.arrival_s < end_s - margin_s
    }
    part.steps = [step for step in whole.steps if begin_s <= step.began_s < end_s]
    if any(each.ended_s > end_s for each in part.requests.values()):
        tell("a workload took longer than expected, so the next one began before it had ended")
    return part


def calibration(rate: float, seed: int) -> Workload:
    """Make messages that come at once, for full batches, and then at parts of the highest rate, as in a service."""
    requests = list(make_workload("chat", NUM_AT_ONCE, seed, float("inf")).requests)
    begins_s = 1.2 * NUM_AT_ONCE / rate
    for number, load in enumerate(CALIBRATION_LOADS):
        made = make_workload("chat", round(load * rate * CALIBRATION_S), 10 * seed + number, load * rate)
        requests += [
            LabRequest(begins_s + each.arrival_s, each.prompt, each.num_output_tokens) for each in made.requests
        ]
        begins_s += CALIBRATION_S
    return Workload("calibration", tuple(sorted(requests, key=lambda each: each.arrival_s)))


def measured_steps(timeline: Timeline) -> list[MeasuredStep]:
    return [MeasuredStep.of(step.plan, step.done_s - step.began_s) for step in timeline.steps]


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
    """Multiply the times of reading by one ratio and the others by another one, so that they fit these steps best.

    Then multiply all of them, so that the steps take as long in all as they took.
    """
    times = np.array([getattr(model, name) for name in TIMES])
    is_reading = np.array([name in READING for name in TIMES])
    work, seconds = np.array([step.work for step in steps]), np.array([step.duration_s for step in steps])
    parts_s = np.stack([work @ (times * is_reading), work @ (times * ~is_reading)], axis=1)
    expected_s = parts_s.sum(axis=1)
    kept = seconds < MAX_RATIO * expected_s
    ratios = np.linalg.lstsq(parts_s[kept] / expected_s[kept, None], seconds[kept] / expected_s[kept], rcond=None)[0]
    times *= np.where(is_reading, *ratios) * seconds.sum() / (parts_s @ ratios).sum()
    return replace(model, **dict(zip(TIMES, times.tolist(), strict=True)))


class VaryingSteps:
    """Steps that take as long as a model says, times the error of a random one of steps that were measured."""

    def __init__(self, model: SimulatedModel, steps: list[MeasuredStep], fitted: SimulatedModel, seed: int) -> None:
        """The errors are those of `fitted`."""
        self._model = model
        self._rng = random.Random(seed)
        times = [getattr(fitted, name) for name in TIMES]
        # Steps with a prompt's tokens have other errors than those without.
        self._ratios: dict[bool, list[float]] = {False: [], True: []}
        for step in steps:
            expected_s = sum(amount * time_s for amount, time_s in zip(step.work, times, strict=True))
            self._ratios[step.work[1] > 0].append(step.duration_s / expected_s)

    def duration_s(self, plan: StepPlan) -> float:
        ratios = self._ratios[plan.num_tokens > len(plan.chunks)]
        return self._model.duration_s(plan) * self._rng.choice(ratios or [1.0])


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
    first = fit_step_times(measured_steps(play(calibration(FIRST_RATE, CALIBRATION_SEED), SETTINGS, name))).model
    at_once = make_requests(DEMAND, SATURATING_RATE, options.seed + 1)
    max_rate = steady_rate(VirtualRun(at_once, MODE, SETTINGS, first).play())
    tell(f"step times: {as_spec(first)}; the plan expects {max_rate:.2f} requests/s at most")
    session, workloads = Session(first), []
    session.add(calibration(max_rate, CALIBRATION_SEED + 1))
    # The overload comes first: the highest rate was planned just before, and a queue depends on little of it.
    loads = sorted(options.loads, reverse=True)
    for number, load in enumerate(loads):
        workloads.append(demand(load * max_rate, options.seconds, options.seed))
        session.add(workloads[-1])
        session.add(calibration(max_rate, CALIBRATION_SEED + 2 + number))
    tell(f"calibrations and loads take {session.duration_s:.0f} s")
    timelines = session.play(name)
    calibrations, played = [measured_steps(each) for each in timelines[::2]], timelines[1::2]
    fit = fit_step_times([step for steps in calibrations for step in steps])
    admissions_s = [each for timeline in timelines[::2] for each in admissions_when_idle_s(timeline)]
    settings = replace(SETTINGS, admission_s=median(admissions_s or [0.0]))
    tell(f"step times of all calibrations: {as_spec(fit.model)}; median error of one: {fit.median_relative_error:.1%}")
    tell(f"a request comes to an idle scheduler after {1e3 * settings.admission_s:.2f} ms\n")
    around = [[*before, *after] for before, after in pairwise(calibrations)]
    half = [measured_steps(each)[::2] for each in played]
    runs = list(zip(loads, workloads, played, strict=True))
    for title, fitted_to in (("the calibrations before and after", around), ("every other step of the load", half)):
        tell(f"\n{title} say how fast the machine is:\n")
        is_within = compare(runs, fitted_to, fit.model, settings)
        aims = ", ".join(f"{figure} {aim:.0%}" for figure, aim in AIMS.items())
        tell(f"\nall within the aims ({aims}): {'yes' if is_within else 'no'}")


def compare(
    runs: list[tuple[float, Workload, Timeline]],
    fitted_to: list[list[MeasuredStep]],
    model: SimulatedModel,
    settings: LabSettings,
) -> bool:
    """Print a row for each load, planned with step times scaled to its steps; return whether all aims are met."""
    tell(
        "| load | requests | steps | tokens/s | planned | off | ITL p50 | planned | off | TTFT p50 | planned | off "
        "| TTFT per 1 % |"
    )
    tell("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    is_within = True
    with ProcessPoolExecutor() as processes:
        planning = [
            processes.submit(plan, workload, steps, scaled_to(steps, model), settings)
            for (_, workload, _), steps in zip(runs, fitted_to, strict=True)
        ]
    for (load, workload, timeline), steps, future in reversed(list(zip(runs, fitted_to, planning, strict=True))):
        real = summarise(timeline, settings.num_slots)
        planned, slow_ttft_s = future.result()
        cells = [f"{load:g}", f"{len(workload.requests)}", f"{slower(timeline, scaled_to(steps, model)):+.1%}"]
        for figure, aim in AIMS.items():
            error = planned[figure] / getattr(real, figure) - 1.0
            is_within = is_within and abs(error) <= aim
            cells += [as_text(figure, getattr(real, figure)), as_text(figure, planned[figure]), f"{error:+.1%}"]
        tell(f"| {' | '.join(cells)} | {slow_ttft_s / planned['ttft_p50_s'] - 1.0:+.1%} |")
    return is_within


def plan(
    workload: Workload, steps: list[MeasuredStep], model: SimulatedModel, settings: LabSettings
) -> tuple[dict[str, float], float]:
    """Return the planned figures, and the TTFT if all steps take one percent longer: means of some runs."""
    slow = replace(model, **{name: 1.01 * getattr(model, name) for name in TIMES})

    def figures(played: SimulatedModel) -> dict[str, float]:
        runs = [VirtualRun(workload, MODE, settings, VaryingSteps(played, steps, model, seed)) for seed in SEEDS]
        summaries = [summarise(run.play(), settings.num_slots) for run in runs]
        return {figure: mean(getattr(each, figure) for each in summaries) for figure in AIMS}

    return figures(model), figures(slow)["ttft_p50_s"]


def as_text(figure: str, value: float) -> str:
    return f"{value:.0f}" if figure == "tokens_per_s" else f"{1e3 * value:.2f} ms"


if __name__ == "__main__":
    main()
