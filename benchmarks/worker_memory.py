"""Measure whether a worker's memory grows over many steps of changing shapes.

    python -m benchmarks.worker_memory [--steps 100000]

The model is a small random Llama, so that a step is short: memory could grow by what is kept for each step, shape and
sequence, and not by the model. Requests of random lengths come and go, so that prompt chunks, decodes and preemptions
mix.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.progress import Progress, no_bars_in_files, tell
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import ARCHITECTURES, make_model
from workers.loading.model_manager import ModelManager

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NUM_REPORTS = 10
MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    arguments = parser.parse_args()
    no_bars_in_files()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), *ARCHITECTURES["llama"])
        loaded = ModelManager("cpu").load(Path(folder), "float32", None)
    engine = InProcessEngine(loaded, num_blocks=60, block_size=16, max_num_seqs=8, max_num_batched_tokens=64)
    rng = random.Random(0)
    started = time.monotonic()
    print("| steps | resident, MiB |\n|---:|---:|")
    steps_a_mark = max(1, arguments.steps // 100)
    with Progress("hundredths", arguments.steps // steps_a_mark + 1) as progress:
        for step in range(arguments.steps + 1):
            if step % steps_a_mark == 0:
                progress.begin(f"step {step:,}")
            while engine.manager.num_running + engine.manager.num_waiting < 10:
                prompt = [rng.randrange(3, 100) for _ in range(rng.randrange(1, 90))]
                sampling = {"temperature": rng.choice([0.0, 1.0]), "top_p": rng.choice([0.5, 1.0]), "seed": step}
                engine.add(prompt, max_tokens=rng.randrange(1, 60), **sampling)
            engine.step()
            if step % (arguments.steps // NUM_REPORTS) == 0:
                engine.logprobs.clear()  # kept by the harness, not by the worker
                tell(f"| {step:,} | {resident_bytes() / MIB:.1f} |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    elapsed_s = time.monotonic() - started
    print(f"\nat most {peak / MIB:.1f} MiB; {arguments.steps / elapsed_s:.0f} steps/s")


if __name__ == "__main__":
    main()
