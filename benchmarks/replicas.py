"""Compare one server of two replicas with one server of two threads, and with two servers, on the same cores.

    python -m benchmarks.replicas [--model demo] [--rounds 5] [--clients 4 16] [--write]

All servers run all the time, and the sides get the same requests in turn, so a noisy machine affects all of them. Each
figure is the median of its rounds. Prompts are new in every round. Between the two servers connections alternate, as
behind a port that both listen at (`--reuse-port`) or a balancer that knows nothing of prefixes. The hit rate is the
share of prompt tokens that the prefix cache held, over all servers of a side. Client, servers and workers share the
cores, so the figures are lower than those of a server that has the machine for itself. `--write` writes the table into
docs/design/replicas.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx2
from msgspec import Struct, field

from benchmarks.progress import Progress, tell
from loadtest.analysis.statistics import Distribution
from loadtest.analysis.summary import Figures, Summary
from loadtest.experiment import Experiment, run
from loadtest.reporting.formatting import as_number, as_time
from loadtest.target import ApiFormat, Target
from scripts.tables import with_table
from tests.support.server_process import serving

WORKLOADS = {
    "conversations": "conversation:turns=4,input=uniform:32-96,output=48,think=0.3",
    "shared prefixes": "prefix:groups=12,prefix=384,suffix=32,output=48,zipf=1",
    "no prefixes": "random:input=uniform:32-256,output=64",
}
REQUESTS_PER_CLIENT = 12
MAKER = "python -m benchmarks.replicas"
PAGE = Path(__file__).parents[1] / "docs" / "design" / "replicas.md"
ONE_THREAD, TWO_THREADS = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}


class Side(Struct):
    """Servers that get the same load together, and what was measured of them."""

    name: str
    servers: list[tuple[tuple[str, ...], dict[str, str]]]  # flags and environment of each
    urls: list[str] = field(default_factory=list)
    rounds: list[Summary] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)


def sides() -> list[Side]:
    return [
        Side("one server, 2 replicas of 1 thread", [(("--data-parallel-size", "2"), ONE_THREAD)]),
        Side("one server, 1 worker of 2 threads", [((), TWO_THREADS)]),
        Side("two servers, 1 worker of 1 thread each", [((), ONE_THREAD)] * 2),
    ]


def counters(urls: list[str]) -> tuple[float, float]:
    """Return how many prompt tokens the prefix caches of all servers were asked for, and how many they held."""
    totals = [0.0, 0.0]
    for url in urls:
        for line in httpx2.get(f"{url}/metrics").text.splitlines():
            for index, name in enumerate(("servekit_prefix_cache_queries_total", "servekit_prefix_cache_hits_total")):
                if line.startswith((f"{name}{{", f"{name} ")):
                    totals[index] += float(line.rpartition(" ")[2])
    return totals[0], totals[1]


def play(side: Side, workload: str, num_clients: int, seed: int, characters_per_token: float) -> None:
    """Run one round against a side."""
    target = Target(urls=side.urls, api=ApiFormat.COMPLETIONS, fields={"temperature": 0.0})
    experiment = Experiment(
        target=target,
        arrivals=f"closed:{num_clients}",
        workload=workload,
        num_requests=REQUESTS_PER_CLIENT * num_clients,
        characters_per_token=characters_per_token,
        seed=seed,
        num_warm_up=0,
    )
    queries, hits = counters(side.urls)
    summary = run(experiment, side.name, None).summary
    if summary.failures:
        tell(f"{side.name}: {summary.failures}", file=sys.stderr)
    now_queries, now_hits = counters(side.urls)
    side.rounds.append(summary)
    side.hit_rates.append((now_hits - hits) / max(1.0, now_queries - queries))


def median_of(side: Side, of: Callable[[Figures], float | None]) -> float | None:
    known = [value for value in (of(each.full) for each in side.rounds) if value is not None]
    return statistics.median(known) if known else None


def share(of: Callable[[Figures], Distribution | None], name: str) -> Callable[[Figures], float | None]:
    def value(figures: Figures) -> float | None:
        distribution = of(figures)
        return None if distribution is None else getattr(distribution, name)  # type: ignore[no-any-return]

    return value


def row(name: str, num_clients: int, side: Side) -> str:
    cells = [
        name,
        str(num_clients),
        side.name,
        as_number(median_of(side, lambda each: each.output_tokens_per_s)),
        as_time(median_of(side, share(lambda each: each.ttft_s, "p50"))),
        as_time(median_of(side, share(lambda each: each.ttft_s, "p99"))),
        as_time(median_of(side, share(lambda each: each.itl_s, "p99"))),
        f"{100 * statistics.median(side.hit_rates):.0f} %",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--serve", default="", help="further flags of servekit serve, separated by spaces")
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--characters-per-token", type=float, default=4.0)
    parser.add_argument("--write", action="store_true", help="write the table into docs/design/replicas.md")
    arguments = parser.parse_args()
    lines = [
        "",
        f"{os.cpu_count()} cores ({platform.machine()}), the model {arguments.model}, medians of {arguments.rounds} "
        f"rounds, on {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}.",
        "",
        "| load | clients | side | tokens/s | TTFT p50 | TTFT p99 | between tokens, p99 | hit rate |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    flags = ("--model", arguments.model, "--log-level", "warning", *arguments.serve.split())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        compared = sides()
        for side in compared:
            for more, environment in side.servers:
                log = Path(folder) / f"log-{len(side.urls)}-{compared.index(side)}"
                server = stack.enter_context(serving(*flags, *more, log=log, environment=environment))
                side.urls.append(server.url)
        num_rounds = len(arguments.workloads) * len(arguments.clients) * (1 + arguments.rounds) * len(compared)
        with Progress("rounds", num_rounds) as progress:
            for number, name in enumerate(arguments.workloads):
                for num_clients in arguments.clients:
                    for of_round in range(-1, arguments.rounds):  # the first one is a warm-up
                        for side in compared[of_round % 3 :] + compared[: of_round % 3]:
                            progress.begin(f"{side.name}, {name}, {num_clients} clients")
                            seed = 10_000 * number + 100 * (1 + of_round) + num_clients
                            play(side, WORKLOADS[name], num_clients, seed, arguments.characters_per_token)
                    for side in compared:
                        del side.rounds[0], side.hit_rates[0]
                        lines.append(row(name, num_clients, side))
                        tell(lines[-1])
                        side.rounds.clear()
                        side.hit_rates.clear()
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "replicas", iter([*lines, ""]), MAKER))


if __name__ == "__main__":
    main()
