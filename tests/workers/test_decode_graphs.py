"""Claims about decode steps as graphs. A graph here is what it repeats: on a CPU, a function that is called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from servekit.sampling_params import SamplingParams
from workers.batch import Batch, PromptRow
from workers.decode_graphs import Capture, DecodeGraphs, Forward, Replay
from workers.paged_step import StepRows
from workers.sampler import SamplingRow

CPU = torch.device("cpu")


@dataclass
class Repeated:
    """Computes again."""

    replay: Callable[[], None]


def capture(compute: Callable[[], None]) -> Replay:
    compute()
    return Repeated(compute)


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


def make_graphs(model: Forward, max_num_rows: int = 20, capture: Capture = capture) -> DecodeGraphs:
    return DecodeGraphs(model, max_num_rows, table_width=9, block_size=16, vocab_size=5, device=CPU, capture=capture)


def test_a_step_of_fewer_rows_than_the_graph_is_the_same_and_the_rest_is_padding() -> None:
    model = Model()
    graphs = make_graphs(model)
    for seed, num_rows in enumerate([16, 9, 13, 16, 20, 17, 3, 4, 1]):
        batch = batch_of(num_rows, 1 + seed % 4, seed)
        output = graphs.run(batch)
        assert output is not None and output.shape[0] == num_rows and output.dtype is torch.float32
        columns = [0, 1, 2, 3]  # tables keep what an earlier step left behind a row's own blocks
        assert torch.equal(output[:, columns], told(batch, 9)[:, columns].float())
        assert model.seen is not None
        assert (model.seen.lengths[num_rows:] == 0).all() and (model.seen.slot_mapping[num_rows:] == -1).all()
        assert torch.equal(model.seen.block_table[:num_rows, : 1 + seed % 4], batch.rows.block_table)


def test_the_largest_is_captured_at_once_and_each_other_one_when_it_is_needed() -> None:
    model = Model()
    graphs = make_graphs(model)
    graphs.capture_largest()
    assert model.sizes == [20]
    graphs.run(batch_of(5, 1))
    graphs.run(batch_of(7, 1))
    assert model.sizes == [20, 8, 8, 8]  # captured once, then repeated twice
    graphs.run(batch_of(18, 1))
    assert model.sizes == [20, 8, 8, 8, 20]


def test_a_graph_that_is_captured_sees_padding_whatever_the_step_before_it_was() -> None:
    """It runs when it is captured, and may write to nobody's cells."""
    seen: list[tuple[list[int], list[int]]] = []

    def model(input_ids: Tensor, position_ids: Tensor, rows: StepRows) -> Tensor:
        seen.append((rows.lengths.tolist(), rows.slot_mapping.tolist()))
        return torch.zeros(input_ids.shape[1], 5)

    graphs = make_graphs(model)
    graphs.capture_largest()
    graphs.run(batch_of(20, 1))
    graphs.run(batch_of(7, 1))
    padding = [([0] * size, [-1] * size) for size in (20, 8)]
    assert (seen[0], seen[2]) == tuple(padding) and seen[1] not in padding and seen[3] not in padding


def test_all_graphs_have_one_input_and_one_output() -> None:
    model, addresses = Model(), set()
    graphs = make_graphs(model)
    for num_rows in (20, 3, 16, 1, 20):
        logits = graphs.run(batch_of(num_rows, 9))
        assert logits is not None and model.seen is not None
        rows = model.seen
        tensors = (logits, rows.lengths, rows.block_table, rows.slot_mapping, rows.query_starts)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert all(tensor.is_contiguous() for tensor in tensors)
    assert len(addresses) == 1


def test_a_size_that_cannot_be_captured_is_told_of_once_and_costs_no_other_its_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = []

    def capture_large(compute: Callable[[], None]) -> Replay:
        attempts.append(compute)
        repeated = capture(compute)
        if model.sizes[-1] < 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return repeated

    model = Model()
    graphs = make_graphs(model, capture=capture_large)
    graphs.capture_largest()
    assert graphs.run(batch_of(7, 1)) is None and graphs.run(batch_of(8, 1)) is None
    assert len(attempts) == 2 and len(caplog.records) == 1
    assert caplog.messages[0].startswith("decode steps of 8 rows are launched one kernel at a time, from now on: CUDA")
    batch = batch_of(13, 2)
    logits = graphs.run(batch)
    assert logits is not None and torch.equal(logits[:, :4], told(batch, 9)[:, :4].float())


def test_what_the_largest_cannot_be_captured_for_is_for_the_loading_to_say() -> None:
    def fail(_: Callable[[], None]) -> Replay:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        make_graphs(Model(), capture=fail).capture_largest()


@pytest.mark.parametrize("max_num_rows", [1, 3, 256, 1000])
def test_what_is_no_decode_step_is_not_taken(max_num_rows: int) -> None:
    graphs = make_graphs(Model(), max_num_rows)
    assert graphs.run(batch_of(1, 1)) is not None
    assert graphs.run(batch_of(min(max_num_rows, 256), 1)) is not None
    assert graphs.run(batch_of(min(max_num_rows, 256) + 1, 1)) is None
    chunk = batch_of(1, 1)
    chunk.position_ids = torch.arange(5)
    silent = batch_of(1, 1)
    silent.sampling = []
    asking = batch_of(1, 1)
    asking.prompt_rows = [PromptRow(0, 0, 0, 1, 1, 0)]
    assert all(graphs.run(batch) is None for batch in (chunk, silent, asking))
