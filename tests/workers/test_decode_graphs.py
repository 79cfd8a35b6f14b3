"""Claims about decode steps as graphs. A graph here is what it repeats: on a CPU, a function that is called again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from servekit.sampling_params import SamplingParams
from workers.batch import Batch
from workers.decode_graphs import DecodeGraphs, Replay
from workers.paged_step import StepRows
from workers.sampler import SamplingRow

CPU = torch.device("cpu")


class Repeated:
    """Computes again, and answers where it answered first."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute, self.output = compute, compute()

    def replay(self) -> None:
        self.output.copy_(self._compute())


def capture(compute: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    repeated = Repeated(compute)
    return repeated, repeated.output


class Model:
    """Answers with what it was given, and counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.seen: StepRows | None = None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, rows: StepRows) -> Tensor:
        self.sizes.append(input_ids.shape[1])
        self.seen = rows
        tables = rows.block_table.double() @ torch.arange(1.0, rows.block_table.shape[1] + 1).double()
        told = (input_ids[0], position_ids[0], rows.lengths, rows.slot_mapping, tables)
        return torch.stack([each.double() for each in told], dim=1)


def batch_of(num_rows: int, width: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(1, 1000, shape, dtype=dtype, generator=generator)

    ones, lengths = np.ones(num_rows, dtype=np.int64), numbers(num_rows, dtype=torch.int32)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    table = numbers(num_rows, width, dtype=torch.int32)
    rows = StepRows(16, ones, lengths.numpy(), starts, lengths, table, numbers(num_rows))
    sampling = [SamplingRow(SamplingParams(max_tokens=1), 0)] * num_rows
    return Batch(numbers(num_rows), numbers(num_rows), rows, torch.arange(num_rows), numbers(num_rows), sampling, [])


def told(batch: Batch, width: int) -> Tensor:
    model = Model()
    table = torch.zeros(len(batch.rows.lengths), width, dtype=torch.int32)
    table[:, : batch.rows.block_table.shape[1]] = batch.rows.block_table
    rows = StepRows(16, *(None,) * 2, None, batch.rows.lengths, table, batch.rows.slot_mapping)  # type: ignore[arg-type]
    return model(batch.input_ids[None], batch.position_ids[None], rows)


def test_a_step_of_fewer_rows_than_the_graph_is_the_same_and_the_rest_is_padding() -> None:
    model = Model()
    graphs = DecodeGraphs(model, 20, 9, 16, CPU, capture)
    for seed, num_rows in enumerate([16, 9, 13, 16, 20, 17, 3, 4, 1]):
        batch = batch_of(num_rows, 1 + seed % 4, seed)
        output = graphs.run(batch)
        assert output.shape[0] == num_rows
        columns = [0, 1, 2, 3]  # tables keep what an earlier step left behind a row's own blocks
        assert torch.equal(output[:, columns], told(batch, 9)[:, columns])
        assert model.seen is not None
        assert (model.seen.lengths[num_rows:] == 0).all() and (model.seen.slot_mapping[num_rows:] == -1).all()
        assert torch.equal(model.seen.block_table[:num_rows, : 1 + seed % 4], batch.rows.block_table)


def test_the_largest_is_captured_at_once_and_each_other_one_when_it_is_needed() -> None:
    model = Model()
    graphs = DecodeGraphs(model, 20, 9, 16, CPU, capture)
    graphs.capture_largest()
    assert model.sizes == [20]
    graphs.run(batch_of(5, 1))
    graphs.run(batch_of(7, 1))
    assert model.sizes == [20, 8, 8, 8]  # captured once, then repeated twice
    graphs.run(batch_of(18, 1))
    assert model.sizes == [20, 8, 8, 8, 20]


def test_a_captured_graph_before_its_first_step_is_padding() -> None:
    """It runs when it is captured, and may write to nobody's cells."""
    seen: list[Tensor] = []

    def model(input_ids: Tensor, position_ids: Tensor, rows: StepRows) -> Tensor:
        seen.extend([rows.lengths.clone(), rows.slot_mapping.clone()])
        return torch.zeros(input_ids.shape[1], 1)

    DecodeGraphs(model, 4, 2, 16, CPU, capture).capture_largest()
    assert seen[0].tolist() == [0] * 4 and seen[1].tolist() == [-1] * 4


@pytest.mark.parametrize("max_num_rows", [1, 3, 256, 1000])
def test_what_is_no_decode_step_is_not_taken(max_num_rows: int) -> None:
    graphs = DecodeGraphs(Model(), max_num_rows, 9, 16, CPU, capture)
    assert graphs.takes(batch_of(1, 1))
    assert graphs.takes(batch_of(min(max_num_rows, 256), 1))
    assert not graphs.takes(batch_of(min(max_num_rows, 256) + 1, 1))
    chunk = batch_of(1, 1)
    chunk.position_ids = torch.arange(5)
    assert not graphs.takes(chunk)
    silent = batch_of(1, 1)
    silent.sampling = []
    assert not graphs.takes(silent)
