"""The claim: ranks and stages together compute what one process computes, and each reads only its part."""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.forked_ranks import run_ranks
from tests.support.inprocess import InProcessEngine
from tests.support.process_groups import run_together
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.parallel.rank_process import Served, logprobs_of, run_rank
from tests.workers.parallel.rank_without_kernels_process import Computed, run_rank_without_kernels
from tests.workers.test_token_identity import make_prompts, prepared

pytestmark = pytest.mark.long  # thousands of messages between processes, which may have to share two cores

# (tensor parallel, pipeline parallel) and the models. The models have 6 query heads, 2 key-value heads, and 3 layers.
# What 2 x 2 divides, both in ranks and in stages, is not divided by one of them alone again;
# but mixtral is, because pipelines have no drafts.
RANKS = {
    (2, 1): ["llama", "llama_wide", "qwen3_wide", "mixtral", "starcoder2", "w4a16_asymmetric", "w8a16"],
    (3, 1): ["llama", "gemma2", "w8a16_asymmetric"],
    (1, 2): ["qwen3", "w4a16", "granite_scaled"],  # these are fused as they are not divided in ranks
    (1, 3): ["llama"],
    (2, 2): ["llama_wide", "qwen3_wide", "gemma2", "mixtral", "w4a16"],
}
# Of each rank: key-value heads, rows of the vocabulary, layers. Where the number of ranks does not divide the two
# key-value heads, a rank holds those that its queries use.
PARTS = {
    (2, 1): [(1, 64, 3), (1, 64, 3)],
    (3, 1): [(1, 43, 3), (2, 43, 3), (1, 42, 3)],
    (1, 2): [(2, 0, 2), (2, 128, 1)],
    (1, 3): [(2, 0, 1), (2, 0, 1), (2, 128, 1)],
    (2, 2): [(1, 0, 2), (1, 0, 2), (1, 64, 1), (1, 64, 1)],
}
LOGPROB_TOLERANCE = 1e-4
TIMEOUT_S = 600
RANK_PROCESS = [sys.executable, "-m", "tests.workers.parallel.rank_process"]


def results_of(directory: Path, rank: int) -> list[Served]:
    return msgspec.msgpack.decode((directory / f"rank-{rank}").read_bytes(), type=list[Served])


@pytest.fixture(scope="module", params=RANKS, ids=lambda sizes: f"{sizes[0]}x{sizes[1]}")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    chosen: tuple[int, int] = request.param
    return chosen


@pytest.fixture(scope="module")
def served(sizes: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Served]]:
    """What each rank computed, by model."""
    directory = tmp_path_factory.mktemp("ranks")
    # The last model has no plan that divides it.
    paths = [str(prepared(name)[0].model.name_or_path) for name in (*RANKS[sizes], "gpt2")]
    run_ranks(run_rank, math.prod(sizes), *sizes, str(directory), paths, timeout_s=TIMEOUT_S)
    by_rank = [results_of(directory, rank) for rank in range(math.prod(sizes))]
    return {name: [results[i] for results in by_rank] for i, name in enumerate((*RANKS[sizes], "gpt2"))}


@functools.cache
def of_one_process(name: str) -> tuple[torch.Tensor, list[list[int]], list[list[float]]]:
    """Logits by transformers' own layers, sampled answers, and logprobs of prompts and answers."""
    loaded, _ = prepared(name)
    engine = InProcessEngine(loaded, num_blocks=200)
    sampled = [engine.add(prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in make_prompts(VOCAB_SIZE)]
    engine.run()
    return loaded.sample.logits, [sequence.output_token_ids for sequence in sampled], logprobs_of(engine)


def test_ranks_compute_what_one_process_computes(sizes: tuple[int, int], served: dict[str, list[Served]]) -> None:
    """Logits within 1e-5, greedy tokens those of `generate`, sampled ones and logprobs the same.

    Prompts are chunked, sequences are preempted, and prefixes are cached.
    """
    for name in RANKS[sizes]:
        logits, sampled, logprobs = of_one_process(name)
        for rank in served[name]:
            assert not rank.refusal
            if rank.num_vocabulary_rows:  # other stages have hidden states in place of logits
                distance = (torch.tensor(rank.logits) - logits).abs().max() / logits.abs().max()
                assert distance < 1e-5, f"{name}: logits differ by {distance:.2g}"
            assert rank.answers == prepared(name)[1]
            assert rank.again == sampled
            assert rank.drafted == (sampled if sizes[1] == 1 else [])
            for ours, expected in zip(rank.logprobs, logprobs, strict=True):
                assert ours == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
            assert rank.num_preemptions > 0
            assert rank.num_cached_tokens > 0
            assert rank.distance < 1e-3
            can_fuse = name.startswith(("llama", "qwen3", "w4", "w8", "granite")) and (
                sizes[0] == 1 or name.endswith("_wide")
            )
            assert (rank.decoder == "FusedDecoder") == can_fuse


def test_ranks_make_the_same_plans_with_sets_in_different_orders(tmp_path: Path) -> None:
    """Ranks that are separate processes, as on a server, each have their own seed for the hashes of strings."""
    path = str(prepared("llama")[0].model.name_or_path)
    arguments = ["2", "1", str(tmp_path), path]
    run_together(
        [["env", f"PYTHONHASHSEED={rank + 1}", *RANK_PROCESS, str(rank), *arguments] for rank in range(2)], TIMEOUT_S
    )
    _, sampled, _ = of_one_process("llama")
    for rank in range(2):
        (found,) = results_of(tmp_path, rank)
        assert found.answers == prepared("llama")[1]
        assert found.again == found.drafted == sampled


@pytest.mark.parametrize("missing", ["nothing", "compiler", "data type"])
def test_ranks_agree_on_fused_layers_where_one_machine_cannot_have_them(tmp_path: Path, missing: str) -> None:
    """If one rank did not take part in the decision, the other one would wait for it."""
    loaded, _ = prepared("llama_wide")
    run_ranks(run_rank_without_kernels, 2, str(tmp_path), str(loaded.model.name_or_path), missing, timeout_s=TIMEOUT_S)
    for rank in range(2):
        found = msgspec.msgpack.decode((tmp_path / f"rank-{rank}").read_bytes(), type=Computed)
        assert (found.decoder == "FusedDecoder") == (missing == "nothing")
        distance = (torch.tensor(found.logits) - loaded.sample.logits).abs().max() / loaded.sample.logits.abs().max()
        assert distance < 1e-5


def test_each_rank_holds_its_part(sizes: tuple[int, int], served: dict[str, list[Served]]) -> None:
    for name in RANKS[sizes]:
        parts = [(rank.num_kv_heads, rank.num_vocabulary_rows, rank.num_layers) for rank in served[name]]
        assert parts == PARTS[sizes]
        assert {rank.num_parameters for rank in served[name]} == {prepared(name)[0].info.num_parameters}


def test_architecture_without_a_plan_is_refused_and_named(
    sizes: tuple[int, int], served: dict[str, list[Served]]
) -> None:
    flag = "--pipeline-parallel-size" if sizes[1] > 1 else "--tensor-parallel-size"
    for rank in served["gpt2"]:
        assert f"architecture GPT2LMHeadModel cannot be served with {flag}" in rank.refusal
