"""Two ranks that answer prompts with drafts, and what they answered; see tests/support/forked_ranks.py."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from tests.support.draft_heads import MAX_DRAFTS, settings_with_head
from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.parallel.rank_process import RanksEngine
from tests.workers.test_token_identity import make_prompts
from workers.loading.model_manager import ModelManager
from workers.parallel.ranks import Ranks
from workers.speculation.choose import load_drafter
from workers.speculation.drafter import DraftRequest


class Answered(msgspec.Struct):
    """What a rank answered, the drafts that it made by itself, and how many were accepted."""

    answers: list[list[int]]
    drafts: list[list[int]]
    num_accepted: int


def answer(engine: InProcessEngine) -> Answered:
    """Answer the prompts, greedily and at random."""
    drafts: list[list[int]] = []
    drafter = engine.runner.drafter
    if drafter is not None:
        propose = drafter.propose

        def watched(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
            proposed = propose(requests)
            drafts.extend(map(list, proposed))
            return proposed

        drafter.propose = watched  # type: ignore[method-assign]
    sampling = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    prompts = make_prompts(VOCAB_SIZE)
    sequences = [engine.add(prompt, temperature=0.7 * (i % 2), **sampling) for i, prompt in enumerate(prompts)]
    engine.run()
    answers = [list(sequence.output_token_ids) for sequence in sequences]
    return Answered(answers, drafts, sum(engine.manager.draft_lengths.num_accepted))


def run_rank(rank: int, folder: str, method: str, model: str, head: str) -> None:
    """Answer the prompts as one of two ranks, and write what was answered to FOLDER/rank-0 or FOLDER/rank-1."""
    torch.set_num_threads(1)
    ranks = Ranks(rank, 2, 1, f"{folder}/rendezvous", torch.device("cpu"))
    loaded = ModelManager("cpu").load(Path(model), "float32", None, ranks=ranks)
    drafter = load_drafter(loaded, settings_with_head(loaded, method, head))
    engine = RanksEngine(loaded, ranks, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafter)
    Path(folder, f"rank-{rank}").write_bytes(msgspec.msgpack.encode(answer(engine)))
