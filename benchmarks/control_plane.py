"""Tokens per second through API, scheduler, both queues and server-sent events, with a device that takes no time.

    python -m benchmarks.control_plane [--rounds 3] [--streams 256] [--tokens 200]
    python -m benchmarks.control_plane --rounds 30 --requests 1 --against ../another-checkout

256 clients ask again as soon as they are answered. The server's model is simulated, so what is left is what servekit
itself costs, and the kernel. Other servers, which only stream ready-made events, show how much of that is the kernel.
All servers run all the time and take turns. Figures are medians of the rounds.

With `--against`, ratios are medians, too. Each ratio compares two consecutive rounds, because the speed of a machine
changes within minutes. CPU is the processor time of each process for a token, from /proc: server, worker and client
share the cores. The lag of the client is printed. If it is large, the number of tokens is too small.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from msgspec import Struct, field

from benchmarks.progress import Progress
from benchmarks.stream_cost import ROUNDS_OF_REQUESTS, StreamCost, measure_streams
from tests.support.server_process import free_port, serving


class Side(Struct):
    """A way to stream, and what was measured of it."""

    name: str
    bare: str | None = None  # which of the bare servers; None is servekit
    checkout: Path | None = None  # the source tree that servekit runs from, if not this one
    fields: dict[str, Any] = field(default_factory=dict)
    costs: list[StreamCost] = field(default_factory=list)


SIDES = [
    Side("bare Starlette, an event for each token", "starlette"),
    Side("sse-starlette, an event for each token", "sse-starlette"),
    Side("servekit, an event for each token"),
    Side("servekit, an event for eight tokens", fields={"stream_interval": 8}),
]


def beside(checkout: Path) -> list[Side]:
    """Return the sides of servekit, each followed by the same one of another checkout."""
    own = [side for side in SIDES if side.bare is None]
    others = [Side(f"{side.name}, {checkout.name}", checkout=checkout, fields=side.fields) for side in own]
    return [side for pair in zip(own, others, strict=True) for side in pair]


@contextmanager
def serving_bare(kind: str) -> Iterator[tuple[int, dict[str, list[int]]]]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "benchmarks.bare_streams", kind, str(port)]) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with suppress(httpx2.TransportError):
                    if httpx2.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield port, {"server": [process.pid]}
        finally:
            process.terminate()


@contextmanager
def serving_checkout(checkout: Path | None, num_streams: int) -> Iterator[tuple[int, dict[str, list[int]]]]:
    flags = ("--model", "sim:instant", "--max-num-seqs", str(num_streams), "--log-level", "warning")
    environment = None
    if checkout is not None:  # PYTHONSAFEPATH: the working directory is not searched for modules
        environment = {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"}
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(*flags, log=Path(folder) / "log", environment=environment) as server,
    ):
        yield server.port, {"server": [server.process.pid], "worker": server.worker_pids()}


def play_rounds(sides: list[Side], num_rounds: int, num_streams: int, num_tokens: int, num_requests: int) -> None:
    """Let the sides take turns. A server runs until the last round, also while another one is measured."""
    served: dict[tuple[str | None, Path | None], tuple[int, dict[str, list[int]]]] = {}
    with ExitStack() as stack, Progress("rounds", num_rounds * len(sides)) as progress:
        for side in sides:
            key = side.bare, side.checkout
            if key not in served:
                server = serving_checkout(side.checkout, num_streams) if side.bare is None else serving_bare(side.bare)
                served[key] = stack.enter_context(server)
        for number in range(num_rounds):
            for side in sides:
                progress.begin(side.name)
                port, pids = served[side.bare, side.checkout]
                options = side.fields, num_requests, number == 0
                side.costs.append(measure_streams(port, pids, num_streams, num_tokens, number, *options))


def ratios(sides: list[Side]) -> Iterator[str]:
    """Yield a line for each side of this checkout: medians of its ratios to the other checkout's side."""
    figures: dict[str, Callable[[StreamCost], float]] = {
        "tokens/s": lambda cost: cost.tokens_per_s,
        "server's CPU a token": lambda cost: cost.cpu_us["server"],
        "worker's": lambda cost: cost.cpu_us["worker"],
    }
    for ours, other in zip(sides[::2], sides[1::2], strict=True):
        pairs = list(zip(ours.costs, other.costs, strict=True))
        cells = [f"{name} {statistics.median([of(a) / of(b) for a, b in pairs]):.3f}" for name, of in figures.items()]
        yield f"{ours.name}, to the other checkout: {', '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument(
        "--requests", type=int, default=ROUNDS_OF_REQUESTS, help="that each client sends in a round, one after another"
    )
    parser.add_argument("--against", type=Path, help="another checkout, whose server replaces the bare ones")
    arguments = parser.parse_args()
    sides = SIDES if arguments.against is None else beside(arguments.against)
    play_rounds(sides, arguments.rounds, arguments.streams, arguments.tokens, arguments.requests)
    print(f"{os.cpu_count()} cores, {arguments.streams} streams, median of {arguments.rounds} rounds")
    print("\n| | tokens/s | server, µs of CPU a token | worker | client | lag of the client |")
    print("|---|---:|---:|---:|---:|---:|")
    for side in sides:
        cells = [f"{statistics.median(cost.tokens_per_s for cost in side.costs):,.0f}"]
        for name in ("server", "worker", "client"):
            known = [cost.cpu_us[name] for cost in side.costs if name in cost.cpu_us]
            cells.append(f"{statistics.median(known):.1f}" if known else "")
        cells.append(f"{statistics.median(cost.client_lag_ms for cost in side.costs):.1f} ms")
        print(f"| {side.name} | {' | '.join(cells)} |")
    if arguments.against is not None:
        print("", *ratios(sides), sep="\n")


if __name__ == "__main__":
    main()
