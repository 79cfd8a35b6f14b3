"""Several ranks, each a process of its own with its own manager: they make the same plans, as from one manager.

`run_rank` writes what a rank computed to FOLDER/rank-0, FOLDER/rank-1 and so on. tests/support/forked_ranks.py forks a
process for each; `python -m tests.workers.parallel.rank_process RANK TENSOR_SIZE PIPELINE_SIZE FOLDER MODEL...` is one.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from servekit.errors import ConfigError
from servekit.protocol.messages import StepResult
from tests.support.drafters import RandomDrafter
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.test_token_identity import make_prompts, serve_with_joins_and_leaves
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.parallel.ranks import Ranks
from workers.runner.interface import Pending


class Served(msgspec.Struct):
    """What a rank computed with one model."""

    refusal: str = ""
    decoder: str = ""  # its class
    num_layers: int = 0
    num_kv_heads: int = 0
    num_parameters: int = 0
    num_vocabulary_rows: int = 0  # of the output head; 0 without one
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    distance: float = 0.0  # of the self-check
    logits: list[list[float]] = []  # of the sample, by transformers' own layers
    answers: list[list[int]] = []
    again: list[list[int]] = []  # with prompts that are cached
    drafted: list[list[int]] = []  # the same with drafts, of which each rank makes others; empty in a pipeline
    logprobs: list[list[float]] = []  # of each request: of prompt and answer, those of the likeliest tokens, too


class RanksEngine(InProcessEngine):
    """An engine that launches each step when it is planned, and whose manager gets the result on every rank."""

    def __init__(self, loaded: LoadedModel, ranks: Ranks, **settings: Any) -> None:
        num_stages = 1 if ranks.stage is None else ranks.stage.size
        super().__init__(loaded, **settings, pipeline_parallel_size=num_stages, max_steps_in_flight=num_stages + 1)
        self._launched: deque[Pending[StepResult]] = deque()

    def step(self) -> None:
        while (plan := self.manager.plan(0.0)) is not None:
            self._launched.append(self.runner.launch(plan))
        result = [self._launched.popleft().finish()]
        dist.broadcast_object_list(result, src=dist.get_world_size() - 1)
        self.num_steps += 1
        for token in self.manager.commit(result[0], 0.0):
            self.logprobs[token.sequence.sequence_id].append(token.logprobs)
        self.manager.check()


def logprobs_of(engine: InProcessEngine) -> list[list[float]]:
    """Answer the prompts, and return all logprobs of each: the tokens', and those of the likeliest ones."""
    sampling = {"max_tokens": 8, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    asked = {**sampling, "logprobs": 4, "prompt_logprobs": 2}
    sequences = [engine.add(prompt, **asked) for prompt in make_prompts(VOCAB_SIZE)]
    engine.run()
    found = []
    for sequence in sequences:
        tokens = [*sequence.prompt_logprobs, *filter(None, engine.logprobs[sequence.sequence_id])]
        assert len(tokens) == sequence.prompt_length - 1 + 8
        found.append([value for token in tokens for value in (token.logprob, *(each for _, each in token.top))])
    return found


def serve(ranks: Ranks, directory: str) -> Served:
    """Load the model with the other ranks, and answer the prompts in several ways."""
    try:
        loaded = ModelManager("cpu").load(Path(directory), "float32", None, ranks=ranks)
    except ConfigError as error:
        return Served(refusal=error.message)
    # The time is that of the messages between ranks, so of the steps. With these numbers there are few, and sequences
    # are preempted all the same.
    small = RanksEngine(loaded, ranks, num_blocks=12, max_num_seqs=6, max_num_batched_tokens=16)
    sequences = serve_with_joins_and_leaves(small, make_prompts(VOCAB_SIZE))
    large = RanksEngine(loaded, ranks, num_blocks=200)
    logprobs = logprobs_of(large)
    again = [large.add(prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in make_prompts(VOCAB_SIZE)]
    large.run()
    drafted = []
    if ranks.stage is None:
        drafter = RandomDrafter(VOCAB_SIZE, seed=dist.get_rank())
        drafting = RanksEngine(loaded, ranks, num_blocks=200, max_drafts=4, drafter=drafter)
        drafted = [drafting.add(prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in make_prompts(VOCAB_SIZE)]
        drafting.run()
    return Served(
        decoder=type(loaded.decoder).__name__,
        num_layers=len(loaded.layers),
        num_kv_heads=loaded.layers[0].num_kv_heads,
        num_parameters=loaded.info.num_parameters,
        num_vocabulary_rows=int(getattr(loaded.model.lm_head, "out_features", 0)),
        num_preemptions=small.manager.num_preemptions,
        num_cached_tokens=large.manager.num_cached_tokens,
        distance=large.runner.self_check(),
        logits=loaded.sample.logits.tolist(),
        answers=[sequence.output_token_ids for sequence in sequences],
        again=[sequence.output_token_ids for sequence in again],
        drafted=[sequence.output_token_ids for sequence in drafted],
        logprobs=logprobs,
    )


def run_rank(rank: int, tensor_size: int, pipeline_size: int, folder: str, directories: Sequence[str]) -> None:
    """Serve each model as one of several ranks, and write what was computed."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, tensor_size, pipeline_size, f"{folder}/rendezvous", torch.device("cpu"))
    served = [serve(ranks, directory) for directory in directories]
    Path(folder, f"rank-{rank}").write_bytes(msgspec.msgpack.encode(served))


if __name__ == "__main__":
    numbers, (to, *models) = map(int, sys.argv[1:4]), sys.argv[4:]
    run_rank(*numbers, to, models)
    dist.destroy_process_group()  # or its threads may still run when this process ends, which is an abort
    # torch still aborts at the end now and then, with "terminate called without an active exception": it has a thread
    # that is not joined. What this process computed is written, so it ends without the destructors of its libraries.
    os._exit(0)
