"""Time decode steps and prompts of the worker, and compare them with their minimum on this machine.

    python -m benchmarks.worker [--model PATH] [--dtype bfloat16] [--batches 1 8 32] [--context 256] [--prompts 256 512]

Without --model it makes the Llama of random weights of benchmarks/decode_steps.py. Two floors are measured in the same
run, alternating with the steps: the multiplications of a step alone, with weights packed by oneDNN; and these together
with reading all keys and values of the step once. A step is timed inside the worker, from the plan to the sampled ids,
in the environment of worker processes. Figures are medians. A prompt is one step whose last token is sampled. Its
multiplications are those that it needs: in the last layer, all tokens have keys and values, and one token the rest.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from benchmarks.decode_steps import GREEDY, DecodeSteps, make_model, use_environment_of_workers
from benchmarks.progress import no_bars_in_files, progress, tell
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan
from workers.layers import layer_replacement
from workers.layers.linear import NUM_ROWS, PackedWeight
from workers.layers.skinny_gemm import SkinnyGemm
from workers.loading.model_manager import LoadedModel, ModelManager


class PromptedSteps(DecodeSteps):
    """Sequences that begin with prompts."""

    def __init__(self, loaded: LoadedModel, num_sequences: int, num_tokens: int, max_steps: int) -> None:
        super().__init__(loaded, num_sequences, num_tokens, max_steps)
        vocab_size = self._vocab_size = loaded.info.vocab_size
        for slot in range(num_sequences):
            token_ids = tuple((slot * 7919 + i * 31) % vocab_size for i in range(num_tokens))
            chunk = ScheduledChunk(slot, 0, num_tokens, token_ids, self.blocks_of(slot), samples=True)
            assignment = SlotAssignment(slot=slot, sampling=GREEDY)
            self.runner.execute(StepPlan(0, 0, (assignment,), (chunk,)))

    def prompt_s(self, num_tokens: int) -> float:
        """Compute a prompt of so many tokens in place of the first sequence, and return its seconds."""
        token_ids = tuple(i * 31 % self._vocab_size for i in range(num_tokens))
        chunk = ScheduledChunk(0, 0, num_tokens, token_ids, self.blocks_of(0), samples=True)
        assignment = SlotAssignment(slot=0, sampling=GREEDY)
        return self.runner.execute(StepPlan(0, 0, (assignment,), (chunk,))).step_time_s


def timed(what: Callable[[], object]) -> float:
    started = time.perf_counter()
    what()
    return time.perf_counter() - started


class Floor:
    """The multiplications of a step and nothing else; layers with the same input are one multiplication."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        head_dim = hidden // config.num_attention_heads
        qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
        shapes = [(qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * config.num_hidden_layers
        weights = [torch.randn(*shape).mul(0.02).to(dtype) for shape in [*shapes, (config.vocab_size, hidden)]]
        self._dtype = dtype
        self._weights = [
            (weight.shape[1], torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS)) for weight in weights
        ]

    def multiply(self, num_rows: int, num_sampled: int | None = None) -> Callable[[], object]:
        """Return a function that multiplies so many rows; after the last layer's attention, the sampled ones."""
        inputs: dict[int, Tensor] = {size: torch.randn(num_rows, size).to(self._dtype) for size, _ in self._weights}
        sampled = {size: x[:num_sampled] for size, x in inputs.items()}
        num_whole = len(self._weights) - 4  # the last layer's output, gate_up and down, and the head
        call = torch.ops.mkldnn._linear_pointwise

        def step() -> None:
            with torch.inference_mode():
                for index, (size, weight) in enumerate(self._weights):
                    call((inputs if index < num_whole else sampled)[size], weight, None, "none", [], "")

        return step


class Memory:
    """Memory of the size of all keys and values of a step, to be read once."""

    def __init__(self, num_bytes: int) -> None:
        self._numbers = torch.ones(num_bytes // 4)

    def read(self) -> None:
        self._numbers.sum()


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="model directory; default: a Llama of random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 512, 2048], help="tokens of prompts")
    parser.add_argument(
        "--onednn-alone", action="store_true", help="multiply by oneDNN in all steps, without the skinny GEMM"
    )
    parser.add_argument(
        "--plain-weights", action="store_true", help="read all bytes of a weight, without compact panels"
    )
    arguments = parser.parse_args()
    if arguments.onednn_alone or arguments.plain_weights:
        layer_replacement.make_compact_weight = lambda *_: None  # type: ignore[assignment]
    if arguments.onednn_alone:
        SkinnyGemm.make_weight = lambda _, weight, bias: PackedWeight(weight, bias)  # type: ignore[method-assign]
    no_bars_in_files()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.model or Path(folder)
        if arguments.model is None:
            make_model(path)
        started = time.monotonic()
        loaded = ModelManager("cpu").load(path, arguments.dtype, None)
        load_s = time.monotonic() - started
    floor = Floor(loaded.model.config, loaded.dtype)
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, {loaded.dtype}")
    size = f"{loaded.info.num_parameters / 1e6:.0f} M parameters"
    print(f"{loaded.info.architecture}, {size}, loaded in {load_s:.1f} s; {arguments.context} tokens of context")
    heads = [
        "sequences",
        "a step, ms",
        "multiplications alone, ms",
        "ratio",
        "and keys and values, ms",
        "ratio",
        "tokens/s",
    ]
    print(f"\n| {' | '.join(heads)} |\n|{'---:|' * len(heads)}")
    for num_sequences in progress(arguments.batches, "batches", lambda number: f"{number} sequences"):
        steps = PromptedSteps(loaded, num_sequences, arguments.context, arguments.steps + 3)
        multiply = floor.multiply(num_sequences)
        memory = Memory(num_sequences * steps.length * steps.runner.kv_bytes_per_token)
        for _ in range(3):
            steps.decode_s(), multiply(), memory.read()
        rounds = [(steps.decode_s(), timed(multiply), timed(memory.read)) for _ in range(arguments.steps)]
        step_s, multiply_s, read_s = (statistics.median(times) for times in zip(*rounds, strict=True))
        cells = (
            *(f"{1e3 * step_s:.1f}", f"{1e3 * multiply_s:.1f}", f"{step_s / multiply_s:.2f}"),
            *(f"{1e3 * (multiply_s + read_s):.1f}", f"{step_s / (multiply_s + read_s):.2f}"),
            f"{num_sequences / step_s:.0f}",
        )
        tell(f"| {num_sequences} | {' | '.join(cells)} |")
    print("\n| tokens of a prompt | its step, ms | multiplications alone, ms | ratio |\n|---:|---:|---:|---:|")
    for num_tokens in arguments.prompts:
        steps = PromptedSteps(loaded, 1, num_tokens, 0)
        multiply = floor.multiply(num_tokens, 1)
        steps.prompt_s(num_tokens), multiply()
        pairs = [(steps.prompt_s(num_tokens), timed(multiply)) for _ in range(arguments.steps // 3)]
        step_s, multiply_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        tell(f"| {num_tokens} | {1e3 * step_s:.0f} | {1e3 * multiply_s:.0f} | {step_s / multiply_s:.2f} |")


if __name__ == "__main__":
    main()
