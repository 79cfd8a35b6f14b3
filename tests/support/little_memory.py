"""A device whose memory holds only small steps."""

from __future__ import annotations

import pytest
import torch

from workers.batch import Batch
from workers.runner.model_runner import ModelRunner


class LittleMemory:
    """Makes every forward pass of more than `max_tokens` tokens run out of memory, and counts these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
        self.num_failures = 0
        forward = ModelRunner._forward

        def with_little_memory(runner: ModelRunner, batch: Batch, token_indices: torch.Tensor) -> torch.Tensor:
            if len(batch.input_ids) > max_tokens:
                self.num_failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(runner, batch, token_indices)

        monkeypatch.setattr(ModelRunner, "_forward", with_little_memory)
