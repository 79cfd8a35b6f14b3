"""Compare decode steps with LoRA adapters with those of the model alone.

`python -m benchmarks.lora` times the steps of a worker in this process: a Llama of 88 million random weights, or of 0.4
billion with `--large`, and sequences of 256 tokens. The adapters change all linear layers of the decoder, with rank 16.
With eight of them, consecutive sequences have different ones, so no two rows of a step have the same adapter side by
side. All variants take turns in one run, and the table has medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.decode_steps import BLOCK_SIZE, GREEDY, DecodeSteps, make_model, use_environment_of_workers
from benchmarks.random_llama import SHAPE
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import ScheduledChunk, SlotAssignment, StepPlan
from workers.loading.model_manager import LoadedModel, ModelManager

NUM_TOKENS = 256
NUM_ADAPTERS = 8
RANK = 16
WEIGHTS = {"float32": ("float32", None), "bfloat16": ("bfloat16", None), "int4": ("bfloat16", "int4")}


def write_adapter(directory: Path, loaded: LoadedModel, seed: int) -> None:
    """Write a random adapter of all layers that may have one, in PEFT's format."""
    assert loaded.lora is not None
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in loaded.lora.modules.items():
        key = f"base_model.model.{name}.lora_"
        tensors[f"{key}A.weight"] = torch.randn(RANK, shape.num_inputs, generator=generator) / 30
        tensors[f"{key}B.weight"] = torch.randn(shape.num_outputs, RANK, generator=generator) / 30
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


class AdaptedSteps(DecodeSteps):
    """Decode steps of sequences that have adapters in turn."""

    def __init__(self, loaded: LoadedModel, adapters: list[LoraAdapter | None], num_sequences: int, steps: int) -> None:
        super().__init__(loaded, num_sequences, NUM_TOKENS, steps)
        prompt = tuple(range(100, 100 + NUM_TOKENS))
        for slot in range(num_sequences):
            adapter = adapters[slot % len(adapters)]
            assignment = SlotAssignment(slot, GREEDY, NUM_TOKENS, adapter=adapter)
            chunk = ScheduledChunk(slot, 0, NUM_TOKENS, prompt, self.blocks_of(slot), samples=True)
            self.runner.execute(StepPlan(0, slot, (assignment,), (chunk,)))


def measure(dtype: str, quantization: str | None, num_sequences: int, steps: int, folder: Path) -> dict[str, float]:
    """Return the median step of each variant, in milliseconds."""
    manager, model = ModelManager("cpu"), folder / "model"
    bare = manager.load(model, dtype, None, quantization=quantization)
    loaded = manager.load(model, dtype, None, quantization=quantization, max_loras=NUM_ADAPTERS, max_lora_rank=RANK)
    assert loaded.lora is not None
    adapters: list[LoraAdapter | None] = []
    for number in range(NUM_ADAPTERS):
        directory = folder / str(number)
        if not directory.exists():
            write_adapter(directory, loaded, number)
        adapter = LoraAdapter(number, str(directory))
        adapters.append(LoraAdapter(number, str(directory), loaded.lora.load(adapter)[0]))
    variants = {
        "the model alone": AdaptedSteps(bare, [None], num_sequences, steps),
        "no adapter in the step": AdaptedSteps(loaded, [None], num_sequences, steps),
        "1 adapter": AdaptedSteps(loaded, adapters[:1], num_sequences, steps),
        "8 adapters": AdaptedSteps(loaded, adapters, num_sequences, steps),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(steps):
        for name, variant in variants.items():
            seconds = variant.decode_s()
            if step > 1:
                times[name].append(seconds * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="decode steps of each variant")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--weights", nargs="+", choices=[*WEIGHTS], default=[*WEIGHTS])
    parser.add_argument("--large", action="store_true", help="0.4 billion weights")
    arguments = parser.parse_args()
    use_environment_of_workers()
    assert NUM_TOKENS % BLOCK_SIZE == 0
    print("| weights | sequences | variant | ms a step | throughput, of the model alone |\n|---|---:|---|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", **(SHAPE if arguments.large else {}))
        for dtype, quantization in map(WEIGHTS.__getitem__, arguments.weights):
            for num_sequences in arguments.sequences:
                found = measure(dtype, quantization, num_sequences, arguments.steps, folder)
                alone = found["the model alone"]
                for variant, milliseconds in found.items():
                    print(
                        f"| {quantization or dtype} | {num_sequences} | {variant} | {milliseconds:.2f} | "
                        f"{alone / milliseconds:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
