"""Settings with which tests load a model on the CPU."""

from __future__ import annotations

from typing import Any

from servekit.protocol.messages import LoadModel


def load_settings(model_path: str, **fields: Any) -> LoadModel:
    """Return settings for a small model, with small blocks and steps; `fields` replace some."""
    chosen: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": None,
        "num_kv_blocks": 64,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
    }
    return LoadModel(model_path=model_path, **(chosen | fields))
