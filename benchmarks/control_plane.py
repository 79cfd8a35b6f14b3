"""Tokens per second through API, scheduler, both queues and server-sent events, with a device that takes no time.

    python -m benchmarks.control_plane [--rounds 3] [--streams 256] [--tokens 200]

256 clients ask again as soon as they are answered. The server's model is simulated, so what is left is what servekit
itself costs, and the kernel. Beside it stand servers that stream ready-made events and do nothing else. All sides take
turns, and figures are medians. CPU is what each process took for a token, from /proc: on two cores, server, worker and
client share them, and what one takes another does not get. The client's lag is told, too: a run in which it is late
says nothing of latencies, which are not asked for here, and can only show too few tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from msgspec import Struct, field
from msgspec.structs import replace

from benchmarks.progress import Progress
from loadtest.experiment import Experiment, run
from loadtest.record import Outcome
from loadtest.target import ApiFormat, Target
from tests.support.server_process import free_port, serving


class Side(Struct):
    """A way to stream, and what was measured of it."""

    name: str
    bare: str | None = None  # which of the bare servers; None is servekit
    fields: dict[str, Any] = field(default_factory=dict)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us: list[dict[str, float]] = field(default_factory=list)  # by process, for a token
    client_lags_ms: list[float] = field(default_factory=list)  # p99 of its event loop


SIDES = [
    Side("bare Starlette, an event for each token", "starlette"),
    Side("sse-starlette, an event for each token", "sse-starlette"),
    Side("servekit, an event for each token"),
    Side("servekit, an event for eight tokens", fields={"stream_interval": 8}),
]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving_bare(kind: str) -> Iterator[tuple[int, dict[str, int]]]:
    port = free_port()
    with subprocess.Popen([sys.executable, "-m", "benchmarks.bare_streams", kind, str(port)]) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with suppress(httpx2.TransportError):
                    if httpx2.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                time.sleep(0.05)
            yield port, {"server": process.pid}
        finally:
            process.terminate()


@contextmanager
def serving_side(side: Side, num_streams: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Its port and its processes."""
    if side.bare is not None:
        with serving_bare(side.bare) as served:
            yield served
        return
    flags = ("--model", "sim:instant", "--max-num-seqs", str(num_streams), "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder, serving(*flags, log=Path(folder) / "log") as server:
        yield server.port, {"server": server.process.pid, "worker": server.worker_pids()[0]}


def play(side: Side, num_streams: int, num_tokens: int, seed: int) -> None:
    """One round. What is warmed up is warm before anything is counted."""
    with serving_side(side, num_streams) as (port, pids):
        target = Target(
            urls=[f"http://127.0.0.1:{port}"], api=ApiFormat.GENERATE_STREAM, model="any", fields=side.fields
        )
        experiment = Experiment(
            target=target,
            arrivals=f"closed:{num_streams}",
            workload=f"random:input=32,output={num_tokens}",
            num_requests=num_streams,
            characters_per_token=1.0,
            seed=seed,
            num_warm_up=0,
        )
        run(experiment, "warm-up", None)
        before = {name: cpu_s(pid) for name, pid in pids.items()}
        trial = run(replace(experiment, num_requests=6 * num_streams, seed=seed + 1000), side.name, None)
        after = {name: cpu_s(pid) for name, pid in pids.items()}
    outcomes = {record.outcome for record in trial.result.records}
    assert outcomes == {Outcome.OK}, trial.summary.failures
    total = sum(record.num_output_tokens for record in trial.result.records)
    side.tokens_per_s.append((trial.summary.steady or trial.summary.full).output_tokens_per_s)
    told = {name: 1e6 * (after[name] - before[name]) / total for name in pids}
    side.cpu_us.append({**told, "client": 1e6 * sum(trial.result.cpu_s) / total})
    lag = trial.summary.event_loop_lag_s
    side.client_lags_ms.append(0.0 if lag is None else 1e3 * lag.p99)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    arguments = parser.parse_args()
    with Progress("rounds", arguments.rounds * len(SIDES)) as progress:
        for number in range(arguments.rounds):
            for side in SIDES:
                progress.begin(side.name)
                play(side, arguments.streams, arguments.tokens, number)
    print(f"{os.cpu_count()} cores, {arguments.streams} streams, median of {arguments.rounds} rounds")
    print("\n| | tokens/s | server, µs of CPU a token | worker | client | lag of the client |")
    print("|---|---:|---:|---:|---:|---:|")
    for side in SIDES:
        cells = [f"{statistics.median(side.tokens_per_s):,.0f}"]
        for name in ("server", "worker", "client"):
            known = [each[name] for each in side.cpu_us if name in each]
            cells.append(f"{statistics.median(known):.1f}" if known else "")
        cells.append(f"{statistics.median(side.client_lags_ms):.1f} ms")
        print(f"| {side.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
