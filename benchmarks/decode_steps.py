"""Run the decode steps of a worker in this process, over a Llama of random weights.

It has 88 million parameters, 12 layers, hidden size 768, 12 query and 4 key heads.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from servekit.executor.worker_process import WORKER_ENVIRONMENT
from servekit.protocol.messages import LoadModel, ScheduledChunk, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from workers.loading.model_manager import LoadedModel
from workers.runner.model_runner import ModelRunner

BLOCK_SIZE = 16
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GREEDY = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)


def use_environment_of_workers() -> None:
    """Restart this process if its environment differs: the memory allocator reads it at the start only."""
    if any(name not in os.environ for name in WORKER_ENVIRONMENT):
        os.execve(sys.executable, sys.orig_argv, {**WORKER_ENVIRONMENT, **os.environ})  # noqa: S606 - itself


def make_model(path: Path, **changes: Any) -> None:
    """Write the model into a directory, in bfloat16. `changes` are fields of its configuration."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SHAPE, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


class DecodeSteps:
    """Sequences of `length` tokens that grow by one in every step. A subclass begins them."""

    def __init__(
        self, loaded: LoadedModel, num_sequences: int, num_tokens: int, max_steps: int, **settings: Any
    ) -> None:
        """`settings` are fields of LoadModel."""
        self._blocks_each = -(-(num_tokens + max_steps + 1) // BLOCK_SIZE)
        load = LoadModel(
            **{
                "model_path": "",
                "device": "cpu",
                "dtype": "auto",
                "max_model_len": None,
                "max_num_seqs": num_sequences,
                "max_num_batched_tokens": 8192,
                "block_size": BLOCK_SIZE,
                "num_kv_blocks": self._blocks_each * num_sequences,
                "kv_cache_memory_bytes": None,
                "gpu_memory_utilization": 0.9,
                **settings,
            }
        )
        self.runner = ModelRunner(loaded, load)
        self.length = num_tokens

    def blocks_of(self, slot: int) -> tuple[int, ...]:
        """The KV blocks of the sequence in a slot."""
        return tuple(range(slot * self._blocks_each, (slot + 1) * self._blocks_each))

    def decode_s(self) -> float:
        """Run one more step, and return its seconds."""
        slots = self.runner.table.slot_assignments
        chunks = tuple(ScheduledChunk(slot, self.length, 1, (), (), samples=True) for slot in slots)
        self.length += 1
        return self.runner.execute(StepPlan(0, self.length, (), chunks)).step_time_s
