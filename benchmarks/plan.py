"""Compare what a plan expects of a service with what a real engine does: throughput, ITL and TTFT at four loads.

The step times are fitted to another workload, at another time: chat messages that come at once. Then requests of a plan
(random arrivals, log-normal lengths) are played with the real model, and in virtual time, with the same scheduler. The
loads are parts of the rate that the plan expects the engine to serve at most.

    python -m benchmarks.plan

It takes seven minutes. Run nothing else meanwhile: another program makes steps longer than they were before.
"""

from __future__ import annotations

import argparse
import asyncio
from statistics import median

from benchmarks.progress import progress, tell
from servekit.laboratory.batching import MODES
from servekit.laboratory.real_run import RealRun
from servekit.laboratory.summary import Summary, summarise
from servekit.laboratory.timeline import Timeline
from servekit.laboratory.virtual_run import LabSettings, VirtualRun
from servekit.laboratory.workload import LabRequest, Workload
from servekit.laboratory.workload_generator import make_workload
from servekit.planning.capacity import LOADS, SATURATING_RATE, steady_rate
from servekit.planning.demand import Demand, make_requests
from servekit.simulation.step_time_fit import MeasuredStep, as_spec, fit_step_times

MODE = MODES["chunked"]
SETTINGS = LabSettings(num_slots=8, num_kv_tokens=8192, max_model_len=512, chunk_tokens=128, has_prefix_cache=False)
DEMAND = Demand(prompt_tokens=100, output_tokens=60, max_length=500, num_requests=100)
CALIBRATION_SEED = 1000
NUM_CALIBRATING = 64
PAUSE_S = 0.5  # between requests that come to an idle engine
AIMS = {"tokens_per_s": 0.03, "itl_p50_s": 0.05, "ttft_p50_s": 0.10}
MAX_TOKEN_ID = 240  # prompts are made of tokens that every vocabulary has


def play(workload: Workload, settings: LabSettings, model: str) -> Timeline:
    return asyncio.run(RealRun(workload, MODE, settings, model).play())


def calibrate(model: str) -> tuple[list[MeasuredStep], float]:
    """Measure steps, and how long a request takes to come to an idle scheduler."""
    requests = make_workload("chat", NUM_CALIBRATING, CALIBRATION_SEED, float("inf")).requests
    sparse = tuple(
        LabRequest(PAUSE_S * number, each.prompt, min(20, each.num_output_tokens))
        for number, each in enumerate(requests[:24])
    )
    together = play(Workload("calibration", requests), SETTINGS, model)
    alone = play(Workload("calibration", sparse), SETTINGS, model)
    steps = [
        MeasuredStep.of(step.plan, step.done_s - step.began_s)
        for timeline in (together, alone)
        for step in timeline.steps
    ]
    admissions_s = [each.admitted_s - each.arrival_s for each in alone.requests.values() if each.admitted_s is not None]
    return steps, median(admissions_s)


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
    parser.add_argument("--model", default="demo")
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    steps, admission_s = calibrate(options.model)
    fit = fit_step_times(steps)
    settings = LabSettings(
        num_slots=SETTINGS.num_slots,
        num_kv_tokens=SETTINGS.num_kv_tokens,
        max_model_len=SETTINGS.max_model_len,
        chunk_tokens=SETTINGS.chunk_tokens,
        has_prefix_cache=SETTINGS.has_prefix_cache,
        admission_s=admission_s,
    )
    tell(f"step times: {as_spec(fit.model)}; median error of one step: {fit.median_relative_error:.1%}")
    tell(f"a request comes to an idle scheduler after {1e3 * admission_s:.2f} ms\n")
    at_once = make_requests(DEMAND, SATURATING_RATE, options.seed + 1)
    max_rate = steady_rate(VirtualRun(at_once, MODE, settings, fit.model).play())
    tell(f"the plan expects {max_rate:.1f} requests/s at most\n")
    tell("| load | requests | tokens/s | planned | off | ITL p50 | planned | off | TTFT p50 | planned | off |")
    tell("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    is_within = True
    for load in progress(options.loads, "loads", lambda each: f"load {each:g}"):
        workload = demand(load * max_rate, options.seconds, options.seed)
        real = summarise(play(workload, settings, options.model), settings.num_slots)
        planned = summarise(VirtualRun(workload, MODE, settings, fit.model).play(), settings.num_slots)
        cells = [f"{load:g}", f"{len(workload.requests)}"]
        for name, aim in AIMS.items():
            error = getattr(planned, name) / getattr(real, name) - 1.0
            is_within = is_within and abs(error) <= aim
            cells += [as_text(real, name), as_text(planned, name), f"{error:+.1%}"]
        tell(f"| {' | '.join(cells)} |")
    aims = ", ".join(f"{name} {aim:.0%}" for name, aim in AIMS.items())
    tell(f"\nall within the aims ({aims}): {'yes' if is_within else 'no'}")


def as_text(summary: Summary, name: str) -> str:
    value = getattr(summary, name)
    return f"{value:.0f}" if name == "tokens_per_s" else f"{1e3 * value:.2f} ms"


if __name__ == "__main__":
    main()
