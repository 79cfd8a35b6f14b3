"""Compare the figures of two load generators for one server: loadtest and NVIDIA's aiperf, with the same parameters.

    python -m benchmarks.against_aiperf --aiperf PATH/TO/aiperf [--rounds 3] [--requests 300]

Install aiperf in its own environment (`pip install aiperf`). Both send requests to /v1/completions of a server with
the simulated model, whose steps take a configured time. Answers have different lengths: otherwise all clients of a
closed loop would run in step, and a millisecond between two requests would decide about the next step for all of
them. aiperf's "inter-token latency" is the mean of a request, which loadtest calls TPOT. aiperf's clock starts when a
request is sent, and so does that of the compared figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from benchmarks.progress import progress
from loadtest.experiment import Experiment, run
from loadtest.target import ApiFormat, Target
from servekit.engine.model_files import SIMULATED_MODEL_PATH
from tests.support.server_process import serving

MODEL = "sim:step=20ms,prefill=50us"
NAME = "simulated"  # aiperf takes a comma as a separator between two models
NUM_INPUT, NUM_OUTPUT, SPREAD = 64, 32, 8
LOADS = {
    "closed:8": ["--concurrency", "8"],
    "constant:17": ["--request-rate", "17", "--arrival-pattern", "constant"],
}
FIGURES = ("TTFT p50, ms", "TTFT p90, ms", "TPOT p50, ms", "TPOT p90, ms", "output tokens/s", "requests/s")


def ask_aiperf(program: str, port: int, load: str, num_requests: int, seed: int, folder: Path) -> dict[str, float]:
    command = [program, "profile", "-m", NAME, "--tokenizer", str(SIMULATED_MODEL_PATH)]
    command += ["--url", f"http://127.0.0.1:{port}", "--endpoint-type", "completions", "--streaming"]
    command += ["--isl", str(NUM_INPUT), "--osl", str(NUM_OUTPUT), "--osl-stddev", str(SPREAD), *LOADS[load]]
    command += ["--request-count", str(num_requests), "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    command += ["--random-seed", str(seed), "--output-artifact-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    ttft, itl = report["time_to_first_token"], report["inter_token_latency"]
    rates = (report["output_token_throughput"]["avg"], report["request_throughput"]["avg"])
    return dict(zip(FIGURES, (ttft["p50"], ttft["p90"], itl["p50"], itl["p90"], *rates), strict=True))


def ask_loadtest(port: int, load: str, num_requests: int, seed: int) -> dict[str, float]:
    target = Target(urls=[f"http://127.0.0.1:{port}"], api=ApiFormat.COMPLETIONS, verifies=True)
    experiment = Experiment(
        target=target,
        arrivals=load,
        workload=f"random:input={NUM_INPUT},output=normal:{NUM_OUTPUT},{SPREAD}",
        num_requests=num_requests,
        characters_per_token=1.0,
        seed=seed,
    )
    summary = run(experiment, "loadtest", None).summary
    assert summary.is_valid, summary.invalid_because
    full = summary.full
    assert full.num_answered == num_requests and full.ttft_from_start_s is not None and full.tpot_s is not None
    times = (full.ttft_from_start_s.p50, full.ttft_from_start_s.p90, full.tpot_s.p50, full.tpot_s.p90)
    values = (*(1e3 * each for each in times), full.output_tokens_per_s, full.requests_per_s)
    return dict(zip(FIGURES, values, strict=True))


def compare(load: str, aiperf: str, port: int, num_rounds: int, num_requests: int, folder: Path) -> None:
    """Measure one load with both generators in turn."""
    theirs, ours = list[dict[str, float]](), list[dict[str, float]]()
    for number in progress(range(num_rounds), load, lambda number: f"round {number + 1}, loadtest and then aiperf"):
        ours.append(ask_loadtest(port, load, num_requests, number))
        theirs.append(ask_aiperf(aiperf, port, load, num_requests, number, folder / f"{load}-{number}"))
    print(f"\n| {load} | aiperf | loadtest | ratio |\n|---|---:|---:|---:|")
    for name in FIGURES:
        first, second = (statistics.median(each[name] for each in rounds) for rounds in (theirs, ours))
        print(f"| {name} | {first:.2f} | {second:.2f} | {second / first:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--aiperf", required=True, help="path of the aiperf program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, {arguments.requests} requests to {MODEL}, median of {arguments.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--model", MODEL, "--served-model-name", NAME, "--log-level", "warning")
        with serving(*flags, log=Path(folder) / "log") as server:
            for load in LOADS:
                compare(load, arguments.aiperf, server.port, arguments.rounds, arguments.requests, Path(folder))


if __name__ == "__main__":
    main()
