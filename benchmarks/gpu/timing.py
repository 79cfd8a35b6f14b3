"""Measure how long calls take on a device, and its maximum bandwidth and FLOP/s."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.shapes import Ceilings
from workers.runner.cuda_graphs import CudaCapture

COLD_BYTES = 2**28  # calls rotate through inputs of this size, which no cache holds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_s(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time of a call with the wait for its end; the first three calls do not count."""
    times = []
    for _ in range(repeats + 3):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def num_copies(bytes_each: int, device: torch.device) -> int:
    """Return the number of copies of a call's inputs to rotate through; at most 64, which may be too few to be cold."""
    return max(2, min(64, math.ceil(COLD_BYTES / bytes_each))) if device.type == "cuda" else 2


def are_cold(bytes_each: int, device: torch.device) -> bool:
    """Return whether no input is still in a cache when it is used again; always true in a rehearsal."""
    return device.type != "cuda" or num_copies(bytes_each, device) * bytes_each >= COLD_BYTES


def bandwidth(num_bytes: int, seconds: float, ceilings: Ceilings, device: torch.device) -> dict[str, float]:
    """Return the bandwidth of a call that reads and writes num_bytes; empty if it would be that of a cache."""
    if not are_cold(num_bytes, device):
        return {}
    return {"bytes_per_s": num_bytes / seconds, "share": num_bytes / seconds / ceilings.bytes_per_s}


def kernel_s(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[float, str]:
    """Return the seconds of one of `calls`, which are called in turn, and how they were timed.

    On a GPU all of them are one graph, so that the device is timed and not the host. Calls that cannot be captured are
    launched one by one.
    """
    if device.type != "cuda":
        return call_s(lambda: [call() for call in calls], device, 3) / len(calls), "by the wall clock"

    def one_by_one() -> None:
        for call in calls:
            call()

    once = _as_graph(one_by_one)
    how = "launched one by one" if once is None else "graph"
    once = once or one_by_one
    once()
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        once()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end))
    return statistics.median(times) / len(calls), how


def _as_graph(compute: Callable[[], None]) -> Callable[[], None] | None:
    try:
        return CudaCapture()(compute).replay  # the worker's own; after a capture that fails, the stream is usable
    except RuntimeError as error:
        print(f"  not captured: {error}", flush=True)
        torch.cuda.synchronize()
        return None


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Measure bytes/s of a large copy, read and written, and FLOP/s of a large bfloat16 product of random numbers.

    The best of three counts: a device is slow after it was idle, and may be slow when it is hot.
    """
    size = 2**31 if device.type == "cuda" else 2**24
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    copy_s = min(call_s(lambda: target.copy_(source), device, 10) for _ in range(3))
    n = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    product_s = min(call_s(lambda: a @ b, device, 10) for _ in range(3))
    return {"bytes_per_s": 2 * size / copy_s, "flops": 2 * n**3 / product_s}


def error_of(output: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest distance of a row as a share of its norm; infinity if any number is not finite."""
    exact = exact.double().flatten(0, -2)
    distance = (output.double().flatten(0, -2) - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
    worst = float(distance.max())
    return worst if math.isfinite(worst) else math.inf
