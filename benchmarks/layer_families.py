"""Time decode steps of models of several families with their layers fused, and with transformers' own layers.

    python -m benchmarks.layer_families [--families phi3 gemma3 ...] [--batches 1 8 32] [--context 256]

Models have random weights in bfloat16, some 90 million of them. Both ways of computing a model have the same weights,
attention in C and packed matrices, and their steps alternate. Figures are medians, in the environment of worker
processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.decode_steps import SHAPE, use_environment_of_workers
from benchmarks.progress import no_bars_in_files, progress, tell
from benchmarks.worker import PromptedSteps
from workers.layers import layer_families
from workers.layers.fused_decoder import FusedDecoder
from workers.loading.model_manager import LoadedModel, ModelManager

_SHAPE: dict[str, Any] = {**SHAPE, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 8, "intermediate_size": 320}
_SMALL_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {  # by model type, what differs from _SHAPE
    "llama": {},
    "phi3": {},
    "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    "gemma": {},
    "gemma2": {"sliding_window": 1024},
    "gemma3_text": {"sliding_window": 512},
    "olmo2": {},
    "mixtral": _MIXTURE,
    "qwen3_moe": _SMALL_EXPERTS,
    "qwen2_moe": {**_SMALL_EXPERTS, "shared_expert_intermediate_size": 256},
    "gpt_oss": _MIXTURE,
}


def make_model(path: Path, model_type: str) -> None:
    """Write a model of random weights into a directory."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SHAPE, **MODELS[model_type]})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def load_both(model_type: str) -> tuple[LoadedModel, LoadedModel]:
    """Return the model with transformers' layers, and with fused ones."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), model_type)
        with mock.patch.dict(layer_families.FAMILIES, clear=True):
            own = ModelManager("cpu").load(Path(folder), "bfloat16", None)
        fused = ModelManager("cpu").load(Path(folder), "bfloat16", None)
    assert not isinstance(own.decoder, FusedDecoder) and isinstance(fused.decoder, FusedDecoder)
    return own, fused


def main() -> None:
    use_environment_of_workers()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    no_bars_in_files()
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}, bfloat16")
    heads = ["model type", "parameters", "sequences", "transformers' layers, ms a step", "fused, ms a step", "ratio"]
    print(f"\n| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for model_type in progress(arguments.families, "families", str):
        both = load_both(model_type)
        size = f"{both[1].info.num_parameters / 1e6:.0f} M"
        for num_sequences in arguments.batches:
            steps = [PromptedSteps(loaded, num_sequences, arguments.context, arguments.steps + 3) for loaded in both]
            for _ in range(3):
                [each.decode_s() for each in steps]
            rounds = [[each.decode_s() for each in steps] for _ in range(arguments.steps)]
            own_s, fused_s = (statistics.median(times) for times in zip(*rounds, strict=True))
            cells = (model_type, size, str(num_sequences), f"{1e3 * own_s:.1f}", f"{1e3 * fused_s:.1f}")
            tell(f"| {' | '.join(cells)} | {own_s / fused_s:.2f} |")


if __name__ == "__main__":
    main()
