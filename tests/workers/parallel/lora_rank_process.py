"""One rank of several that serve adapters; see rank_process.py.

A directory has a model and its adapters, as `adapters_of` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from servekit.protocol.lora import LoraAdapter
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.parallel.rank_process import RanksEngine
from tests.workers.test_token_identity import make_prompts
from workers.loading.model_manager import ModelManager
from workers.parallel.ranks import Ranks

NUM_PLACES = 4  # fewer than adapters: some take the place of others
MAX_TOKENS = 12


def serve(ranks: Ranks, directory: Path) -> list[list[int]]:
    """Return the answers of all adapters, in batches of as many as there are places, and of the last ones again."""
    loaded = ModelManager("cpu").load(
        directory / "model", "float32", None, ranks=ranks, max_loras=NUM_PLACES, max_lora_rank=16
    )
    assert loaded.lora is not None
    adapters = []
    for number, path in enumerate(sorted(directory.glob("[0-9]"))):
        adapter = LoraAdapter(number, str(path))
        checked = [loaded.lora.load(adapter)[0] if dist.get_rank() == 0 else ""]  # the server asks one rank
        dist.broadcast_object_list(checked, src=0)
        adapters.append(LoraAdapter(number, str(path), checked[0]))
    engine, prompts = RanksEngine(loaded, ranks, num_blocks=200, max_num_batched_tokens=7), make_prompts(VOCAB_SIZE)
    answers: list[list[int]] = []
    for first in (*range(0, len(adapters), NUM_PLACES), 0):
        sequences = [
            engine.add(prompts[index], adapter=adapters[index], max_tokens=MAX_TOKENS, ignore_eos=True)
            for index in range(first, first + NUM_PLACES)
        ]
        sequences.append(engine.add(prompts[0], max_tokens=MAX_TOKENS, ignore_eos=True))
        engine.run()
        answers += [sequence.output_token_ids for sequence in sequences]
    return answers


def run_rank(rank: int, size: int, folder: str, directories: Sequence[str]) -> None:
    """Serve each model as one of `size` ranks, and write the answers to FOLDER/rank-0, FOLDER/rank-1 and so on."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, size, 1, f"{folder}/rendezvous", torch.device("cpu"))
    answers = [serve(ranks, Path(directory)) for directory in directories]
    Path(folder, f"rank-{rank}").write_bytes(msgspec.msgpack.encode(answers))
