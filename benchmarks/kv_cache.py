"""Time decode steps over long contexts with each format of KV pages, and compare them with pages in the model's dtype.

    python -m benchmarks.kv_cache [--dtype bfloat16] [--contexts 4096 16384] [--sequences 8]

The model is the Llama of random weights of benchmarks/decode_steps.py. Its pages are filled with random keys and
values, not by prompts, because only their number matters for time. Steps of all formats alternate, so a busy machine
affects all. Figures are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode_steps import BLOCK_SIZE, GREEDY, DecodeSteps, make_model, use_environment_of_workers
from benchmarks.progress import no_bars_in_files, progress, tell
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan
from workers.attention.interface import AttentionMetadata, AttentionParams, PagedStep
from workers.loading.model_manager import LoadedModel, ModelManager

FORMATS = ("auto", "int8", "fp8_e4m3")
NUM_FILLED = 16  # blocks that are stored; the others are copies of them


class LongSteps(DecodeSteps):
    """Sequences whose pages are filled before their first step."""

    def __init__(
        self, loaded: LoadedModel, kv_format: str, num_sequences: int, num_tokens: int, max_steps: int
    ) -> None:
        settings = {"model_path": loaded.model.name_or_path, "load_format": "dummy", "kv_cache_dtype": kv_format}
        super().__init__(loaded, num_sequences, num_tokens, max_steps, **settings)
        self._fill()
        chunks, assignments = [], []
        for slot in range(num_sequences):
            chunks.append(ScheduledChunk(slot, num_tokens - 1, 1, (slot + 3,), self.blocks_of(slot), samples=True))
            assignments.append(SlotAssignment(slot=slot, sampling=GREEDY))
        self.runner.execute(StepPlan(0, 0, tuple(assignments), tuple(chunks)))

    def _fill(self) -> None:
        """Store random keys and values in all pages."""
        cache = self.runner.cache
        num_filled = min(NUM_FILLED, cache.num_blocks)
        num_stored = num_filled * BLOCK_SIZE
        counts = np.array([num_stored])
        numbers = (torch.tensor([0, num_stored]).int(), torch.tensor([num_stored]).int())
        table, slots = torch.arange(num_filled).int()[None], torch.arange(num_stored)
        step = PagedStep(
            self.runner.attention, cache, AttentionMetadata(BLOCK_SIZE, counts, counts, *numbers, table, slots)
        )
        dtype = self.runner.loaded.dtype
        for layer, shape in enumerate(cache.layers):
            queries, keys = (torch.randn(num_stored, shape.num_kv_heads, shape.key_dim).to(dtype) for _ in range(2))
            values = torch.randn(num_stored, shape.num_kv_heads, shape.value_dim).to(dtype)
            self.runner.attention.attend(step, layer, queries, keys, values, AttentionParams(shape.key_dim**-0.5))
        targets = torch.arange(num_filled, cache.num_blocks)
        for some in targets.split(1024):
            cache.copy_blocks(some % num_filled, some)


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384], help="tokens of each sequence")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    no_bars_in_files()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), max_position_embeddings=2 * max(arguments.contexts))
        loaded = ModelManager("cpu").load(Path(folder), arguments.dtype, None)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {loaded.dtype}; {arguments.sequences} sequences\n")
    print("| tokens of context | --kv-cache-dtype | KV cache, MiB | a step, ms | of auto |\n|---:|---|---:|---:|---:|")
    for context in progress(arguments.contexts, "contexts", lambda number: f"{number} tokens"):
        sizes = (arguments.sequences, context, arguments.steps + 3)
        steps = [LongSteps(loaded, kv_format, *sizes) for kv_format in FORMATS]
        for each in steps * 2:
            each.decode_s()
        rounds = [[each.decode_s() for each in steps] for _ in range(arguments.steps)]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        for kv_format, each, step_s in zip(FORMATS, steps, medians, strict=True):
            mebibytes = each.runner.cache.num_bytes / 2**20
            tell(f"| {context} | {kv_format} | {mebibytes:.0f} | {1e3 * step_s:.1f} | {step_s / medians[0]:.2f} |")


if __name__ == "__main__":
    main()
