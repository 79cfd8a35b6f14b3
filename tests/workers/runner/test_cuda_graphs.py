"""Claims about decode steps as graphs. Here, on a CPU, a graph is a function that is called again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from servekit.protocol.sampling_params import SamplingParams
from workers.attention.interface import AttentionMetadata
from workers.batch import Batch, PromptLogprobsChunk, SamplingRow
from workers.device.triton_support import kernel_errors
from workers.runner.cuda_graphs import DecodeGraphs, Forward
from workers.runner.step_graphs import Capture, Replay

CPU = torch.device("cpu")
TritonError = kernel_errors()[-1]  # RuntimeError where Triton is not installed


@dataclass
class Repeated:
    """Computes again."""

    replay: Callable[[], None]


def capture(compute: Callable[[], None]) -> Replay:
    compute()
    return Repeated(compute)


class Model:
    """Returns its inputs as logits, and notes the size of each call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.seen: AttentionMetadata | None = None

    def __call__(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionMetadata) -> Tensor:
        self.sizes.append(input_ids.shape[1])
        self.seen = attention
        tables = attention.block_table.double() @ torch.arange(1.0, attention.block_table.shape[1] + 1).double()
        inputs = (input_ids[0], position_ids[0], attention.lengths, attention.slot_mapping, tables)
        return torch.stack([each.double() for each in inputs], dim=1)


def batch_of(num_rows: int, width: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(1, 1000, shape, dtype=dtype, generator=generator)

    ones, lengths = np.ones(num_rows, dtype=np.int64), numbers(num_rows, dtype=torch.int32)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    table = numbers(num_rows, width, dtype=torch.int32)
    attention = AttentionMetadata(16, ones, lengths.numpy(), starts, lengths, table, numbers(num_rows))
    sampling = [SamplingRow(SamplingParams(max_tokens=1), 0)] * num_rows
    return Batch(
        input_ids=numbers(num_rows),
        position_ids=numbers(num_rows),
        attention=attention,
        logits_indices=torch.arange(num_rows),
        sampled_cells=numbers(num_rows),
        sampling=sampling,
        prompt_logprobs=[],
        slots=np.arange(num_rows),
    )


def logits_of(batch: Batch, width: int) -> Tensor:
    """The model's logits without a graph."""
    model = Model()
    table = torch.zeros(len(batch.attention.lengths), width, dtype=torch.int32)
    table[:, : batch.attention.block_table.shape[1]] = batch.attention.block_table
    attention = replace(batch.attention, block_table=table)
    return model(batch.input_ids[None], batch.position_ids[None], attention)


def make_graphs(model: Forward, max_num_rows: int = 20, capture: Capture = capture) -> DecodeGraphs:
    return DecodeGraphs(model, max_num_rows, table_width=9, block_size=16, vocab_size=5, device=CPU, capture=capture)


def test_rows_beyond_a_smaller_step_are_padding() -> None:
    model = Model()
    graphs = make_graphs(model)
    graphs.capture_all()
    for seed, num_rows in enumerate([16, 9, 13, 16, 20, 17, 3, 4, 1]):
        batch = batch_of(num_rows, 1 + seed % 4, seed)
        output = graphs.run(batch)
        assert output is not None and output.shape[0] == num_rows and output.dtype is torch.float32
        columns = [0, 1, 2, 3]  # tables keep what an earlier step left behind a row's own blocks
        assert torch.equal(output[:, columns], logits_of(batch, 9)[:, columns].float())
        assert model.seen is not None
        assert (model.seen.lengths[num_rows:] == 0).all() and (model.seen.slot_mapping[num_rows:] == -1).all()
        assert torch.equal(model.seen.block_table[:num_rows, : 1 + seed % 4], batch.attention.block_table)


def test_all_graphs_are_captured_before_the_first_step_the_largest_first() -> None:
    model = Model()
    graphs = make_graphs(model)
    assert graphs.run(batch_of(5, 1)) is None, "nothing is captured while people wait"
    graphs.capture_all()
    assert model.sizes == [20, 16, 8, 4, 2, 1]
    graphs.run(batch_of(5, 1))
    graphs.run(batch_of(7, 1))
    graphs.run(batch_of(18, 1))
    assert model.sizes[6:] == [8, 8, 20]


def test_capturing_a_graph_sees_only_padding() -> None:
    """Capturing computes, too, and must not write to any sequence's cells."""
    seen: list[tuple[list[int], list[int]]] = []

    def model(input_ids: Tensor, position_ids: Tensor, attention: AttentionMetadata) -> Tensor:
        seen.append((attention.lengths.tolist(), attention.slot_mapping.tolist()))
        return torch.zeros(input_ids.shape[1], 5)

    graphs = make_graphs(model)
    graphs._inputs.fill(batch_of(20, 1), 20)  # as a step before would leave them
    graphs.capture_all()
    assert seen == [([0] * size, [-1] * size) for size in (20, 16, 8, 4, 2, 1)]


def test_a_graph_that_gives_other_logits_than_without_it_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def capture_eight_wrongly(compute: Callable[[], None]) -> Replay:
        compute()
        if model.sizes[-1] != 8:
            return Repeated(compute)

        def replay() -> None:
            compute()
            graphs.logits.add_(1000.0)

        return Repeated(replay)

    model = Model()
    graphs = make_graphs(model, capture=capture_eight_wrongly)
    graphs.capture_all()
    batch = batch_of(1, 9)
    graphs.check(batch, logits_of(batch, 9).float(), 1e-3)
    assert sorted(graphs._graphs) == [1, 2, 4, 16, 20]
    assert len(caplog.records) == 1 and "decode steps of 8 rows are launched one kernel" in caplog.messages[0]
    graphs.check(batch, logits_of(batch, 9).float() * torch.nan, 1e-3)
    assert not graphs._graphs, "NaN is no agreement"


def test_all_graphs_share_inputs_and_logits() -> None:
    model, addresses = Model(), set()
    graphs = make_graphs(model)
    graphs.capture_all()
    for num_rows in (20, 3, 16, 1, 20):
        logits = graphs.run(batch_of(num_rows, 9))
        assert logits is not None and model.seen is not None
        seen = model.seen
        tensors = (logits, seen.lengths, seen.block_table, seen.slot_mapping, seen.query_starts)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
        assert all(tensor.is_contiguous() for tensor in tensors)
    assert len(addresses) == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), TritonError("CUDA out of luck")])
def test_failed_capture_is_logged_and_other_sizes_keep_their_graphs(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def capture_large(compute: Callable[[], None]) -> Replay:
        repeated = capture(compute)
        if model.sizes[-1] == 8:
            raise error
        return repeated

    model = Model()
    graphs = make_graphs(model, capture=capture_large)
    graphs.capture_all()
    assert graphs.run(batch_of(7, 1)) is None and graphs.run(batch_of(8, 1)) is None
    assert len(caplog.records) == 1
    assert caplog.messages[0].startswith(
        "capturing a CUDA graph failed; decode steps of 8 rows are launched one kernel at a time: CUDA"
    )
    batch = batch_of(13, 2)
    logits = graphs.run(batch)
    assert logits is not None and torch.equal(logits[:, :4], logits_of(batch, 9)[:, :4].float())


def test_failed_capture_of_the_largest_graph_is_raised() -> None:
    def fail(_: Callable[[], None]) -> Replay:
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        make_graphs(Model(), capture=fail).capture_all()


@pytest.mark.parametrize("max_num_rows", [1, 3, 256, 1000])
def test_steps_other_than_decode_do_not_run_as_graphs(max_num_rows: int) -> None:
    graphs = make_graphs(Model(), max_num_rows)
    graphs.capture_all()
    assert graphs.run(batch_of(1, 1)) is not None
    assert graphs.run(batch_of(min(max_num_rows, 256), 1)) is not None
    assert graphs.run(batch_of(min(max_num_rows, 256) + 1, 1)) is None
    chunk = batch_of(1, 1)
    chunk.position_ids = torch.arange(5)
    silent = batch_of(1, 1)
    silent.sampling = []
    asking = batch_of(1, 1)
    asking.prompt_logprobs = [PromptLogprobsChunk(0, 0, 0, 1, 1, 0)]
    assert all(graphs.run(batch) is None for batch in (chunk, silent, asking))
