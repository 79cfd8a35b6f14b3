"""The claim: the ranks together compute what one process computes, and each reads only its part of the weights."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from tests.support.inprocess import InProcessEngine
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.parallel.rank_process import Served
from tests.workers.test_token_identity import make_prompts, prepared

pytestmark = pytest.mark.long  # thousands of messages between processes, which may have to share two cores

# Where the number of ranks does not divide the two key-value heads, each rank holds one for each of its query heads.
RANKS = {
    2: ["llama", "qwen3", "gemma2", "mixtral", "gpt2"],
    3: ["llama", "gemma2"],
}
TIMEOUT_S = 300


@pytest.fixture(scope="module", params=RANKS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Served]]:
    """What each rank computed, by model."""
    size: int = request.param
    directory = tmp_path_factory.mktemp("ranks")
    paths = [str(prepared(name)[0].model.name_or_path) for name in RANKS[size]]
    outputs = [directory / f"rank-{rank}" for rank in range(size)]
    command = [sys.executable, "-m", "tests.workers.parallel.rank_process"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), str(directory / "rendezvous"), str(output), *paths])
        for rank, output in enumerate(outputs)
    ]
    assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * size
    by_rank = [msgspec.msgpack.decode(output.read_bytes(), type=list[Served]) for output in outputs]
    return {name: [results[i] for results in by_rank] for i, name in enumerate(RANKS[size])}


def of_one_process(name: str) -> tuple[torch.Tensor, list[list[int]]]:
    """Logits by transformers' own layers, and sampled answers."""
    loaded, _ = prepared(name)
    engine = InProcessEngine(loaded, num_blocks=200)
    sampled = [engine.add(prompt, max_tokens=8, temperature=0.7, seed=3) for prompt in make_prompts(VOCAB_SIZE)]
    engine.run()
    return loaded.sample.logits, [sequence.output_token_ids for sequence in sampled]


def test_ranks_compute_what_one_process_computes(served: dict[str, list[Served]]) -> None:
    """Logits within 1e-5, greedy tokens those of `generate`, sampled ones the same; chunked, preempted and cached."""
    for name, ranks in served.items():
        if name == "gpt2":
            continue
        logits, sampled = of_one_process(name)
        for rank in ranks:
            assert not rank.refusal
            distance = (torch.tensor(rank.logits) - logits).abs().max() / logits.abs().max()
            assert distance < 1e-5, f"{name}: logits differ by {distance:.2g}"
            assert rank.answers == prepared(name)[1]
            assert rank.again == sampled
            assert rank.num_preemptions > 0
            assert rank.num_cached_tokens > 0
            assert rank.distance < 1e-3


def test_each_rank_holds_its_part(served: dict[str, list[Served]]) -> None:
    """Two ranks divide the two key-value heads; three ranks hold one for each of their two query heads."""
    for name, ranks in served.items():
        if name != "gpt2":
            num_parameters = prepared(name)[0].info.num_parameters
            assert {rank.num_parameters for rank in ranks} == {num_parameters}
            assert [rank.num_vocabulary_rows for rank in ranks] == ([64, 64] if len(ranks) == 2 else [43, 43, 42])
            assert [rank.num_kv_heads for rank in ranks] == ([1, 1] if len(ranks) == 2 else [1, 2, 1])


def test_architecture_without_a_plan_is_refused_by_name(served: dict[str, list[Served]]) -> None:
    for rank in served.get("gpt2", []):
        assert "architecture GPT2LMHeadModel cannot be served with --tensor-parallel-size 2" in rank.refusal
