"""Time whole decode steps with quantized weights, beside the time to read these weights once.

    python -m benchmarks.quantized_steps [--formats bfloat16 int8 w4a8 int4] [--rows 1 8 32] [--write]

The model is the Llama of 0.4 billion weights of benchmarks/random_llama.py, with random weights. A step is timed inside
the worker, from the plan to the sampled ids, in the environment of worker processes, with one token for each of several
sequences. Its floor is the time in which as many bytes as the weights have are summed up by all threads, measured in
the same rounds; with keys and values, those that the step reads are added. All formats take turns. Figures are medians.
`--write` writes the table into docs/design/quantized-gemm.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig

from benchmarks.decode_steps import use_environment_of_workers
from benchmarks.progress import Progress, no_bars_in_files, tell
from benchmarks.random_llama import SHAPE
from benchmarks.worker import PromptedSteps
from scripts.tables import with_table
from workers.loading.model_manager import LoadedModel, ModelManager

PAGE = Path(__file__).parents[1] / "docs" / "design" / "quantized-gemm.md"
MAKER = "python -m benchmarks.quantized_steps"
FORMATS = ("bfloat16", "int8", "fp8", "w4a8", "int4", "nf4")
NUM_WARM_UP = 3
READ_BYTES = 2**28  # more than the caches


def load(path: Path, name: str) -> LoadedModel:
    quantization = None if name == "bfloat16" else name
    return ModelManager("cpu").load(path, "bfloat16", None, load_format="dummy", quantization=quantization)


def rows_of(num_rows: int, models: dict[str, LoadedModel], arguments: argparse.Namespace) -> list[str]:
    """Measure steps of so many rows in all formats. Returns lines of the table."""
    num_steps = arguments.steps + NUM_WARM_UP
    sides = {name: PromptedSteps(loaded, num_rows, arguments.context, num_steps) for name, loaded in models.items()}
    memory = torch.ones(READ_BYTES // 4)
    times: dict[str, list[float]] = {name: [] for name in sides}
    reads = []
    for number in range(num_steps):
        started_s = time.perf_counter()
        memory.sum()
        read_s = time.perf_counter() - started_s
        steps_s = {name: steps.decode_s() for name, steps in sides.items()}
        if number >= NUM_WARM_UP:
            reads.append(read_s)
            for name, step_s in steps_s.items():
                times[name].append(step_s)
    s_per_byte = statistics.median(reads) / READ_BYTES
    lines = []
    for name, steps in sides.items():
        step_s, num_bytes = statistics.median(times[name]), models[name].weights.num_bytes
        floor_s = s_per_byte * num_bytes
        whole_s = floor_s + s_per_byte * num_rows * steps.length * steps.runner.kv_bytes_per_token
        cells = (
            *(name, str(num_rows), f"{num_bytes / 1e6:.0f}", f"{1e3 * step_s:.2f}"),
            *(f"{1e3 * floor_s:.2f}", f"{step_s / floor_s:.2f}", f"{1e3 * whole_s:.2f}", f"{step_s / whole_s:.2f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=["bfloat16", "int8", "w4a8", "int4"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 9, 32])
    parser.add_argument("--context", type=int, default=64, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--write", action="store_true", help="write the table into docs/design/quantized-gemm.md")
    arguments = parser.parse_args()
    no_bars_in_files()
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPE | {"num_hidden_layers": arguments.layers}
        LlamaConfig(**shape, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
        models = {name: load(Path(folder), name) for name in arguments.formats}
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    heads = [
        *("weights", "rows", "MB", "a step, ms", "reading the weights, ms", "ratio"),
        *("and keys and values, ms", "ratio"),
    ]
    lines = [
        "",
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {arguments.layers} layers, "
        f"{arguments.context} tokens of context, medians of {arguments.steps} steps, "
        f"load {os.getloadavg()[0]:.1f}, on {date}.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
    ]
    tell("\n".join(lines))
    with Progress("rows", len(arguments.rows)) as progress:
        for num_rows in arguments.rows:
            progress.begin(f"{num_rows} rows")
            found = rows_of(num_rows, models, arguments)
            tell("\n".join(found))
            lines += found
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), "quantized-steps", iter([*lines, ""]), MAKER))


if __name__ == "__main__":
    main()
