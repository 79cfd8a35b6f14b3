"""Tokens per second, and processor time of each kind of process for a token, with 1, 2 and 4 API processes.

    python -m benchmarks.api_processes [--processes 1 2 4] [--replicas 1] [--streams 256] [--tokens 200] [--rounds 3]

The workers are simulated and take no time, so what is left is servekit itself, and the kernel. On a machine with few
cores all processes compete, and the throughput says little. What a process takes for a token says more: if it takes T
µs, it carries at most 1e6 / T tokens a second on a core of its own. The last lines compute from that what a machine
with more cores would carry.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from benchmarks.progress import Progress
from benchmarks.stream_cost import StreamCost, measure_streams
from tests.support.server_process import serving

KINDS = ("engine", "API", "workers", "client")


class Side(Struct):
    """A number of API processes, and what was measured with it."""

    num_processes: int
    interval: int  # tokens of an event
    costs: list[StreamCost] = field(default_factory=list)

    def median_us(self, kind: str) -> float:
        return statistics.median(cost.cpu_us[kind] for cost in self.costs)


@contextmanager
def serving_side(side: Side, num_replicas: int, num_streams: int) -> Iterator[tuple[int, dict[str, list[int]]]]:
    """Its port, and its processes by kind. With one API process, the engine process is that."""
    flags = ("--model", "sim:instant", "--max-num-seqs", str(num_streams), "--log-level", "warning")
    flags += ("--data-parallel-size", str(num_replicas), "--api-processes", str(side.num_processes))
    with tempfile.TemporaryDirectory() as folder, serving(*flags, log=Path(folder) / "log") as server:
        pids = {
            "engine": [server.process.pid],
            "API": server.api_process_pids(),
            "workers": server.worker_pids(),
        }
        yield server.port, pids


def play(side: Side, num_replicas: int, num_streams: int, num_tokens: int, seed: int) -> None:
    """One round."""
    fields: dict[str, Any] = {} if side.interval == 1 else {"stream_interval": side.interval}
    with serving_side(side, num_replicas, num_streams) as (port, pids):
        side.costs.append(measure_streams(port, pids, num_streams, num_tokens, seed, fields))


def project(side: Side, num_cores: int, num_gpus: int, utilization: float) -> tuple[int, float, str]:
    """(API processes, tokens per second, what limits them) on a machine on which each GPU's worker has a core.

    The engine process has one core, and the API processes have the others. No process uses more than `utilization` of
    its core: beyond that, waiting times grow.
    """
    num_processes = num_cores - num_gpus - 1
    of_engine = utilization * 1e6 / side.median_us("engine")
    of_api = utilization * 1e6 * num_processes / side.median_us("API")
    return num_processes, min(of_engine, of_api), "engine" if of_engine < of_api else "API processes"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 8], help="tokens of an event")
    parser.add_argument("--replicas", type=int, default=1, help="simulated workers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--cores", type=int, default=16, help="of the machine to project to")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--utilization", type=float, default=0.7)
    arguments = parser.parse_args()
    sides = [Side(number, interval) for interval in arguments.intervals for number in arguments.processes]
    with Progress("rounds", arguments.rounds * len(sides)) as progress:
        for number in range(arguments.rounds):
            for side in sides:
                progress.begin(f"{side.num_processes} API processes, {side.interval} tokens an event")
                play(side, arguments.replicas, arguments.streams, arguments.tokens, number)
    print(
        f"{os.cpu_count()} cores, {arguments.replicas} simulated workers, {arguments.streams} streams, median of "
        f"{arguments.rounds} rounds; CPU in µs a token"
    )
    print("\n| API processes | tokens an event | tokens/s | engine process | API processes | workers | client |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for side in sides:
        cells = [f"{side.median_us(kind):.1f}" if side.num_processes > 1 or kind != "API" else "" for kind in KINDS]
        tokens_per_s = f"{statistics.median(cost.tokens_per_s for cost in side.costs):,.0f}"
        print(f"| {side.num_processes} | {side.interval} | {tokens_per_s} | {' | '.join(cells)} |")
    print(f"\n{arguments.cores} cores, {arguments.gpus} GPUs, cores at most {arguments.utilization:.0%} busy:")
    for side in sides:
        event = f"{side.interval} tokens an event"
        if side.num_processes == 1:
            alone = arguments.utilization * 1e6 / side.median_us("engine")
            print(f"- 1 process for all, {event}: {alone:,.0f} tokens/s")
        else:
            most, tokens_per_s, limit = project(side, arguments.cores, arguments.gpus, arguments.utilization)
            print(
                f"- {most} API processes, {event}, by the figures of {side.num_processes}: {tokens_per_s:,.0f} "
                f"tokens/s, limited by the {limit}"
            )


if __name__ == "__main__":
    main()
