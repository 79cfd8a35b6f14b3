"""One rank of several, each a process of its own with its own manager: they make the same plans, as from one manager.

`python -m tests.workers.parallel.rank_process RANK SIZE RENDEZVOUS OUTPUT MODEL...`
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from servekit.errors import ConfigError
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.test_token_identity import make_prompts, serve_with_joins_and_leaves
from workers.loading.model_manager import ModelManager
from workers.parallel.rank_group import RankGroup


class Served(msgspec.Struct):
    """What a rank computed with one model."""

    refusal: str = ""
    layers: str = ""  # the class of the decoder
    num_kv_heads: int = 0
    num_parameters: int = 0
    num_vocabulary_rows: int = 0  # of the output head
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    distance: float = 0.0  # of the self-check
    logits: list[list[float]] = []  # of the sample, by transformers' own layers
    answers: list[list[int]] = []
    again: list[list[int]] = []  # with prompts that are cached


def serve(group: RankGroup, directory: str) -> Served:
    """Load the model with the other ranks, and answer the prompts twice."""
    try:
        loaded = ModelManager("cpu").load(Path(directory), "float32", None, group=group)
    except ConfigError as error:
        return Served(refusal=error.message)
    small = InProcessEngine(loaded, num_blocks=9, max_num_seqs=6, max_num_batched_tokens=7)
    sequences = serve_with_joins_and_leaves(small, make_prompts(VOCAB_SIZE))
    large = InProcessEngine(loaded, num_blocks=200, max_steps_in_flight=2)
    for _ in range(2):
        again = [large.add(prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in make_prompts(VOCAB_SIZE)]
        large.run()
    return Served(
        layers=type(loaded.decoder).__name__,
        num_kv_heads=loaded.layers[0].num_kv_heads,
        num_parameters=loaded.info.num_parameters,
        num_vocabulary_rows=int(loaded.model.lm_head.out_features),
        num_preemptions=small.manager.num_preemptions,
        num_cached_tokens=large.manager.num_cached_tokens,
        distance=large.runner.self_check(),
        logits=loaded.sample.logits.tolist(),
        answers=[sequence.output_token_ids for sequence in sequences],
        again=[sequence.output_token_ids for sequence in again],
    )


def main(rank: str, size: str, rendezvous: str, output: str, *directories: str) -> None:
    """Serve each model, and write what was computed to the file `output`."""
    torch.set_num_threads(1)
    group = RankGroup(int(rank), int(size), rendezvous, torch.device("cpu"))
    served = [serve(group, directory) for directory in directories]
    Path(output).write_bytes(msgspec.msgpack.encode(served))


if __name__ == "__main__":
    main(*sys.argv[1:])
