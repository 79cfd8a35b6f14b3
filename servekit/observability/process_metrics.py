"""Measure the processes: memory, open files and CPU time, and how late and how full the event loop is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector

LAG_INTERVAL_S = 0.25

NO_PROCESS = 0  # /proc/0 does not exist, so nothing is exported


def watch_processes(registry: CollectorRegistry, worker_pid: Callable[[], int | None]) -> None:
    """Export `process_*` of this process and `servekit_worker_process_*` of the worker, read at each scrape."""
    ProcessCollector(registry=registry)
    ProcessCollector("servekit_worker", pid=lambda: worker_pid() or NO_PROCESS, registry=registry)


async def watch_event_loop(lag: Histogram, num_tasks: Gauge) -> None:
    """Set a timer repeatedly and observe how late it fires, until cancelled. Count tasks at each scrape."""
    loop = asyncio.get_running_loop()
    num_tasks.set_function(lambda: float(len(asyncio.all_tasks(loop))))
    while True:
        due_s = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lag.observe(max(0.0, time.monotonic() - due_s))  # uvloop's timers have a resolution of 1 ms, and may be early
