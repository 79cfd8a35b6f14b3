"""Measure whether a worker's memory grows over many quick requests of changing lengths.

    python -m benchmarks.worker_memory [--requests 100000]

A server with the demo model gets requests with prompts of 1 to 120 tokens. A third of the clients disconnect during the
request. Memory could grow by what is kept for each step, shape and sequence, so no two steps are alike.

The exit code is 1 if memory grows with the number of requests: if the median of the second half of the reports is
higher than that of the first half by more than is allowed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.progress import Progress, no_bars_in_files, tell
from tests.support.server_process import ServerProcess, serving

NUM_REPORTS = 20
NUM_CLIENTS = 16
NUM_KV_BLOCKS = 1024  # 64 MiB of KV cache, full after some hundred requests
MIB = 2**20
# In an ordinary run, the worker's memory goes up and down by more than 64 MiB, the growth after which it returns free
# memory to the kernel. So medians are compared. In the report that found the growth, they differed by more than 100.
MAX_GROWTH_MIB = {"worker": 64.0, "server": 16.0}


def growth(reports: Sequence[float]) -> float:
    """Return how much higher the median of the second half is. The first report is from before all requests."""
    later = reports[1:]
    half = len(later) // 2
    return median(later[half:]) - median(later[:half])


async def request(port: int, rng: random.Random) -> None:
    """Send one request, and read its answer or disconnect."""
    prompt = [rng.randrange(3, 1000) for _ in range(rng.choice([rng.randrange(1, 30), rng.randrange(1, 120)]))]
    body = {"prompt": prompt, "max_tokens": rng.randrange(1, 4), "temperature": rng.choice([0.0, 1.0]), "stream": True}
    encoded = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(encoded)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + encoded)
    await writer.drain()
    if rng.random() < 1 / 3:
        await asyncio.sleep(rng.random() * 0.02)
    else:
        await reader.read()
    writer.close()


async def send(server: ServerProcess, num_requests: int, rng: random.Random) -> None:
    """Send requests, from NUM_CLIENTS clients at a time."""
    left = num_requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await request(server.port, rng)

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    no_bars_in_files()
    rng, share = random.Random(0), max(1, arguments.requests // NUM_REPORTS)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress("reports", NUM_REPORTS) as progress,
        serving("--num-kv-blocks", str(NUM_KV_BLOCKS), log=Path(folder) / "log") as server,
    ):
        tell("| requests | worker, MiB | server, MiB | a step, ms |\n|---:|---:|---:|---:|")
        num_steps, steps_s = 0.0, 0.0
        reports: dict[str, list[float]] = {name: [] for name in MAX_GROWTH_MIB}
        for report in range(NUM_REPORTS + 1):
            if report:
                progress.begin(f"{report * share:,} requests")
                asyncio.run(send(server, share, rng))
            before = num_steps, steps_s
            num_steps = server.metric("servekit_step_duration_seconds_count")
            steps_s = server.metric("servekit_step_duration_seconds_sum")
            step_ms = 1e3 * (steps_s - before[1]) / max(1.0, num_steps - before[0])
            worker, own = (
                server.metric(f"{name}process_resident_memory_bytes") / MIB for name in ("servekit_worker_", "")
            )
            reports["worker"].append(worker)
            reports["server"].append(own)
            tell(f"| {report * share:,} | {worker:.0f} | {own:.0f} | {step_ms:.2f} |")
        started = time.monotonic()
        server.wait_until_at_rest()
        tell(f"\nall blocks are free {time.monotonic() - started:.1f} s later")
    missed = False
    for name, most in MAX_GROWTH_MIB.items():
        mib = growth(reports[name])
        missed |= mib > most
        tell(f"{name}: {mib:+.0f} MiB in the second half of the requests; allowed: {most:+.0f} MiB")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
