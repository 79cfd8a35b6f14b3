"""Compare servekit with other servers in one run: the same model, prompts and load generator.

    python -m benchmarks.against_peers --model PATH --peer vllm=http://127.0.0.1:8101 [--rounds 3] [--clients 1 8 32]

The benchmark starts servekit. A peer is any server that answers `/v1/completions` at its address; it must have no other
load. Rounds alternate between the servers, so a noisy machine affects all of them, and each figure is the median of its
rounds. Sampling is greedy, with answers of a fixed length, so a peer must support `ignore_eos`. Requests that were not
answered completely are reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from benchmarks.progress import Progress, tell
from loadtest.analysis.statistics import Distribution
from loadtest.analysis.summary import Figures, Summary
from loadtest.experiment import Experiment, run
from loadtest.reporting.formatting import as_number, as_time
from loadtest.target import ApiFormat, Target
from tests.support.server_process import serving

# Prompts of 64 to 512 tokens and answers of 64; then 544 tokens of which 512 are the same for all, and answers of 32.
WORKLOADS = {
    "mixed": "random:input=uniform:64-512,output=64",
    "shared prefix": "prefix:groups=1,prefix=512,suffix=32,output=32",
}
MIN_REQUESTS_PER_CLIENT = 4
MIN_REQUESTS = 10


def ask(url: str, workload: str, num_clients: int, seed: int, characters_per_token: float) -> Summary:
    """Run one round. The prompts are the same for all servers, and new in each round."""
    target = Target(urls=[url], api=ApiFormat.COMPLETIONS, fields={"temperature": 0.0})
    experiment = Experiment(
        target=target,
        arrivals=f"closed:{num_clients}",
        workload=workload,
        num_requests=max(MIN_REQUESTS, MIN_REQUESTS_PER_CLIENT * num_clients),
        characters_per_token=characters_per_token,
        seed=seed,
        num_warm_up=min(num_clients, 4),
    )
    summary = run(experiment, url, None).summary
    if not summary.is_valid or summary.failures:
        tell(f"{url}: {summary.invalid_because} {summary.failures}", file=sys.stderr)
    return summary


def median(rounds: list[Summary], of: Callable[[Figures], float | None]) -> float | None:
    known = [value for value in (of(each.full) for each in rounds) if value is not None]
    return statistics.median(known) if known else None


def p50(of: Callable[[Figures], Distribution | None]) -> Callable[[Figures], float | None]:
    def value(figures: Figures) -> float | None:
        distribution = of(figures)
        return None if distribution is None else distribution.p50

    return value


def row(name: str, num_clients: int, sides: dict[str, list[Summary]]) -> str:
    """Return a table row: rate and times of each server, and the ratio of servekit's rate to the others'.

    An asterisk marks a round in which the client was late. That can happen beside a server that uses all cores, and the
    times are then a little too long.
    """
    rates = {side: median(rounds, lambda each: each.output_tokens_per_s) for side, rounds in sides.items()}
    ours = rates["servekit"]
    cells = [name, str(num_clients)]
    for side, rounds in sides.items():
        times = [median(rounds, p50(of)) for of in (lambda each: each.ttft_s, lambda each: each.tpot_s)]
        mark = "" if all(each.is_valid for each in rounds) else " *"
        cells += [as_number(rates[side]) + mark, *map(as_time, times)]
    cells += [f"{ours / rate:.2f}" if ours and rate else "-" for side, rate in rates.items() if side != "servekit"]
    return f"| {' | '.join(cells)} |"


def play(urls: dict[str, str], arguments: argparse.Namespace) -> None:
    """Measure all servers in turn, and print a row for each load."""
    num_steps = len(arguments.workloads) * len(arguments.clients) * arguments.rounds * len(urls)
    with Progress("rounds", num_steps) as progress:
        for number, name in enumerate(arguments.workloads):
            for num_clients in arguments.clients:
                sides: dict[str, list[Summary]] = {side: [] for side in urls}
                for of_round in range(arguments.rounds):
                    seed = 1000 * number + 100 * of_round + num_clients
                    for side, url in urls.items():
                        progress.begin(f"{side}, {name}, {num_clients} clients")
                        summary = ask(url, WORKLOADS[name], num_clients, seed, arguments.characters_per_token)
                        sides[side].append(summary)
                tell(row(name, num_clients, sides))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="model that servekit serves")
    parser.add_argument("--serve", default="", help="further flags of servekit serve, separated by spaces")
    parser.add_argument("--url", help="address of a running servekit; by default the benchmark starts one")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="another server; can be repeated"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--characters-per-token", type=float, default=4.0)
    arguments = parser.parse_args()
    peers = dict(each.split("=", 1) for each in arguments.peer)
    names = ["servekit", *peers]
    print(f"{os.cpu_count()} cores, {arguments.model}, median of {arguments.rounds} rounds")
    heads = [f"{name}, {what}" for name in names for what in ("tokens/s", "TTFT p50", "TPOT p50")]
    heads += [f"servekit / {name}" for name in peers]
    print(f"\n| load | clients | {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) + 1)}")
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--model", arguments.model, "--log-level", "warning", *arguments.serve.split())
        with nullcontext() if arguments.url else serving(*flags, log=Path(folder) / "log") as server:
            play({"servekit": server.url if server else arguments.url, **peers}, arguments)


if __name__ == "__main__":
    main()
