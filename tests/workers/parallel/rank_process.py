"""Several ranks, each a process of its own with its own manager: they make the same plans, as from one manager.

`python -m tests.workers.parallel.rank_process all TENSOR_SIZE PIPELINE_SIZE FOLDER MODEL...` writes what each rank
computed to FOLDER/rank-0, FOLDER/rank-1 and so on. It imports all modules once, and forks the ranks: to import them
takes most of a rank's time. With a rank's number instead of `all`, the process is that rank alone.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

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
    """Load the model with the other ranks, and answer the prompts twice."""
    try:
        loaded = ModelManager("cpu").load(Path(directory), "float32", None, ranks=ranks)
    except ConfigError as error:
        return Served(refusal=error.message)
    small = RanksEngine(loaded, ranks, num_blocks=9, max_num_seqs=6, max_num_batched_tokens=7)
    sequences = serve_with_joins_and_leaves(small, make_prompts(VOCAB_SIZE))
    large = RanksEngine(loaded, ranks, num_blocks=200)
    for _ in range(2):
        again = [large.add(prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in make_prompts(VOCAB_SIZE)]
        large.run()
    logprobs = logprobs_of(large)
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


def fork_ranks(num_ranks: int, run: Callable[[int], None]) -> None:
    """Run `run(rank)` in a process for each rank. If one of them fails, the others are ended. Raises its error.

    This process has computed nothing, so it has none of torch's threads, which would not go on in a fork. Forks have
    the same seed for the hashes of strings, so sets of strings have the same order in all of them. The ranks of a
    server have not: test_ranks_make_the_same_plans_with_sets_in_different_orders starts separate processes.
    """
    start_processes(run, nprocs=num_ranks, start_method="fork")


def main(which: str, tensor_size: str, pipeline_size: str, folder: str, *directories: str) -> None:
    """Serve each model with all ranks, or as one of them, and write what was computed."""
    sizes = int(tensor_size), int(pipeline_size)

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        ranks = Ranks(rank, *sizes, f"{folder}/rendezvous", torch.device("cpu"))
        served = [serve(ranks, directory) for directory in directories]
        Path(folder, f"rank-{rank}").write_bytes(msgspec.msgpack.encode(served))

    if which == "all":
        fork_ranks(sizes[0] * sizes[1], run)
    else:
        run(int(which))


if __name__ == "__main__":
    main(*sys.argv[1:])
