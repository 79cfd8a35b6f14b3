"""Time products with quantized weights on a CPU, beside bfloat16's and beside the time to read the weight.

    python -m benchmarks.quantized_gemm [--shapes 4096x4096 576x1536] [--rows 1 8 32 512] [--threads 1] [--write]

Weights are cold: each call multiplies by another copy, and all copies together are larger than the caches. All weights
take turns, so that other programs on the machine delay them alike. Figures are medians, in microseconds; with one
thread, of processor time. A plain read is the time of summing as many bytes up, which takes its turn, too. The error is
the relative distance from exact multiplication by the same weight. `--write` writes the tables into
docs/design/quantized-gemm.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.decode_steps import use_environment_of_workers
from benchmarks.progress import tell
from scripts.tables import with_table
from tests.support.gguf_files import random_blocks
from tests.support.quantized import FP4_LEVELS, NF4_LEVELS, random_matrix
from workers.csrc.build import c_library
from workers.layers.linear import PackedWeight, Weight
from workers.layers.quantized_gemm import QuantizedGemm, QuantizedGemmWeight
from workers.layers.skinny_gemm import SkinnyGemm
from workers.quantization.ggml_blocks import unpack
from workers.quantization.quantized_tensor import QuantizedTensor

PAGE = Path(__file__).parents[1] / "docs" / "design" / "quantized-gemm.md"
MAKER = "python -m benchmarks.quantized_gemm"
SECONDS, MIN_ROUNDS = 0.3, 7  # of measuring one figure
CACHE_BYTES = 96 << 20  # of all copies of a weight: more than the last cache
FORMATS: dict[str, dict[str, object]] = {
    "W8A8, by row": {"encoding": "int8", "activations": "int8"},
    "W8A8, groups of 32": {"encoding": "int8", "activations": "int8", "group_size": 32},
    "W4A8, groups of 32": {"encoding": "int4", "activations": "int8", "group_size": 32},
    "W4A8, groups of 64": {"encoding": "int4", "activations": "int8", "group_size": 64},
    "W4A16, groups of 32": {"encoding": "int4", "group_size": 32},
    "W4A16, groups of 64": {"encoding": "int4", "group_size": 64},
    "W4A16, groups of 64, offsets": {"encoding": "int4", "group_size": 64, "has_offsets": True},
    "NF4, groups of 64": {"encoding": "int4", "group_size": 64, "levels": NF4_LEVELS},
    "MXFP4, groups of 32": {"encoding": "int4", "group_size": 32, "levels": FP4_LEVELS, "scales": torch.bfloat16},
    "W8A16, by row": {"encoding": "int8"},
    "FP8, by row": {"encoding": "float8"},
}
GGUF_TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")


@dataclass(frozen=True, slots=True)
class Format:
    """Copies of one weight, prepared."""

    name: str
    num_bytes: int  # of one copy
    weights: list[Weight]
    matrix: Tensor | QuantizedTensor


def make_format(name: str, matrix: Tensor | QuantizedTensor, make: Callable[[], Weight]) -> Format:
    first = make()
    num_bytes = first.num_bytes if isinstance(first, QuantizedGemmWeight) else matrix.nbytes
    return Format(name, num_bytes, [first, *(make() for _ in range(CACHE_BYTES // num_bytes))], matrix)


def make_formats(shape: tuple[int, int], dtype: str, names: list[str]) -> Iterator[Format]:
    library = c_library(dtype)
    if library is None:
        raise SystemExit("the C kernels could not be compiled")
    skinny, quantized = SkinnyGemm(library), QuantizedGemm(library)
    dense = torch.randn(shape).to(getattr(torch, dtype))
    yield make_format(dtype, dense, lambda: skinny.make_weight(dense, None))
    yield make_format(f"{dtype}, oneDNN", dense, lambda: PackedWeight(dense, None))
    for name in names:
        if name in GGUF_TYPES:
            matrix = unpack(name, torch.from_numpy(random_blocks(name, *shape)))
        else:
            matrix = random_matrix(*shape, **FORMATS[name])  # type: ignore[arg-type]
        yield make_format(name, matrix, partial(quantized.make_weight, matrix, None))


def median_us(calls: list[Callable[[int], object]], clock: Callable[[], float]) -> list[float]:
    """Call all of them in turn, with 0, 1, 2 and so on; return the median time of each."""
    times: list[list[float]] = [[] for _ in calls]
    end_s, index = time.monotonic() + SECONDS * len(calls), 0
    while time.monotonic() < end_s or index < MIN_ROUNDS:
        for call, found in zip(calls, times, strict=True):
            started = clock()
            call(index)
            found.append(clock() - started)
        index += 1
    return [1e6 * statistics.median(found) for found in times]


def multiply(weights: list[Weight], x: Tensor, index: int) -> Tensor:
    return weights[index % len(weights)].multiply(x)


def error(format_: Format, x: Tensor) -> float:
    matrix = format_.matrix
    exact = x.double() @ (matrix.double() if isinstance(matrix, Tensor) else matrix.dequantize(torch.float64)).T
    return float((format_.weights[0].multiply(x).double() - exact).norm() / exact.norm())


def measure(shape: str, memory: Tensor, clock: Callable[[], float], arguments: argparse.Namespace) -> list[str]:
    """Measure all weights of a shape. Returns the lines of their table."""
    num_outputs, num_inputs = map(int, shape.split("x"))
    formats = list(make_formats((num_outputs, num_inputs), arguments.dtype, arguments.formats))
    inputs = [torch.randn(rows, num_inputs).to(getattr(torch, arguments.dtype)) for rows in arguments.rows]
    times = [
        median_us([lambda _: memory.sum(), *(partial(multiply, each.weights, x) for each in formats)], clock)
        for x in inputs
    ]
    bytes_per_us = memory.nbytes / times[0][0]
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    heads = ["weight", "MB", "a plain read", *(f"{rows} rows" for rows in arguments.rows), "error, %"]
    lines = [
        "",
        f"{num_outputs} outputs, {num_inputs} inputs, threads: {arguments.threads}, load {os.getloadavg()[0]:.1f}, on "
        f"{date}:",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
    ]
    for format_, of_format in zip(formats, list(zip(*times, strict=True))[1:], strict=True):
        cells = [f"{format_.num_bytes / 1e6:.1f}", f"{format_.num_bytes / bytes_per_us:.0f}"]
        cells.extend(f"{us:.0f}" for us in of_format)
        lines.append(f"| {format_.name} | {' | '.join(cells)} | {100 * error(format_, inputs[-1]):.2f} |")
    return lines


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "576x1536"], help="outputs x inputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 9, 32, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--formats", nargs="+", default=[*FORMATS, *GGUF_TYPES], choices=[*FORMATS, *GGUF_TYPES])
    parser.add_argument("--write", action="store_true", help="write the tables into docs/design/quantized-gemm.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    memory, lines = torch.ones(CACHE_BYTES // 4), []
    with torch.inference_mode():
        for shape in arguments.shapes:
            found = measure(shape, memory, clock, arguments)
            tell("\n".join(found))
            lines += found
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "quantized-gemm", iter([*lines, ""]), MAKER))


if __name__ == "__main__":
    main()
