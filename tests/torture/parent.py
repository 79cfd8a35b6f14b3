"""Kill the server with SIGKILL: none of the processes that it started may outlive it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable

from tests.support.server_process import ServerProcess
from tests.torture.crowd import wait_until
from tests.torture.faults.sitecustomize import SIGNALS
from tests.torture.report import BUILD, Finding, percentile
from tests.torture.streams import Connections, RequestSpec, ask
from tests.torture.workers import fault_environment, handles_planted_signals

GONE_WITHIN_S = 1.0
STORY = RequestSpec("story", "/generate_stream", {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True})


def _nothing(worker: int) -> None:
    pass


STATES: dict[str, Callable[[int], None]] = {
    # name: what happens to the worker before the server is killed
    "idle": _nothing,
    "streaming": _nothing,
    "loading": _nothing,
    "worker stopped": lambda worker: os.kill(worker, signal.SIGSTOP),
    "GIL held": lambda worker: os.kill(worker, SIGNALS["hold the GIL"]),
}


async def _kill(state: str, chance: random.Random) -> float:
    """Return the seconds until all processes that the server had started were gone."""
    server = ServerProcess(log=BUILD / "parent.log", environment=fault_environment())
    streams = []
    try:
        if state == "loading":
            await wait_until(lambda: any(map(handles_planted_signals, server.worker_pids())), 30)
            await asyncio.sleep(chance.uniform(0, 1))
        else:
            await asyncio.to_thread(server.wait_until_ready)
        if state not in ("idle", "loading"):
            connections = Connections(server.port)
            streams = [asyncio.create_task(ask(connections, STORY)) for _ in range(16)]
            await asyncio.sleep(chance.uniform(0.2, 0.6))
        (worker,) = server.worker_pids()
        STATES[state](worker)
        await asyncio.sleep(0.1)
        started = server.started_pids()
        assert worker in started
        server.process.kill()
        killed_s = time.monotonic()
        await wait_until(lambda: not server.started_pids(), 10)
        return time.monotonic() - killed_s
    finally:
        server.process.kill()
        server.process.wait()
        server.client.close()
        await asyncio.gather(*streams)
        for pid in server.started_pids():
            os.kill(pid, signal.SIGKILL)


def run(times: int, seed: int = 0) -> list[Finding]:
    """Kill `times` servers, in each state in turn."""
    chance = random.Random(seed)
    took: dict[str, list[float]] = {state: [] for state in STATES}
    for number in range(times):
        state = list(STATES)[number % len(STATES)]
        took[state].append(asyncio.run(_kill(state, chance)))
    for state, times_s in took.items():
        print(f"  {state}: gone after {percentile(times_s, 1):.3f} s at most", flush=True)
    return [
        Finding(
            f"server killed, {state}",
            f"all it started is gone within {GONE_WITHIN_S:g} s",
            f"{len(times_s)} times, {1e3 * percentile(times_s, 0.5):.0f} ms (p50), "
            f"{1e3 * percentile(times_s, 1):.0f} ms (longest)",
            percentile(times_s, 1) <= GONE_WITHIN_S,
        )
        for state, times_s in took.items()
        if times_s
    ]
