"""Compare a bound on predicted waiting times with a bound on the number of waiting requests, in an overload.

The server is a real one, with a simulated model whose steps take the same time on each machine. Clients that always
wait show how many requests per second it can bear. Then random requests come at 1.5 times that rate, the same to each
of two servers: one keeps at most 4,096 requests waiting, and the other one also refuses requests whose predicted wait
is above a limit. The goodput is the number of requests per second whose first token came within that limit and a
second.

    python -m benchmarks.goodput [--seconds 40] [--max-wait 5] [--scheduling-policy fcfs]

It takes two and a half minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.progress import Progress, tell
from loadtest.analysis.slo import parse
from loadtest.analysis.summary import Summary
from loadtest.experiment import Experiment, run
from loadtest.target import ApiFormat, Target
from tests.support.server_process import serving

MODEL = "sim:step=5ms,prefill=50us,decode=250us"
NUM_SLOTS = 8
MAX_NUM_QUEUED = 4096
OVERLOAD = 1.5
NUM_CALM = 240  # requests that show what the server can bear, in some 15 s
WORKLOAD = "random:input=lognormal:60,0.6|4-400,output=lognormal:60,0.6|2-300"


def play(
    url: str, arrivals: str, limit_s: float, *, num_requests: int | None = None, seconds: float | None = None
) -> Summary:
    target = Target(urls=[url], api=ApiFormat.GENERATE_STREAM, fields={"ignore_eos": True})
    experiment = Experiment(
        target=target,
        arrivals=arrivals,
        workload=WORKLOAD,
        num_requests=num_requests,
        duration_s=seconds,
        objectives=parse(f"ttft:{limit_s:g}s"),
    )
    return run(experiment, url, None).summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each overload")
    parser.add_argument("--max-wait", type=float, default=5.0, help="the limit of predicted waiting times, in seconds")
    parser.add_argument("--scheduling-policy", default="shortest", help="of both servers")
    options = parser.parse_args()
    limit_s, rate = options.max_wait + 1.0, 0.0
    tell("| the line is bounded by | requests/s come | answered | refused | goodput, requests/s | TTFT p50 |")
    tell("|---|---:|---:|---:|---:|---:|")
    bounds = {f"{MAX_NUM_QUEUED:,} requests": 0.0, f"{options.max_wait:g} s of predicted wait": options.max_wait}
    flags = ["--model", MODEL, "--max-num-seqs", f"{NUM_SLOTS}", "--max-num-queued-reqs", f"{MAX_NUM_QUEUED}"]
    flags += ["--scheduling-policy", options.scheduling_policy]
    with tempfile.TemporaryDirectory() as folder, Progress("bounds", len(bounds)) as progress:
        for number, (name, max_wait_s) in enumerate(bounds.items()):
            progress.begin(name)
            log = Path(folder) / f"log{number}"
            with serving(*flags, "--max-predicted-wait", f"{max_wait_s:g}", log=log) as server:
                url = f"http://127.0.0.1:{server.port}"
                calm = play(url, f"closed:{2 * NUM_SLOTS}", limit_s, num_requests=NUM_CALM)
                rate = rate or OVERLOAD * calm.full.requests_per_s
                full = play(url, f"poisson:{rate:.3f}", limit_s, seconds=options.seconds).full
            assert full.goodput is not None
            num_refused = full.num_requests - full.num_answered
            ttft = f"{full.ttft_s.p50:.2f} s" if full.ttft_s is not None else "-"
            tell(
                f"| {name} | {rate:.2f} | {full.num_answered:,} | {num_refused:,} | "
                f"{full.goodput.num_good / options.seconds:.2f} | {ttft} |"
            )


if __name__ == "__main__":
    main()
