"""How long something takes on a device, and what the device can do at most."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.shapes import Ceilings
from workers.decode_graphs import CudaCapture

COLD_BYTES = 2**28  # inputs of as many bytes take turns: more than any cache holds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_s(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Of one call and the wait for it, the median; the first three do not count."""
    times = []
    for _ in range(repeats + 3):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


def num_copies(bytes_each: int, device: torch.device) -> int:
    """Of a call's inputs, which take turns; no more than 64, which may be too few to be cold."""
    return max(2, min(64, math.ceil(COLD_BYTES / bytes_each))) if device.type == "cuda" else 2


def are_cold(bytes_each: int, device: torch.device) -> bool:
    """Whether no input is still in a cache when its turn comes again; a rehearsal does not care."""
    return device.type != "cuda" or num_copies(bytes_each, device) * bytes_each >= COLD_BYTES


def bandwidth(num_bytes: int, seconds: float, ceilings: Ceilings, device: torch.device) -> dict[str, float]:
    """Of a call that reads and writes so many bytes; nothing where a cache would have been measured."""
    if not are_cold(num_bytes, device):
        return {}
    return {"bytes_per_s": num_bytes / seconds, "share": num_bytes / seconds / ceilings.bytes_per_s}


def kernel_s(calls: Sequence[Callable[[], object]], device: torch.device) -> tuple[float, str]:
    """Seconds of one of `calls`, which take turns, and how that was found.

    On a GPU all of them are one graph, so that what is timed is the device and not who launches; what cannot be
    captured is launched one by one.
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
        return CudaCapture()(compute).replay  # the worker's own: a capture that fails leaves the stream as it was
    except RuntimeError as error:
        print(f"  not captured: {error}", flush=True)
        torch.cuda.synchronize()
        return None


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Bytes/s of a large copy, read and written; FLOP/s of a large product of random numbers in bfloat16.

    A device that has just been woken up is slow, and one that has worked for long may be, so the best of three counts.
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
    """The largest distance of a row, as a share of the row's length; infinity where anything is not finite."""
    exact = exact.double().flatten(0, -2)
    distance = (output.double().flatten(0, -2) - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
    worst = float(distance.max())
    return worst if math.isfinite(worst) else math.inf
