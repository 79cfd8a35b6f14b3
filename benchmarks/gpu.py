"""What a GPU's steps take, as a share of what they must: one run for everything, without a network.

    python -m benchmarks.gpu [--out FOLDER] [--shapes llama-3-8b qwen2.5-1.5b qwen2.5-0.5b] [--device cuda:0]

In turn: the two ceilings of this GPU (memory, and bfloat16 multiplication), the kernels against float64, and for each
shape, in random weights made on the device, decode steps at several batch sizes and the prefill of a long prompt. The
floor of a decode step is the time to read weights, keys and values once, or to multiply, whichever is longer;
that of prefill is its multiplications. Steps are timed by the wall clock and one ahead, as a worker runs them. That a
greedy decode step does not wait for the device in secret is asserted by torch's own sync debug mode. Raw figures are
written as JSON, the tables to standard output.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from servekit.messages import LoadModel, Row, Seat, StepPlan
from servekit.sampling_params import SamplingParams
from workers.kv_cache import KVCache, LayerShape
from workers.model_manager import LoadedModel, ModelManager
from workers.model_runner import ModelRunner, make_runner
from workers.page_dtype import PlainPages
from workers.paged_step import PagedAttention, PagedStep, Score, StepRows
from workers.torch_attention import TorchAttention

CONTEXT = 1024
BLOCK_SIZE = 16
COMMON = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 1536,
        "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(what: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Of one call, the median; the first ones do not count."""
    times = []
    for _ in range(repeats + 3):
        synchronize(device)
        started = time.perf_counter()
        what()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


class Ceilings:
    """What this device can do at most, measured: bytes/s of memory that is read, FLOP/s in bfloat16."""

    def __init__(self, device: torch.device) -> None:
        size = 2**30 if device.type == "cuda" else 2**24
        source, target = torch.randn(2, size // 4, device=device).unbind(0)
        self.bytes_per_s = 2 * size / seconds(lambda: target.copy_(source), device)
        n = 8192 if device.type == "cuda" else 512
        a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.flops = 2 * n**3 / seconds(lambda: a @ b, device)


def check_attention(attention: PagedAttention, device: torch.device, dtype: torch.dtype) -> float:
    """The largest error of a row, relative to the reference in float64, on fresh inputs in a few shapes."""
    worst = 0.0
    for heads, dim, score in (
        ((32, 8), 128, Score(128**-0.5)),
        ((14, 2), 64, Score(64**-0.5)),
        ((16, 8), 256, Score(0.06, window=100, softcap=20.0)),
        ((6, 2), 80, Score(0.1, window=64, sinks=torch.randn(6, device=device))),
    ):
        shape = LayerShape(heads[1], dim, dim)
        for rows in ([(1, 1000), (1, 17), (1, 1)], [(1, 400), (100, 300), (7, 7), (64, 512)], [(513, 513)]):
            step = make_step(attention, shape, rows, device, dtype)
            new = sum(num_queries for num_queries, _ in rows)
            queries, keys, values = (torch.randn(new, n, dim, device=device, dtype=dtype) for n in (*heads, heads[1]))
            output = attention.attend(step, 0, queries, keys, values, score)
            exact = reference(step, shape, queries, keys, values, score, attention)
            error = (output.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
            worst = max(worst, float(error.max()))
    return worst


def make_step(
    attention: PagedAttention, shape: LayerShape, rows: list[tuple[int, int]], device: torch.device, dtype: torch.dtype
) -> PagedStep:
    """Rows of (new tokens, keys), over pages that hold random numbers and lie anywhere."""
    widths = [-(-num_keys // BLOCK_SIZE) for _, num_keys in rows]
    cache = KVCache([shape], attention.block_shapes, sum(widths), BLOCK_SIZE, dtype, device)
    cache.keys[0].normal_(), cache.values[0].normal_()
    blocks = iter(torch.randperm(sum(widths)).tolist())
    table = torch.zeros(len(rows), max(widths), dtype=torch.int32)
    cells: list[int] = []
    for row, (new, num_keys) in enumerate(rows):
        own = [next(blocks) for _ in range(widths[row])]
        table[row, : len(own)] = torch.tensor(own)
        cells += [own[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_keys - new, num_keys)]
    num_queries, num_keys = (torch.tensor(column) for column in zip(*rows, strict=True))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), num_queries.cumsum(0)]).int()
    on_device = (each.to(device) for each in (starts, num_keys.int(), table, torch.tensor(cells)))
    return PagedStep(attention, cache, StepRows(BLOCK_SIZE, num_queries.numpy(), num_keys.numpy(), *on_device))


def reference(
    step: PagedStep,
    shape: LayerShape,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    score: Score,
    attention: PagedAttention,
) -> Tensor:
    """The same by torch's own operations in float64, over a copy of the pages."""
    plain = TorchAttention(PlainPages(torch.float64))
    assert attention.block_shapes(shape, BLOCK_SIZE) == plain.block_shapes(shape, BLOCK_SIZE)
    cache = KVCache([shape], plain.block_shapes, step.cache.num_blocks, BLOCK_SIZE, torch.float64, queries.device)
    cache.keys[0].copy_(step.cache.keys[0]), cache.values[0].copy_(step.cache.values[0])
    wide = (each.double() for each in (queries, keys, values))
    return plain.attend(PagedStep(plain, cache, step.rows), 0, *wide, score)


# -- whole steps ------------------------------------------------------------------------------------------------------


def settings_for(path: Path, device: str, num_seqs: int, num_tokens: int) -> LoadModel:
    return LoadModel(
        model_path=str(path),
        device=device,
        dtype="bfloat16",
        max_model_len=None,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_seqs * -(-num_tokens // BLOCK_SIZE),
        kv_cache_memory_bytes=None,
        gpu_memory_utilization=0.9,
    )


class Sequences:
    """Some that have a context each, and grow by a token in every step."""

    def __init__(self, runner: ModelRunner, num_sequences: int, context: int, most_steps: int) -> None:
        self._runner, self._length, self._num_sequences = runner, context, num_sequences
        blocks_each = -(-(context + most_steps) // BLOCK_SIZE)
        vocab_size = runner.loaded.info.vocab_size
        for slot in range(num_sequences):
            token_ids = tuple((slot * 7919 + i * 31) % vocab_size for i in range(context))
            blocks = tuple(range(slot * blocks_each, (slot + 1) * blocks_each))
            row = Row(slot, 0, context, token_ids, blocks, samples=True)
            runner.execute(StepPlan(0, 0, (Seat(slot=slot, sampling=GREEDY),), (row,)))

    def plans(self) -> Iterator[StepPlan]:
        while True:
            rows = tuple(Row(slot, self._length, 1, (), (), samples=True) for slot in range(self._num_sequences))
            self._length += 1
            yield StepPlan(0, self._length, (), rows)

    def step_s(self, num_steps: int) -> float:
        """Seconds of a step, each launched before the one before it is waited for."""
        device, plans = self._runner.loaded.device, self.plans()
        for _ in range(3):
            self._runner.execute(next(plans))
        synchronize(device)
        times, pending = [], self._runner.launch(next(plans))
        started = time.perf_counter()
        for _ in range(num_steps):
            following = self._runner.launch(next(plans))
            pending()
            times.append(time.perf_counter())
            pending = following
        pending()
        return statistics.median(b - a for a, b in zip([started, *times], times, strict=False))

    def assert_nothing_waits(self) -> None:
        """Raises what torch does where an operation of the launch waits for the device."""
        if self._runner.loaded.device.type != "cuda":
            return
        plan = next(self.plans())
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = self._runner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        pending()


def weights_read(loaded: LoadedModel) -> tuple[int, int, int]:
    """(bytes, parameters of the layers, of the head) on a token's way; embeddings are looked up."""
    config = loaded.model.config
    hidden, head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
    qkv = (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    of_layer = hidden * (qkv + config.num_attention_heads * head_dim + 3 * config.intermediate_size)
    of_layers, of_head = config.num_hidden_layers * of_layer, config.vocab_size * hidden
    return 2 * (of_layers + of_head), of_layers, of_head


def measure(name: str, device: str, ceilings: Ceilings, batches: list[int], context: int) -> Iterator[dict[str, Any]]:
    """A row for each batch size, and one for prefill."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**COMMON, **SHAPES[name], "dtype": "bfloat16"}))
        started = time.monotonic()
        loaded = ModelManager(device).load(Path(folder), "bfloat16", None, load_format="dummy")
        load_s = time.monotonic() - started
        num_bytes, of_layers, of_head = weights_read(loaded)
        num_steps = 50 if loaded.device.type == "cuda" else 3
        for batch in batches:
            settings = settings_for(Path(folder), device, batch, context + num_steps + 8)
            runner = make_runner(loaded, settings)
            sequences = Sequences(runner, batch, context, num_steps + 8)
            step_s = sequences.step_s(num_steps)
            sequences.assert_nothing_waits()
            multiply_s = 2 * batch * (of_layers + of_head) / ceilings.flops
            keys_s = batch * context * runner.kv_bytes_per_token / ceilings.bytes_per_s
            floor_s = max(num_bytes / ceilings.bytes_per_s, multiply_s) + keys_s
            yield {
                "shape": name, "what": "decode", "batch": batch, "step_ms": 1e3 * step_s, "floor_ms": 1e3 * floor_s,
                "of_floor": floor_s / step_s, "tokens_per_s": batch / step_s, "attention": runner.attention.name,
                "load_s": load_s,
            }  # fmt: skip
            del runner, sequences
        chunk = 8 * context
        runner = ModelRunner(loaded, replace(settings_for(Path(folder), device, 1, chunk), num_kv_blocks=chunk))
        token_ids = tuple(i * 31 % loaded.info.vocab_size for i in range(chunk))
        seat = Seat(slot=0, sampling=GREEDY)

        def prefill() -> None:
            row = Row(0, 0, chunk, token_ids, tuple(range(-(-chunk // BLOCK_SIZE))), samples=True)
            runner.execute(StepPlan(0, 0, (seat,), (row,)))

        prefill_s = seconds(prefill, loaded.device, 5)
        config = loaded.model.config
        scores = 2 * config.num_hidden_layers * config.hidden_size * chunk**2  # causal: half of all pairs, twice over
        floor_s = (2 * chunk * of_layers + 2 * of_head + scores) / ceilings.flops
        yield {
            "shape": name, "what": "prefill", "batch": chunk, "step_ms": 1e3 * prefill_s, "floor_ms": 1e3 * floor_s,
            "of_floor": floor_s / prefill_s, "tokens_per_s": chunk / prefill_s, "attention": runner.attention.name,
            "load_s": load_s,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[name for name in SHAPES if name != "tiny"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--out", type=Path, help="a folder for the raw figures")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    ceilings = Ceilings(device)
    print(f"{name}, torch {torch.__version__}, {arguments.context} tokens of context")
    print(f"memory {ceilings.bytes_per_s / 1e12:.2f} TB/s, bfloat16 {ceilings.flops / 1e12:.0f} TFLOP/s", flush=True)
    if device.type == "cuda":
        from workers.gpu_attention import TritonAttention

        for dtype in (torch.float32, torch.bfloat16):
            with torch.inference_mode():
                error = check_attention(TritonAttention(PlainPages(dtype)), device, dtype)
            print(f"attention by Triton, {dtype}: largest error of a row {error:.1e} of float64's", flush=True)
            assert error < (1e-5 if dtype is torch.float32 else 2e-2), "the kernel is wrong"
    rows = []
    print("\n| shape | | batch | a step, ms | floor, ms | of floor | tokens/s |\n|---|---|---:|---:|---:|---:|---:|")
    for shape in arguments.shapes:
        for row in measure(shape, arguments.device, ceilings, arguments.batches, arguments.context):
            rows.append(row)
            times = f"{row['step_ms']:.2f} | {row['floor_ms']:.2f} | {100 * row['of_floor']:.0f} %"
            print(f"| {shape} | {row['what']} | {row['batch']} | {times} | {row['tokens_per_s']:,.0f} |", flush=True)
    if arguments.out:
        told = {"device": name, "torch": torch.__version__, "ceilings": vars(ceilings), "rows": rows}
        (arguments.out / "gpu.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
