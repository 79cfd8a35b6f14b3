"""Time products with quantized weights on a CPU, beside bfloat16's and beside the time to read the weight.

    python -m benchmarks.quantized_gemm [--shapes 4096x4096 576x1536] [--rows 1 8 32 512] [--threads 1]

Weights are cold: each call multiplies by another copy, and all copies together are larger than the caches. Figures are
the least of many calls, in microseconds. With one thread it is processor time, so other programs on the machine matter
less. A plain read is the time of summing as many bytes up. The error is the relative distance from exact multiplication
by the same weight.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.decode_steps import use_environment_of_workers
from benchmarks.progress import tell
from tests.support.quantized import FP4_LEVELS, NF4_LEVELS, random_matrix
from workers.csrc.build import c_library
from workers.layers.linear import PackedWeight, Weight
from workers.layers.quantized_gemm import QuantizedGemm
from workers.layers.skinny_gemm import SkinnyGemm
from workers.quantization.quantized_tensor import QuantizedTensor

SECONDS, MIN_CALLS = 0.3, 7  # of measuring one figure
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


@dataclass(frozen=True, slots=True)
class Format:
    """Copies of one weight, prepared."""

    name: str
    num_bytes: int  # of one copy
    weights: list[Weight]
    exact: Tensor  # the weight in float64


def make_format(name: str, matrix: Tensor | QuantizedTensor, make: Callable[[], Weight]) -> Format:
    num_bytes = matrix.nbytes if isinstance(matrix, Tensor) else matrix.num_bytes
    exact = matrix.double() if isinstance(matrix, Tensor) else matrix.dequantize(torch.float64)
    return Format(name, num_bytes, [make() for _ in range(-(-CACHE_BYTES // num_bytes))], exact)


def make_formats(shape: tuple[int, int], dtype: str, names: list[str]) -> Iterator[Format]:
    library = c_library(dtype)
    if library is None:
        raise SystemExit("the C kernels could not be compiled")
    skinny, quantized = SkinnyGemm(library), QuantizedGemm(library)
    dense = torch.randn(shape).to(getattr(torch, dtype))
    yield make_format(dtype, dense, lambda: skinny.make_weight(dense, None))
    yield make_format(f"{dtype}, oneDNN", dense, lambda: PackedWeight(dense, None))
    for name in names:
        matrix = random_matrix(*shape, **FORMATS[name])  # type: ignore[arg-type]
        yield make_format(name, matrix, partial(quantized.make_weight, matrix, None))


def least_us(call: Callable[[int], object], clock: Callable[[], float]) -> float:
    """Call with 0, 1, 2 and so on, for SECONDS and MIN_CALLS times at least; return the shortest call's time."""
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < MIN_CALLS:
        started = clock()
        call(len(times))
        times.append(clock() - started)
    return 1e6 * min(times)


def multiply(weights: list[Weight], x: Tensor, index: int) -> Tensor:
    return weights[index % len(weights)].multiply(x)


def error(format_: Format, x: Tensor) -> float:
    exact = x.double() @ format_.exact.T
    return float((format_.weights[0].multiply(x).double() - exact).norm() / exact.norm())


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "576x1536"], help="outputs x inputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    memory = torch.ones(CACHE_BYTES // 4)
    with torch.inference_mode():
        bytes_per_us = memory.nbytes / least_us(lambda _: memory.sum(), clock)
        for shape in arguments.shapes:
            num_outputs, num_inputs = map(int, shape.split("x"))
            print(f"\n{shape}, {arguments.threads} threads, us a call\n")
            heads = ["weight", "MB", "a plain read", *(f"{rows} rows" for rows in arguments.rows), "error, %"]
            print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
            inputs = [torch.randn(rows, num_inputs).to(getattr(torch, arguments.dtype)) for rows in arguments.rows]
            for format_ in make_formats((num_outputs, num_inputs), arguments.dtype, arguments.formats):
                cells = [f"{format_.num_bytes / 1e6:.1f}", f"{format_.num_bytes / bytes_per_us:.0f}"]
                times = (least_us(partial(multiply, format_.weights, x), clock) for x in inputs)
                cells.extend(f"{us:.0f}" for us in times)
                tell(f"| {format_.name} | {' | '.join(cells)} | {100 * error(format_, inputs[-1]):.2f} |")


if __name__ == "__main__":
    main()
