"""Measure the processes: memory, open files and CPU time, and how late and how full the event loop is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LAG_INTERVAL_S = 0.25

NO_PROCESS = 0  # /proc/0 does not exist, so nothing is exported


Children = Callable[[], Sequence[tuple[dict[str, str], int | None]]]  # the labels and the process id of each


def watch_processes(registry: CollectorRegistry, workers: Children) -> None:
    """Export `process_*` of this process and `servekit_worker_process_*` of each worker, read at each scrape."""
    ProcessCollector(registry=registry)
    registry.register(_ChildrenCollector("servekit_worker", workers))


def watch_api_processes(registry: CollectorRegistry, pids: Callable[[], Sequence[int | None]]) -> None:
    """Export `servekit_api_process_*` of each API process, read at each scrape."""
    registry.register(
        _ChildrenCollector("servekit_api", lambda: [({"api_process": str(n)}, pid) for n, pid in enumerate(pids())])
    )


class _ChildrenCollector(Collector):
    """Memory, open files and CPU time of child processes of one kind."""

    def __init__(self, prefix: str, children: Children) -> None:
        self._prefix = prefix
        self._children = children

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for labels, pid in self._children():
            process = ProcessCollector(self._prefix, pid=partial(_pid, pid), registry=None)
            for family in process.collect():
                for sample in family.samples:
                    sample.labels.update(labels)
                if families.setdefault(family.name, family) is not family:
                    families[family.name].samples += family.samples
        yield from families.values()


def _pid(pid: int | None) -> int:
    return pid or NO_PROCESS


async def watch_event_loop(
    lag: Histogram, num_tasks: Gauge, num_tasks_elsewhere: Callable[[], int] = lambda: 0
) -> None:
    """Observe how late timers fire, until cancelled. Count tasks at each scrape, with those of other processes."""
    loop = asyncio.get_running_loop()
    num_tasks.set_function(lambda: float(len(asyncio.all_tasks(loop)) + num_tasks_elsewhere()))
    await event_loop_lags(lag.observe)


async def event_loop_lags(observe: Callable[[float], None]) -> None:
    """Set a timer repeatedly and report how late it fires, in seconds, until cancelled."""
    while True:
        due_s = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(0.0, time.monotonic() - due_s))  # uvloop's timers have a resolution of 1 ms, and may be early
