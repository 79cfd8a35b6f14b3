"""Two ranks, of which one lacks what layers are fused with: a compiler, or a data type that its kernels take."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import msgspec
import torch

from workers.layers import layer_replacement
from workers.loading.model_manager import ModelManager
from workers.parallel.ranks import Ranks

# So a rank that waits for one that asks for nothing ends with an error, before the test is stopped.
RANK_TIMEOUT_S = 60.0


class Computed(msgspec.Struct):
    """What a rank computed: the class of its decoder, and the logits of the sample."""

    decoder: str
    logits: list[list[float]]


def run_rank_without_kernels(rank: int, folder: str, directory: str, missing: str) -> None:
    """Load a model as one of two ranks, and write what was computed. The second one's machine lacks `missing`."""
    torch.set_num_threads(1)
    if rank == 1 and missing == "compiler":
        patch.object(layer_replacement, "c_library", lambda _: None).start()
    elif rank == 1 and missing == "data type":
        patch.object(layer_replacement, "can_pack", lambda _: False).start()
    ranks = Ranks(rank, 2, 1, f"{folder}/rendezvous", torch.device("cpu"), RANK_TIMEOUT_S)
    loaded = ModelManager("cpu").load(Path(directory), "float32", None, ranks=ranks)
    computed = Computed(type(loaded.decoder).__name__, loaded.sample.logits.tolist())
    Path(folder, f"rank-{rank}").write_bytes(msgspec.msgpack.encode(computed))
