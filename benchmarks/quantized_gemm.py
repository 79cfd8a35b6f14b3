"""Time products with quantized weights on a CPU, beside bfloat16's and beside the time to read the weight.

    python -m benchmarks.quantized_gemm [--shapes 4096x4096 576x1536] [--rows 1 8 32 512] [--rounds 15]

Weights are cold: each call multiplies by another copy, and all copies together are larger than the caches. Formats take
turns in every round, and figures are medians in microseconds. The floor is the time in which a plain read of as many
bytes takes, with the same threads. The error is the relative distance from exact multiplication by the same weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.worker import use_environment_of_workers
from tests.support.quantized import FP4_LEVELS, NF4_LEVELS, random_matrix
from workers.csrc.build import c_library
from workers.layers.linear import PackedWeight, Weight
from workers.layers.quantized_gemm import QuantizedGemm
from workers.layers.skinny_gemm import SkinnyGemm
from workers.quantization.quantized_tensor import QuantizedTensor

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


def make_formats(shape: tuple[int, int], dtype: str, names: list[str]) -> list[Format]:
    library = c_library(dtype)
    if library is None:
        raise SystemExit("the C kernels could not be compiled")
    skinny, quantized = SkinnyGemm(library), QuantizedGemm(library)
    dense = torch.randn(shape).to(getattr(torch, dtype))
    formats = [make_format(dtype, dense, lambda: skinny.make_weight(dense, None))]
    formats.append(make_format(f"{dtype}, oneDNN", dense, lambda: PackedWeight(dense, None)))
    for name in names:
        matrix = random_matrix(*shape, **FORMATS[name])  # type: ignore[arg-type]
        formats.append(make_format(name, matrix, lambda matrix=matrix: quantized.make_weight(matrix, None)))  # type: ignore[misc]
    return formats


def call_us(format_: Format, x: Tensor) -> float:
    """Multiply by each copy once, and return the microseconds of a call."""
    started = time.perf_counter()
    for weight in format_.weights:
        weight.multiply(x)
    return 1e6 * (time.perf_counter() - started) / len(format_.weights)


def read_bytes_per_us(numbers: Tensor) -> float:
    """Return the rate of reading memory that is in no cache."""
    started = time.perf_counter()
    numbers.sum()
    return numbers.nbytes / (1e6 * (time.perf_counter() - started))


def error(format_: Format, x: Tensor) -> float:
    exact = x.double() @ format_.exact.T
    return float((format_.weights[0].multiply(x).double() - exact).norm() / exact.norm())


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "576x1536"], help="outputs x inputs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    arguments = parser.parse_args()
    memory = torch.ones(CACHE_BYTES // 4)
    with torch.inference_mode():
        for shape in arguments.shapes:
            num_outputs, num_inputs = map(int, shape.split("x"))
            formats = make_formats((num_outputs, num_inputs), arguments.dtype, arguments.formats)
            print(f"\n{shape}, {torch.get_num_threads()} threads, us a call\n")
            heads = ["weight", "MB", "a plain read", *(f"{rows} rows" for rows in arguments.rows), "error, %"]
            print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
            inputs = [torch.randn(rows, num_inputs).to(getattr(torch, arguments.dtype)) for rows in arguments.rows]
            times: dict[tuple[str, int], list[float]] = {}
            rates = []
            for _ in range(arguments.rounds):
                rates.append(read_bytes_per_us(memory))
                for format_ in formats:
                    for x in inputs:
                        if len(x) < 64 or len(times.get((format_.name, len(x)), [])) < 3:
                            times.setdefault((format_.name, len(x)), []).append(call_us(format_, x))
            rate = statistics.median(rates)
            for format_ in formats:
                medians = (statistics.median(times[format_.name, len(x)]) for x in inputs)
                cells = [
                    f"{format_.num_bytes / 1e6:.1f}",
                    f"{format_.num_bytes / rate:.0f}",
                    *map("{:.0f}".format, medians),
                ]
                print(f"| {format_.name} | {' | '.join(cells)} | {100 * error(format_, inputs[-1]):.2f} |")


if __name__ == "__main__":
    main()
