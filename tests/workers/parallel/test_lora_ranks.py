"""The claim: ranks that have parts of a model and of its adapters answer as the merged model of one process does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.forked_ranks import run_ranks
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.lora.test_lora_pool import NUM_ADAPTERS, adapters_of, answer
from tests.workers.parallel.lora_rank_process import MAX_TOKENS, NUM_PLACES, run_rank
from tests.workers.test_token_identity import make_prompts

pytestmark = pytest.mark.long  # as test_ranks.py

TIMEOUT_S = 300


# The models have 6 query heads and 2 key-value heads: three ranks have heads of keys and values twice.
@pytest.mark.parametrize(("size", "names"), [(2, ["llama_wide", "gemma2"]), (3, ["llama"])])
def test_ranks_answer_as_merged_models_do(size: int, names: list[str], tmp_path: Path) -> None:
    directories = [str(adapters_of(name)[0].parent) for name in names]
    run_ranks(run_rank, size, size, str(tmp_path), directories, timeout_s=TIMEOUT_S)
    prompts = make_prompts(VOCAB_SIZE)
    for rank in range(size):
        answers = msgspec.msgpack.decode((tmp_path / f"rank-{rank}").read_bytes())
        for name, found in zip(names, answers, strict=True):
            expected: list[list[int]] = []
            for first in (*range(0, NUM_ADAPTERS, NUM_PLACES), 0):
                batch = [*((index + 1, index) for index in range(first, first + NUM_PLACES)), (0, 0)]
                expected += [answer(name, model, tuple(prompts[index]), MAX_TOKENS) for model, index in batch]
            assert found == expected
