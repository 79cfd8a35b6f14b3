"""Run a mixed load for half an hour, and check that memory, files, threads and tasks do not grow."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from tests.support.server_process import serving
from tests.torture.crowd import References, requests
from tests.torture.load import Item, Offer, Window, offered, total
from tests.torture.overload import peak_of, resident_mib
from tests.torture.report import BUILD, Finding, percentile
from tests.torture.streams import RequestSpec

LOAD = 0.7
NUM_KV_BLOCKS = 2048  # all of its pages are touched during the warm-up
WINDOW_S = 5.0
WARM_UP = 1 / 3  # of the time, in which allocators and caches fill
MAX_MIB_PER_HOUR = 1.0
MIN_MINUTES = 20  # a slope over a shorter time means nothing
MAX_ITL_RATIO = 1.2  # of the last third to the first

BAD = [
    RequestSpec("not a number", "/generate", {"prompt": "a", "temperature": "hot"}),
    RequestSpec("unknown field", "/generate_stream", {"prompt": "a", "temprature": 1}),
    RequestSpec("too long", "/generate", {"prompt": "word " * 4000}),
    RequestSpec("bad grammar", "/generate", {"prompt": "a", "grammar": {"type": "regex", "value": "(" * 30}}),
]


class Sample(Struct, frozen=True):
    """The server at one moment."""

    at_s: float
    server_mib: float
    worker_mib: float
    num_files: int
    num_threads: int
    num_tasks: int


def slope_mib_per_hour(samples: list[Sample], name: str) -> float:
    """Return the slope of the regression line."""
    times = [sample.at_s / 3600 for sample in samples]
    values = [float(getattr(sample, name)) for sample in samples]
    mean_time, mean_value = sum(times) / len(times), sum(values) / len(values)
    spread = sum((moment - mean_time) ** 2 for moment in times)
    both = sum((moment - mean_time) * (value - mean_value) for moment, value in zip(times, values, strict=True))
    return both / spread if spread else 0.0


def mix(references: References) -> list[Item]:
    """Return complete answers, clients that disconnect early, and requests that are refused."""
    whole = [Item(asked, references.answers[asked.name]) for asked in references.asked]
    streams = [asked for asked in references.asked if asked.path == "/generate_stream"]
    leaving = [Item(asked, None, leaves_after=5, weight=0.15 * len(whole) / len(streams)) for asked in streams]
    refused = [Item(asked, None, status=400, weight=0.05 * len(whole) / len(BAD)) for asked in BAD]
    return [*whole, *leaving, *refused]


def run(minutes: float, seed: int = 0) -> list[Finding]:
    """Run for `minutes` at 70 % of the server's peak load."""
    seconds = 60 * minutes
    samples, windows = [], []
    with serving("--num-kv-blocks", str(NUM_KV_BLOCKS), log=BUILD / "soak.log") as server:
        references = References()
        asyncio.run(references.take(server.port, requests(2048)))
        items = mix(references)
        peak = peak_of(server.port, items)
        server.wait_until_at_rest()
        rate = LOAD * peak.num_begun / peak.seconds
        print(f"  peak: {peak.num_begun / peak.seconds:.1f} requests/s; {rate:.1f} for {minutes:g} minutes", flush=True)
        pid, worker = server.process.pid, server.worker_pids()[0]
        start_s = time.monotonic()
        offer = Offer(server.port, items, seconds, rate=rate, window_s=WINDOW_S, patience_s=120, seed=seed)
        for window in offered(offer):
            windows.append(window)
            threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
            now_s = time.monotonic() - start_s
            tasks = round(server.metric("servekit_api_event_loop_tasks"))
            samples.append(
                Sample(now_s, resident_mib(pid), resident_mib(worker), server.num_open_files(), threads, tasks)
            )
            if len(windows) % 12 == 0:
                print(f"  {now_s / 60:.0f} min: {samples[-1]}, ITL p99 {1e3 * window.itl_p99_s:.0f} ms", flush=True)
        server.wait_until_at_rest()
        same_worker = server.worker_pids() == [worker]
    findings = _findings(samples[:-1], windows, rate, same_worker)
    if minutes < MIN_MINUTES:
        findings = [
            finding if "MiB/h" not in finding.demanded else replace(finding, is_kept=None) for finding in findings
        ]
    return findings


def _findings(samples: list[Sample], windows: list[Window], rate: float, same_worker: bool) -> list[Finding]:
    warm = samples[int(WARM_UP * len(samples)) :]
    wrongs = total(window.wrongs for window in windows)
    statuses = total(window.statuses for window in windows)
    for window in windows:
        for example in window.examples:
            print(f"  {example}", flush=True)
    third = max(1, len(windows) // 3)
    first, last = (
        percentile([window.itl_p99_s for window in part], 0.5) for part in (windows[:third], windows[-third - 1 : -1])
    )
    found = [
        Finding(
            "requests",
            "",
            f"{sum(statuses.values()):,} ({rate:.1f}/s, {100 * LOAD:.0f} % of the peak): "
            + ", ".join(f"{status}: {count:,}" for status, count in statuses.items()),
        ),
        Finding("wrong, cut, stuck", "0", f"{wrongs.total():,}", not wrongs),
        Finding("worker", "the same at the end", "the same" if same_worker else "another one", same_worker),
    ]
    for name in ("server", "worker"):
        slope = slope_mib_per_hour(warm, f"{name}_mib")
        peak_mib = max(getattr(sample, f"{name}_mib") for sample in warm)
        found.append(
            Finding(
                f"memory of the {name} after {100 * WARM_UP:.0f} % of the time",
                f"at most {MAX_MIB_PER_HOUR:g} MiB/h",
                f"{slope:+.2f} MiB/h, {peak_mib:.0f} MiB at most",
                slope <= MAX_MIB_PER_HOUR,
            )
        )
    for name, what in (("num_files", "open files"), ("num_threads", "threads"), ("num_tasks", "asyncio tasks")):
        early, late = (
            percentile([float(getattr(sample, name)) for sample in part], 0.5)
            for part in (warm[: len(warm) // 2], warm[len(warm) // 2 :])
        )
        found.append(
            Finding(
                f"{what}, median of each half after that", "flat", f"{early:.0f}, {late:.0f}", late <= 1.2 * early + 2
            )
        )
    found.append(
        Finding(
            "p99 inter-token latency, first and last third",
            f"the last at most {MAX_ITL_RATIO:g} times the first",
            f"{1e3 * first:.0f} ms, {1e3 * last:.0f} ms",
            last <= MAX_ITL_RATIO * first,
        )
    )
    return found
