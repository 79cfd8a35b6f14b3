"""Claims about steps with prompts as graphs. Here, on a CPU, a graph is a function that is called again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from servekit.protocol.sampling_params import SamplingParams
from tests.workers.runner.test_cuda_graphs import capture
from workers.attention.interface import AttentionMetadata
from workers.batch import Batch, PromptLogprobsChunk, SamplingRow
from workers.runner.mixed_graphs import MixedGraphs

NUM_ROWS, WIDTH = 6, 9


def batch_of(num_queries: list[int], num_sampled: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(1, 1000, shape, dtype=dtype, generator=generator)

    num_rows, num_tokens = len(num_queries), sum(num_queries)
    lengths = numbers(num_rows, dtype=torch.int32)
    starts = torch.tensor([0, *np.cumsum(num_queries)], dtype=torch.int32)
    table = numbers(num_rows, 1 + seed % WIDTH, dtype=torch.int32)
    counts = np.array(num_queries), lengths.numpy()
    attention = AttentionMetadata(16, *counts, starts, lengths, table, numbers(num_tokens))
    return Batch(
        input_ids=numbers(num_tokens),
        position_ids=numbers(num_tokens),
        attention=attention,
        logits_indices=torch.randint(0, num_tokens, (num_sampled,), generator=generator),
        sampled_cells=numbers(num_sampled),
        sampling=[SamplingRow(SamplingParams(max_tokens=1), 0)] * num_sampled,
        prompt_logprobs=[],
        slots=np.arange(num_rows),
    )


@dataclass
class Model:
    """Returns what it was given of each token as its logits."""

    seen: AttentionMetadata | None = None
    num_tokens: int = 0

    def __call__(self, ids: Tensor, positions: Tensor, attention: AttentionMetadata, indices: Tensor) -> Tensor:
        self.seen, self.num_tokens = attention, ids.shape[1]
        row = torch.searchsorted(attention.query_starts[1:].long(), torch.arange(ids.shape[1]), right=True)
        row = row.clamp(max=len(attention.lengths) - 1)
        tables = attention.block_table.double() @ torch.arange(1.0, attention.block_table.shape[1] + 1).double()
        inputs = (ids[0], positions[0], attention.slot_mapping, attention.lengths[row], tables[row])
        return torch.stack([each.double() for each in inputs], dim=1)[indices]


def make_graphs(model: Model, max_num_tokens: int = 40) -> MixedGraphs:
    graphs = MixedGraphs(model, max_num_tokens, WIDTH, 16, torch.zeros(NUM_ROWS, 5), capture)
    graphs.capture_all()
    return graphs


def test_tokens_and_sequences_beyond_a_smaller_step_are_padding() -> None:
    model = Model()
    graphs = make_graphs(model)
    for seed, (num_queries, num_sampled) in enumerate(
        [([9, 1, 1], 3), ([1, 1, 30, 5], 2), ([2, 1, 1, 1, 1, 1], 6), ([3], 0), ([5, 5], 2), ([40], 1), ([17, 1], 2)]
    ):
        batch = batch_of(num_queries, num_sampled, seed)
        logits = graphs.run(batch)
        assert logits is not None and model.seen is not None
        num_rows, num_tokens, seen = len(num_queries), sum(num_queries), model.seen
        expected = Model()(batch.input_ids[None], batch.position_ids[None], batch.attention, batch.logits_indices)
        assert torch.equal(logits[:, :4], expected[:, :4].float()), (
            "the table keeps what an earlier step left behind it"
        )
        assert torch.equal(seen.block_table[:num_rows, : 1 + seed % WIDTH], batch.attention.block_table)
        assert (seen.slot_mapping[num_tokens:] == -1).all() and (seen.lengths[num_rows:] == 0).all()
        assert seen.query_starts.diff()[:num_rows].tolist() == num_queries
        assert not seen.query_starts.diff()[num_rows:].any(), "the other sequences have no tokens"
        assert model.num_tokens >= num_tokens == int(seen.query_starts[-1])


def test_capturing_a_graph_sees_only_padding() -> None:
    model = Model()
    graphs = make_graphs(model)
    graphs.run(batch_of([30, 1], 2))
    graphs.capture_all()
    assert model.seen is not None and model.num_tokens == 16
    assert not model.seen.query_starts.any() and not model.seen.lengths.any() and (model.seen.slot_mapping == -1).all()


def test_steps_of_one_token_each_and_steps_that_are_too_large_run_without_these_graphs() -> None:
    graphs = make_graphs(Model())
    assert graphs.run(batch_of([3, 1], 2)) is not None
    asking = batch_of([3, 1], 2)
    asking.prompt_logprobs = [PromptLogprobsChunk(0, 0, 0, 1, 1, 0)]
    too_many_rows, too_many_samples = batch_of([2] + [1] * NUM_ROWS, 1), batch_of([9, 9], NUM_ROWS + 1)
    for batch in (batch_of([1, 1], 2), batch_of([40, 1], 2), too_many_rows, too_many_samples, asking):
        assert graphs.run(batch) is None


@pytest.mark.parametrize(("max_num_tokens", "sizes"), [(5, [5]), (16, [16]), (50, [16, 24, 32, 48, 50])])
def test_graphs_are_no_larger_than_steps_can_be(max_num_tokens: int, sizes: list[int]) -> None:
    assert make_graphs(Model(), max_num_tokens)._sizes == sizes


@pytest.mark.parametrize("num_rows", [15, 16, 24])
def test_no_graph_has_as_many_sequences_as_tokens(num_rows: int) -> None:
    """Attention would take each of them to have one token."""
    model = Model()
    MixedGraphs(model, 17, WIDTH, 16, torch.zeros(num_rows, 5), capture).capture_all()
    assert model.seen is not None and len(model.seen.lengths) not in (16, 17)
